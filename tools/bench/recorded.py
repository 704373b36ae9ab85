"""Turns a second of recorded steps, in process and over HTTP, beside a live page in a browser.

    python -m tools.bench recorded --rounds=3
    python -m tools.bench recorded --set=gui/rows.parquet --live

Whole episodes as the actor plays them, with random actions in place of a model: a session, its
screenshot (decoded, as every engine does), an action, the progress, and the record. Groups of eight
attempts at one instance, as in training, `--sessions` at once. The ways take turns, in rounds;
medians are printed. "alone" are the same calls without actor and record, as `playing` counts them:
what the verifier could give. CPU time is this process's, of a turn with the actor. Without `--set`
the pictures are desktops of 224x168 pixels that are drawn here; `--live` plays the sixteen tasks of
MiniWoB++ through the bundled server and Chromium.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import io
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.miniwob_tasks import MAX_TURNS
from uirl_jax import assets
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.containers.containers import Client
from uirl_jax.verifiers.recorded import parquet, sets
from uirl_jax.verifiers.recorded.in_process import RecordedClient
from uirl_jax.verifiers.recorded.row import Box, Row, Step
from uirl_jax.verifiers.server import supervisor
from uirl_jax.verifiers.tasks import desktop

MODEL = "asset:tiny-ui-base"  # its tokenizer and its pictures' sizes; no weights
RECORDED = "recorded/bench"
GROUP_SIZE = 8
IN_PROCESS, HTTP, BROWSER = "in process", "HTTP", "live page"
DRAWN_ROWS = 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", default="", help="a parquet of tools.prepare_gui_data")
    parser.add_argument("--sessions", type=int, default=16, help="at once")
    parser.add_argument("--episodes", type=int, default=512, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", action="store_true", help="a page in Chromium too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{way: numbers}, and `ratio` of recorded steps in process to each other way."""
    with tempfile.TemporaryDirectory() as name:
        path = args.set or str(Path(name) / "rows.parquet")
        if not args.set:
            parquet.write_rows(Path(path), drawn_rows(DRAWN_ROWS))
        port_file = Path(name) / "port"
        with supervisor.bundled_server(port_file, Path(name) / "log", recorded={"bench": path}):
            (url,) = supervisor.read_urls(port_file)
            rounds = asyncio.run(_rounds(args, path, url))
    result: dict[str, Any] = {
        way: {
            "turns_per_s": statistics.median(each["turns_per_s"] for each in found),
            "alone_turns_per_s": statistics.median(each["alone_turns_per_s"] for each in found),
            "cpu_ms_here": statistics.median(each["cpu_ms_here"] for each in found),
            "env_errors": sum(each["env_errors"] for each in found),
        }
        for way, found in rounds.items()
    }
    fast = result[IN_PROCESS]["turns_per_s"]
    result["ratio"] = {way: fast / result[way]["turns_per_s"] for way in rounds}
    alone = result[IN_PROCESS]["alone_turns_per_s"]
    result["ratio_alone"] = {way: alone / result[way]["alone_turns_per_s"] for way in rounds}
    result["wrong"] = [f"{way}: env_error" for way in rounds if result[way]["env_errors"]]
    return result


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{'':12}{'turns/s':>10}{'CPU ms':>10}{'ratio':>8}{'alone':>10}{'ratio':>8}"]
    for way, ratio in result["ratio"].items():
        one = result[way]
        played = f"{one['turns_per_s']:10.1f}{one['cpu_ms_here']:10.2f}{ratio:8.1f}"
        alone = f"{one['alone_turns_per_s']:10.1f}{result['ratio_alone'][way]:8.1f}"
        lines.append(f"{way:12}{played}{alone}")
    return "\n".join([*lines, *result["wrong"]])


