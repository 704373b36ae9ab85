"""What a turn costs in the verifier's client, beside the same two calls read off a plain socket.

    python -m tools.bench client --json=client.json

A turn is an act, answered with a screenshot of 1280x800 pixels (a page of text, PNG), and a look at
the progress; one turn at a time, over loopback, with a server that knows its two answers by heart
and is a process of its own. The plain reader keeps one connection open, reads what
Content-Length says and looks at nothing. Both take turns in rounds; medians of the rounds' means.
"""

import argparse
import asyncio
import io
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from PIL import Image, ImageDraw

from tools.bench import loopback
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient

SCREEN_PX = (1280, 800)
PROGRESS = {"num_clicks": 1, "done": False, "reward": None}
WARM_UP_TURNS = 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=100, help="of a round")


def run(args: argparse.Namespace) -> dict[str, Any]:
    with loopback.serving("tools.bench.client") as port:
        result = asyncio.run(measure(port, args.rounds, args.turns))
    return result | {"screenshot_bytes": len(screen_png())}


def screen_png() -> bytes:
    """A page of words, about as large as a browser's."""
    image = Image.new("RGB", SCREEN_PX, (250, 250, 252))
    draw = ImageDraw.Draw(image)
    for row in range(20):
        for column in range(8):
            place = (8 + 158 * column, 6 + 40 * row)
            color = (37 * row % 200, 53 * column % 200, 90)
            draw.text(place, f"word {row * column:04d}", fill=color)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def serve() -> None:
    """The server's process."""
    png = screen_png()
    session = dict(zip(("screen_width", "screen_height"), SCREEN_PX, strict=True))
    opened = {"sessions": [{"id": "s1", "instruction": "Look.", **session}]}

    async def screen(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=png, content_type="image/png")

    app = web.Application()
    app.router.add_post("/session", lambda _: _json(opened))
    app.router.add_post("/session/s1/act", screen)
    app.router.add_get("/session/s1/progress", lambda _: _json(PROGRESS))
    loopback.serve(app)


async def _json(value: object) -> web.Response:
    return web.json_response(value)


async def _plain_turn(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
) -> None:
    body = json.dumps({"action_type": "left_click", "request_id": f"p{number}"}).encode()
    head = f"POST /session/s1/act HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    for request in (
        f"{head}Content-Type: application/json\r\n\r\n".encode() + body,
        b"GET /session/s1/progress HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        writer.write(request)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").lower()
        length = answer.split("content-length:")[1].split("\r\n")[0]
        await reader.readexactly(int(length))


async def measure(port: int, rounds: int, turns: int) -> dict[str, Any]:
    """Mean milliseconds of wall and of this process's CPU for a turn, by who takes it."""
    async with VerifierClient(f"http://127.0.0.1:{port}") as client:
        session = await client.create(TaskSpec("desktop/click_button", 0))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)

        async def ours(number: int) -> None:
            await client.act(session.id, Action("click", x=10, y=10), f"r{number}")
            await client.progress(session.id)

        async def plain(number: int) -> None:
            await _plain_turn(reader, writer, number)

        takers: dict[str, Callable[[int], Awaitable[None]]] = {"ours": ours, "plain": plain}
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in takers}
        for round_number in range(rounds + 1):
            for name, take in takers.items():
                count = turns if round_number else WARM_UP_TURNS
                started_s, started_cpu_s = time.perf_counter(), time.process_time()
                for number in range(count):
                    await take(number)
                wall_s = time.perf_counter() - started_s
                cpu_s = time.process_time() - started_cpu_s
                if round_number:
                    measured[name].append((1000 * wall_s / count, 1000 * cpu_s / count))
        writer.close()
        await writer.wait_closed()
    result: dict[str, Any] = {}
    for name, pairs in measured.items():
        walls, cpus = zip(*pairs, strict=True)
        result[name] = {"wall_ms": statistics.median(walls), "cpu_ms": statistics.median(cpus)}
    result["overhead"] = {
        key: result["ours"][key] - result["plain"][key] for key in ("wall_ms", "cpu_ms")
    }
    return result | {"ratio": {"plain": result["ours"]["wall_ms"] / result["plain"]["wall_ms"]}}


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{'a turn':12s}{'wall':>10s}{'CPU':>10s}"]
    for name in ("ours", "plain", "overhead"):
        row = result[name]
        lines.append(f"{name:12s}{row['wall_ms']:7.2f} ms{row['cpu_ms']:7.2f} ms")
    lines.append(f"screenshot of {result['screenshot_bytes'] / 1000:.0f} kB")
    return "\n".join(lines)


if __name__ == "__main__":
    serve()
