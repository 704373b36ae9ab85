"""What an actor host costs beside its engine: cores, memory, turns a second.

    python -m tools.bench host --json=host.json

One `Player` plays so many episodes at once against a server in a process of its own that takes
1.2 s for an action and answers with screenshots of a desktop, drawn and encoded beforehand. The
engine answers with a click, so that all that this process does is the host's (HTTP, the checks of
what comes back, contexts, records) and the pixels, which are the engine's own input: it has them
decoded and cut into patches as `engine.Engine` does, every screen as if it had never been seen. A
second play is of an engine that has all their tokens and reads no pixel (`known`): the host alone.

Measured from when all episodes play, for a while: CPU seconds over wall seconds of this process
less those that the threads for pixels took (`cores`), and of these threads (`pixel_cores`); the
high-water mark of its memory; turns; both a turn; and how much later than 1.2 s after an answer of
the engine an episode asks it again (`late_ms`, median). What one screenshot costs to decode, to
resize and to cut is told beside that.
"""

import argparse
import asyncio
import dataclasses
import io
import itertools
import json
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

from tools.bench import loopback
from tools.bench.processes import answer_of
from uirl_jax import assets
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.player import Player
from uirl_jax.actor.rollout import RolloutConfig
from uirl_jax.engine.pixels import PixelReader
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.screens import decode_image
from uirl_jax.families.table import family_of
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop

ACT_S = 1.2
WARM_S = 4 * ACT_S  # until every episode has taken a turn or two
MODEL = assets.DIRECTORY / "tiny-ui-base"  # its words
NUM_SCREENS = 16
TARGETS = {"cores": 1.0, "peak_gib": 2.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=int, default=256, help="at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, of each size")
    parser.add_argument("--sizes", nargs="+", default=["224x168", "1280x800"], help="of screens")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{"ours": {play: numbers}, "targets": ...}."""
    ours = {}
    for size in args.sizes:
        arguments = (size, str(args.episodes), str(args.seconds))
        # Each in a process of its own, whose high-water mark is its own too.
        ours[size] = answer_of("tools.bench.host", "host", *arguments)
        ours[f"{size} known"] = answer_of("tools.bench.host", "host-known", *arguments)
    return {"ours": ours, "targets": TARGETS}


def format_table(result: dict[str, Any]) -> str:
    names = (
        "cores",
        "peak_gib",
        "pixel_cores",
        "turns_per_s",
        "ms_a_turn",
        "pixel_ms_a_turn",
        "decode_ms",
        "resize_ms",
        "cut_ms",
        "late_ms",
    )
    lines = [f"{'':16}" + "".join(f"{name:>16}" for name in names)]
    for play, numbers in result["ours"].items():
        lines.append(f"{play:16}" + "".join(f"{numbers[name]:16.2f}" for name in names))
    limits = "".join(f"{TARGETS[name]:16.2f}" if name in TARGETS else "" for name in names)
    return "\n".join([*lines, f"{'at most':16}{limits}"])


class ClickingEngine:
    """Answers a click on another place every time, once it has the pixels. A `SamplingEngine`."""

    def __init__(self, chat: Chat, size: tuple[int, int], pixels: PixelReader | None) -> None:
        self._pixels = pixels
        places = ((x * size[0] // 8, y * size[1] // 8) for x in range(1, 8) for y in range(1, 8))
        self._answers = itertools.cycle(
            [chat.completion_ids(f"click({x}, {y})") for x, y in places]
        )
        self.turns = 0
        self.between_s: list[float] = []  # an answer and the next question of the same episode
        self._answered_s: dict[str, float] = {}

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.turns += 1
        now_s = time.perf_counter()
        if request.episode in self._answered_s:
            self.between_s.append(now_s - self._answered_s[request.episode])
        if self._pixels is not None:
            # The server has few screens; a key of its own makes each a new one.
            screen = dataclasses.replace(request.screens[-1], key=f"{self.turns}")
            await self._pixels.read(screen)
        self._answered_s[request.episode] = time.perf_counter()
        ids = next(self._answers)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return SampleResult(ids, logprobs, 0, True, logprobs, np.zeros(len(ids), np.int32))

    def release(self, episode: str) -> None:
        self._answered_s.pop(episode, None)

    def set_policy(self, lora: object, version: int) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"engine/requests": float(self.turns)}


async def play(
    url: str, size: tuple[int, int], episodes: int, seconds: float, *, known: bool
) -> dict[str, float]:
    """The host's own numbers."""
    family = family_of(MODEL)
    # The image processor's defaults: the small model's own limit is below the larger screens.
    cfg = dataclasses.replace(family.read_config(MODEL), images=ImageConfig())
    inputs = family.make_inputs(cfg)
    chat = Chat(MODEL, ChatConfig(), family.chat)
    pixels = PixelReader(inputs)
    pixels.open()
    engine = ClickingEngine(chat, size, None if known else pixels)
    rollout_cfg = RolloutConfig(max_context_tokens=100_000, episode_timeout_s=600.0)
    async with Fleet(lambda: [url]) as fleet:
        player = Player(fleet, engine, chat, inputs, rollout_cfg, concurrency=episodes)

        async def keep_playing(number: int) -> None:
            for again in itertools.count():
                # As long as an episode of a real task, and not all ending at the same time.
                task = TaskSpec("bench", number, max_turns=6 + (number + again) % 9)
                await player.play(task, number, "bench")

        async with asyncio.TaskGroup() as owner:
            tasks = [owner.create_task(keep_playing(number)) for number in range(episodes)]
            await asyncio.sleep(WARM_S)
            while engine.turns < episodes:
                await asyncio.sleep(0.1)
            engine.between_s.clear()
            turns, cpu_s, start_s = engine.turns, time.process_time(), time.perf_counter()
            pixels_s = pixels.cpu_s
            await asyncio.sleep(seconds)
            wall_s = time.perf_counter() - start_s
            pixels_s = pixels.cpu_s - pixels_s
            cpu_s, turns = time.process_time() - cpu_s - pixels_s, engine.turns - turns
            between_s = statistics.median(engine.between_s)
            env_errors = player.statistics.read()["actor/env_errors"]
            for task in tasks:
                task.cancel()
    pixels.close()
    return {
        "cores": cpu_s / wall_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "turns_per_s": turns / wall_s,
        "pixel_cores": pixels_s / wall_s,
        "ms_a_turn": 1e3 * cpu_s / turns,
        "pixel_ms_a_turn": 1e3 * pixels_s / turns,
        **image_cpu_ms(size, inputs),
        "late_ms": 1e3 * (between_s - ACT_S),
        "env_errors": env_errors,
    }


