"""What verifiers' faults do to the actor: every fault alone, every bad input, then all mixed.

    python -m tools.bench faults --json=faults.json

The actor is the real one (client, rollout, player, host, shard writer), the verifier is the bundled
server behind `proxy`, in a process of its own, over loopback. No model runs: `ScriptedEngine`
stands where an engine does and says what the desktop's scripted demonstrator would do. Time-outs
are short where something hangs (LIMITS), so that it ends soon; nothing else differs from a run.

  alone    every fault at each call where it may strike, once and always; each episode must end
           as `proxy.survives` says. `run_tasks`, and no episode is played again.
  inputs   every answer of `inputs`, each to be met as it says there; and bad actions.
  mixed    10 % of all calls go wrong, one way or another, while `run_actor` fills shards.
  dialects the same mixture in the dialects of the field, episode by episode (`dialects`).

Exit code 1 where a check fails: something crashed, took longer than its time-out, grew, was paid
for by a fault, ended otherwise than it should, or is in no account.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tools.bench import loopback
from tools.bench.faults import dialects, plays, proxy
from tools.bench.faults.actor import World, task_of
from tools.bench.faults.checks import check, rows_of
from tools.bench.faults.inputs import INPUTS, POLICY_TEXTS


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is played."""

    faults: tuple[str, ...] = tuple(proxy.FAULTS)
    repeats: int = 2  # of each place where a fault may strike
    inputs: tuple[str, ...] = tuple(INPUTS)
    texts: tuple[str, ...] = tuple(POLICY_TEXTS)
    mixed_episodes: int = 2000  # published ones; those that faults ended are played again on top
    dialect_episodes: int = 200  # of each dialect but g1+
    concurrency: int = 32
    at_once: int = 1  # faults and inputs; with more, their memory is not told apart


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=int, default=2000, help="of the mixed run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return play_all(Settings(mixed_episodes=args.episodes))


def play_all(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays everything; `wrong` in the result are the checks that do not hold."""
    logging.disable(logging.WARNING)  # a line for every fault

    async def play(port: int) -> dict[str, Any]:
        world = World(port, settings.concurrency)
        await world.play("none", [task_of(seed) for seed in range(64)])  # warms up
        places = asyncio.Semaphore(settings.at_once)

        async def row(name: str, played: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
            async with places:
                told = await played
            say(format_row(name, told))
            return told

        async def rows(
            names: Sequence[str], play_one: Callable[[str], Coroutine[Any, Any, dict[str, Any]]]
        ) -> dict[str, dict[str, Any]]:
            played = await asyncio.gather(*(row(name, play_one(name)) for name in names))
            return dict(zip(names, played, strict=True))

        result: dict[str, Any] = {
            "alone": await rows(
                settings.faults, lambda name: plays.play_alone(world, name, settings.repeats)
            ),
            "inputs": await rows(settings.inputs, lambda name: plays.play_input(world, name))
            | await rows(settings.texts, lambda name: plays.play_text(world, name)),
        }
        gc.collect()
        with tempfile.TemporaryDirectory(prefix="bench-faults-") as directory:
            result["mixed"] = await plays.play_mixed(
                world, settings.mixed_episodes, Path(directory)
            )
        say(format_row("mixed", result["mixed"]))
        result["dialects"] = {}
        for name in dialects.DIALECTS:
            played = await plays.play_dialect(
                world, name, settings.dialect_episodes, settings.concurrency
            )
            say(format_row(name, played))
            result["dialects"][name] = played
        return result

    started_s = time.monotonic()
    try:
        with (
            loopback.serving("tools.bench.faults.proxy") as port,
            contextlib.redirect_stdout(sys.stderr),
        ):
            result = asyncio.run(play(port))
    finally:
        logging.disable(logging.NOTSET)
    return result | {"wrong": check(result), "seconds": time.monotonic() - started_s}


def format_row(name: str, row: dict[str, Any]) -> str:
    ends = " ".join(f"{end}={count}" for end, count in row["ends"].items())
    return (
        f"{name:26s}{row['episodes']:6d}{row['injected']:7d}{row['retries']:7d}"
        f"{row['slowest_s']:8.2f}{row['peak_mib']:7.1f}{row['stalled_s']:7.2f}  {ends}"
    )


def format_table(result: dict[str, Any]) -> str:
    head = f"{'':26s}{'played':>6s}{'faults':>7s}{'again':>7s}{'max s':>8s}{'MiB':>7s}{'stall':>7s}"
    rows = rows_of(result)
    mixed = result["mixed"]
    account = " ".join(f"{name}={count}" for name, count in mixed["account"].items())
    return "\n".join(
        [
            f"{head}  ends",
            *(format_row(name, row) for name, row in rows.items()),
            f"mixed: {account} seconds={mixed['seconds']:.0f} growth_mib={mixed['growth_mib']:.1f}",
            f"{result['seconds']:.0f} s; "
            + ("every check holds" if not result["wrong"] else "checks that do not hold:"),
            *result["wrong"],
        ]
    )