def drawn_rows(count: int) -> list[Row]:
    """Buttons of the hermetic desktop with the box of the right one."""
    rows = []
    for seed in range(count):
        session = desktop.open_session(TaskSpec("desktop/click_button", seed))
        x0, y0, x1, y1 = session.targets[session.goal]
        box = Box(x0, y0, x1 - 1, y1 - 1)
        png = io.BytesIO()
        session.screenshot().save(png, "PNG", compress_level=1)
        x, y = (int(side) for side in box.centre)
        size = (session.width_px, session.height_px)
        step = Step(png.getvalue(), *size, Action("click", x=x, y=y), box)
        rows.append(Row(f"drawn-{seed}", "drawn", "train", session.instruction, (step,)))
    return rows


async def _rounds(
    args: argparse.Namespace, path: str, url: str
) -> dict[str, list[dict[str, float]]]:
    recorded = [TaskSpec(RECORDED, 0, max_turns=1)]
    live = [TaskSpec(f"miniwob/{name}", 0, max_turns=turns) for name, turns in MAX_TURNS.items()]
    ways = {IN_PROCESS: recorded, HTTP: recorded} | ({BROWSER: live} if args.live else {})
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    async with _clients(path, url) as clients:
        for number in range(args.rounds + 1):
            for way, kinds in ways.items():
                client = clients[IN_PROCESS if way == IN_PROCESS else HTTP]
                # A browser plays fewer episodes in the time.
                groups = args.episodes // GROUP_SIZE // (4 if way == BROWSER else 1)
                numbers = await _round(client, kinds, groups, args.sessions, number)
                if number:  # the first one warms up
                    found[way].append(numbers)
    return found


@contextlib.asynccontextmanager
async def _clients(path: str, url: str) -> AsyncIterator[dict[str, Client]]:
    async with (
        RecordedClient(sets.load({"bench": path})) as local,
        VerifierClient(url) as remote,
    ):
        yield {IN_PROCESS: local, HTTP: remote}


async def _round(
    client: Client, kinds: Sequence[TaskSpec], groups: int, sessions: int, number: int
) -> dict[str, float]:
    model = assets.find(MODEL)
    family = family_of(model)
    chat = Chat(model, ChatConfig().completed("", model), family.chat)
    inputs = family.make_inputs(family.read_config(model))
    setup = RolloutSetup(client, RandomEngine(chat), chat, inputs, RolloutConfig())
    seeds = np.random.default_rng(number).integers(0, 2**30, groups).tolist()
    specs = [dataclasses.replace(kinds[n % len(kinds)], seed=seed) for n, seed in enumerate(seeds)]
    plan = iter([(spec, member) for spec in specs for member in range(GROUP_SIZE)])
    turns = env_errors = 0

    async def work() -> None:
        nonlocal turns, env_errors
        for spec, member in plan:
            trajectory = await run_episode(spec, setup, seed=member, group_id="bench")
            turns += len(trajectory.turns)
            env_errors += trajectory.stop_reason is StopReason.ENV_ERROR

    started_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(sessions)))
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return {
        "turns_per_s": turns / elapsed_s,
        "alone_turns_per_s": await _alone(client, specs, sessions),
        "cpu_ms_here": 1e3 * cpu_s / max(1, turns),
        "env_errors": float(env_errors),
    }


async def _alone(client: Client, specs: Sequence[TaskSpec], sessions: int) -> float:
    """Turns a second of the calls of such episodes, with a click anywhere as every action."""
    plan = iter([(spec, member) for spec in specs for member in range(GROUP_SIZE)])
    turns = 0

    async def work() -> None:
        nonlocal turns
        for spec, member in plan:
            rng = np.random.default_rng([spec.seed, member])
            session = await client.create(spec)
            await client.screenshot(session.id)
            for _ in range(spec.max_turns):
                x, y = (int(rng.integers(px)) for px in (session.width_px, session.height_px))
                await client.act(session.id, Action("click", x=x, y=y), uuid.uuid4().hex)
                turns += 1
                if (await client.progress(session.id))["done"]:
                    break
            await client.delete(session.id)

    started_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(sessions)))
    return turns / (time.perf_counter() - started_s)