def image_cpu_ms(size: tuple[int, int], inputs: Inputs) -> dict[str, float]:
    """What a screenshot costs by itself, CPU: to decode it, to resize it and to cut it."""
    took_s: dict[str, list[float]] = {"decode_ms": [], "resize_ms": [], "cut_ms": []}
    size_px = inputs.plan_screen(size).seen_px
    for screen in list(itertools.islice(draw(size), 2)) * 5:
        times_s = [time.thread_time()]
        image = decode_image(screen)
        times_s.append(time.thread_time())
        image = image.resize(size_px, Image.Resampling.BICUBIC)
        times_s.append(time.thread_time())
        inputs.cut_screen(image)
        times_s.append(time.thread_time())
        for name, (before_s, after_s) in zip(took_s, itertools.pairwise(times_s), strict=True):
            took_s[name].append(after_s - before_s)
    return {name: 1e3 * statistics.median(each_s) for name, each_s in took_s.items()}


# ----------------------------------------------------------------------------------- the server


def draw(size: tuple[int, int]) -> Iterator[bytes]:
    """PNGs of that size, tiled with screens of the hermetic desktop that all differ."""
    for seed in range(NUM_SCREENS):
        sheet = Image.new("RGB", size)
        tiles = itertools.product(range(0, size[0], 224), range(0, size[1], 168))
        for number, place in enumerate(tiles):
            task = TaskSpec("desktop/click_button", 1000 * seed + number)
            sheet.paste(desktop.open_session(task).screenshot(), place)
        buffer = io.BytesIO()
        sheet.save(buffer, "PNG", compress_level=1)
        yield buffer.getvalue()


def serve(size: tuple[int, int]) -> None:
    """The server's process: g1+, an action takes ACT_S."""
    screens = list(draw(size))
    numbers = itertools.count()

    def png() -> web.Response:
        return web.Response(body=screens[next(numbers) % NUM_SCREENS], content_type="image/png")

    async def create(request: web.Request) -> web.Response:
        session_id = f"s{next(numbers)}"
        session = {"id": session_id, "instruction": "Click the red button."}
        session |= {"screen_width": size[0], "screen_height": size[1]}
        return web.json_response({"session_ids": [session_id], "sessions": [session]})

    async def screenshot(request: web.Request) -> web.Response:
        return png()

    async def act(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(ACT_S)
        return png()

    async def progress(request: web.Request) -> web.Response:
        return web.json_response({"done": False, "reward": None})

    async def delete(request: web.Request) -> web.Response:
        return web.json_response({"deleted": request.match_info["id"]})

    app = web.Application()
    app.add_routes(
        [
            web.post("/session", create),
            web.get("/session/{id}/screenshot", screenshot),
            web.post("/session/{id}/act", act),
            web.get("/session/{id}/progress", progress),
            web.delete("/session/{id}", delete),
        ]
    )
    loopback.serve(app)


def host(size: str, episodes: int, seconds: float, *, known: bool) -> dict[str, float]:
    """The host's process: starts the server, plays against it, ends it."""
    with loopback.serving("tools.bench.host", "serve", size) as port:
        url = f"http://127.0.0.1:{port}"
        return asyncio.run(play(url, _pixels(size), episodes, seconds, known=known))


def _pixels(size: str) -> tuple[int, int]:
    width_px, height_px = map(int, size.split("x"))
    return width_px, height_px


def main() -> None:
    """The server's process, and the host's (used by `python -m tools.bench host`)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.host", allow_abbrev=False)
    parser.add_argument("role", choices=("serve", "host", "host-known"))
    parser.add_argument("size")
    parser.add_argument("episodes", type=int, nargs="?", default=256)
    parser.add_argument("seconds", type=float, nargs="?", default=20.0)
    args = parser.parse_args()
    if args.role == "serve":
        serve(_pixels(args.size))
    else:
        known = args.role == "host-known"
        print(json.dumps(host(args.size, args.episodes, args.seconds, known=known)))


if __name__ == "__main__":
    main()
