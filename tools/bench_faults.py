"""What verifiers' faults do to the actor: every fault alone, every bad input, then all mixed.

    python -m tools.bench faults --json=faults.json

The actor is the real one (client, rollout, player, host, shard writer), the verifier is the bundled
server behind `fault_proxy`, in a process of its own, over loopback. No model runs: `ScriptedEngine`
stands where an engine does and says what the desktop's scripted demonstrator would do. Time-outs
are short (LIMITS), so that what hangs ends soon; nothing else differs from a run.

  alone    every fault at each call where it may strike, once and always; each episode must end
           as `fault_proxy.survives` says. `run_tasks`, and no episode is played again.
  inputs   every answer of `fault_inputs`, each to be met as it says there; and bad actions.
  mixed    10 % of all calls go wrong, one way or another, while `run_actor` fills shards.
  dialects the same mixture in the dialects of the field, episode by episode (`fault_dialects`).

Exit code 1 where a check fails: something crashed, took longer than its time-out, grew, was paid
for by a fault, ended otherwise than it should, or is in no account.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools import fault_actor, fault_dialects, fault_inputs, fault_proxy
from tools.fault_actor import (
    LIMITS,
    ROLLOUT,
    RUN_ID,
    RUN_SEED,
    Ended,
    World,
    errs,
    task_of,
)
from uirl_jax import policy_sync
from uirl_jax.actor.host import ActorConfig, run_actor
from uirl_jax.actor.rollout import derive_seed
from uirl_jax.shards.reader import read_shard
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, Trajectory

SLACK_S = 3.0  # what a busy machine may add to a time-out before it counts as one that was missed
# One call fails in an episode, as often as it is tried, or its session does not come about.
ALONE_S = LIMITS.attempts * LIMITS.attempt_timeout_s + LIMITS.create_timeout_s + SLACK_S
MIXED_S = ROLLOUT.episode_timeout_s + ROLLOUT.delete_timeout_s + SLACK_S
MIXED_START_S, MIXED_EPISODE_S = 60.0, 0.25  # the mixed run is over by then, or it hangs
BASE_HASH = "base"
MIXED = "mixed-10"
GROUP = 4
MAX_PEAK_MIB = 100.0  # above what there was before
MAX_GROWTH_MIB = 24.0  # from a third of the mixed episodes to the last
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is played."""

    faults: tuple[str, ...] = tuple(fault_proxy.FAULTS)
    repeats: int = 2  # of each place where a fault may strike
    inputs: tuple[str, ...] = tuple(fault_inputs.INPUTS)
    texts: tuple[str, ...] = tuple(fault_inputs.POLICY_TEXTS)
    mixed_episodes: int = 2000  # published ones; those that faults ended are played again on top
    dialect_episodes: int = 200  # of each dialect but g1+
    concurrency: int = 32
    at_once: int = 1  # faults and inputs; with more, their memory is not told apart


# ------------------------------------------------------------------------------ what is watched


class Watch:
    """This process's memory, and how late its event loop was, while the block runs."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self.before_mib = self.peak_mib = self.after_mib = 0.0
        self.stalled_s = 0.0

    async def __aenter__(self) -> "Watch":
        self.before_mib = self.peak_mib = rss_mib()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self.after_mib = rss_mib()

    async def _look(self) -> None:
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(self._interval_s)
            late_s = time.monotonic() - asked_s - self._interval_s
            self.stalled_s = max(self.stalled_s, late_s)
            self.peak_mib = max(self.peak_mib, rss_mib())


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / MIB


def paid_wrongly(episodes: Sequence[Ended | Trajectory], report: dict[str, Any]) -> int:
    """Episodes with a reward that no server gave to their seed, or with one and an env_error."""
    wrong = 0
    for episode in episodes:
        given = {0.0, *report["rewards"].get(str(episode.task.seed), [])}
        if episode.stop_reason is StopReason.ENV_ERROR:
            given = {0.0}
        wrong += episode.reward not in given or episode.success != (episode.reward >= 1.0)
    return wrong


def row_of(
    episodes: Sequence[Ended | Trajectory], report: dict[str, Any], watch: Watch
) -> dict[str, Any]:
    ends = collections.Counter(str(episode.stop_reason) for episode in episodes)
    return {
        "episodes": len(episodes),
        "ends": dict(sorted(ends.items())),
        "injected": sum(report["injected"].values()),
        "retries": report["retries"],
        "strays": report["strays"],
        "slowest_s": max((episode.duration_s for episode in episodes), default=0.0),
        "peak_mib": watch.peak_mib - watch.before_mib,
        "stalled_s": watch.stalled_s,
        "paid_wrongly": paid_wrongly(episodes, report),
    }


# ------------------------------------------------------------------------------ what is played


async def play_alone(world: World, fault: str, repeats: int) -> dict[str, Any]:
    """A fault at each of its calls, once and always; `unlike` are those that ended otherwise."""
    tasks = [task_of(seed) for seed in range(2 * len(fault_proxy.FAULTS[fault]) * repeats)]
    jumping = (
        fault_actor.JumpingClock().ticking() if fault == "clock_jumps" else contextlib.nullcontext()
    )
    async with Watch() as watch:
        with jumping:
            trajectories = await world.play(fault, tasks)
    unlike = []
    for trajectory in trajectories:
        seed, end = trajectory.task.seed, trajectory.stop_reason
        expected = StopReason.FAILED if errs(seed) else StopReason.COMPLETED
        if not fault_proxy.survives(fault, seed):
            expected = StopReason.ENV_ERROR
        if end is not expected:
            call, always = fault_proxy.strike(fault, seed)
            unlike.append(f"{call} {'always' if always else 'once'}: {end}, expected {expected}")
    report = await world.report(fault)
    return row_of(trajectories, report, watch) | {"unlike": unlike}


async def play_input(world: World, name: str) -> dict[str, Any]:
    """Two episodes that meet a bad answer."""
    async with Watch() as watch:
        trajectories = await world.play(name, [task_of(seed) for seed in range(2)])
    row = row_of(trajectories, await world.report(name), watch)
    return row | {"unlike": _unlike(trajectories, fault_inputs.INPUTS[name].ends)}


async def play_text(world: World, name: str) -> dict[str, Any]:
    """An episode in which the policy says something bad."""
    seed = RUN_SEED + 1 + list(fault_inputs.POLICY_TEXTS).index(name)
    async with Watch() as watch:
        trajectories = await world.play(
            "none", [task_of(0)], fault_inputs.POLICY_TEXTS[name], seed=seed
        )
    row = row_of(trajectories, await world.report("none"), watch)
    return row | {"unlike": _unlike(trajectories, (fault_inputs.FORMAT_ERROR,))}


def _unlike(trajectories: Sequence[Trajectory], ends: Sequence[str]) -> list[str]:
    return [
        f"{trajectory.stop_reason}, expected {' or '.join(ends)}"
        for trajectory in trajectories
        if str(trajectory.stop_reason) not in ends
    ]


async def play_mixed(world: World, episodes: int, workdir: Path) -> dict[str, Any]:
    """run_actor until so many episodes are published; its accounts, and what is in its shards."""
    groups = episodes // GROUP
    policy_sync.publish(
        open_store(workdir),
        version=0,
        step=0,
        adapters={"none": np.zeros(1, np.float32)},
        base_hash=BASE_HASH,
        run_id=RUN_ID,
        extra={"groups_trained": []},
    )
    stop, memory_mib = asyncio.Event(), []
    # Whoever is abandoned is replaced by a group of a higher index.
    for index, member in itertools.product(range(2 * groups), range(GROUP)):
        world.engine.expect(derive_seed(RUN_SEED, index, member), task_of(index))

    def on_report(metrics: dict[str, float]) -> None:
        memory_mib.append((metrics["actor/published"], rss_mib()))
        late = time.monotonic() - started_s > MIXED_START_S + MIXED_EPISODE_S * episodes
        if late or metrics["actor/published"] >= GROUP * groups:
            stop.set()

    started_s = time.monotonic()
    async with Watch() as watch, world.player(MIXED) as player:
        metrics = await run_actor(
            player,
            ActorConfig(GROUP, groups_per_step=groups, env_retries=8, poll_s=0.05, report_s=0.2),
            workdir=workdir,
            base_hash=BASE_HASH,
            layout=world.layout,
            to_lora=lambda adapters: None,
            task_for_group=lambda index, tallies: task_of(index),
            run_seed=RUN_SEED,
            stop=stop,
            on_report=on_report,
        )
    seconds = time.monotonic() - started_s
    account = {
        name: int(metrics[f"actor/{name}"])
        for name in ("started", "published", "env_error", "lost", "running")
    }
    shards = sorted(workdir.glob("shards/*/*.tfrecord"))
    records = [t for shard in shards for t in read_shard(shard)[1]]
    report = await world.report(MIXED)
    row = row_of(player.ended, report, watch)
    row["paid_wrongly"] += paid_wrongly(records, report)
    settled = [mib for published, mib in memory_mib if published >= GROUP * groups / 3]
    return row | {
        "wanted": GROUP * groups,
        "cancelled": player.cancelled,
        "account": account,
        "records": len(records),
        "distinct": len({t.episode_id for t in records}),
        "env_errors_in_shards": sum(t.stop_reason is StopReason.ENV_ERROR for t in records),
        "groups_whole": sum(
            count == GROUP for count in collections.Counter(t.group_id for t in records).values()
        ),
        "injected_by_fault": dict(sorted(report["injected"].items())),
        "requests": report["requests"],
        "seconds": seconds,
        "before_mib": watch.before_mib,
        "growth_mib": (settled[-1] - settled[0]) if settled else 0.0,
    }


async def play_dialect(world: World, dialect: str, settings: Settings) -> dict[str, Any]:
    """The mixture in another dialect; none of its episodes is played again."""
    async with Watch() as watch:
        played = await fault_dialects.play(
            world, dialect, settings.dialect_episodes, settings.concurrency
        )
    return played | {
        "injected": sum(played["injected"].values()),
        "peak_mib": watch.peak_mib - watch.before_mib,
        "stalled_s": watch.stalled_s,
    }


# ------------------------------------------------------------------------------ what must hold


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        **result["alone"],
        **result["inputs"],
        "mixed": result["mixed"],
        **result["dialects"],
    }


def check(result: dict[str, Any]) -> list[str]:
    """What does not hold, one line each."""
    wrong = []
    rows = rows_of(result)
    for name, row in rows.items():
        wrong += [f"{name}: {line}" for line in row.get("unlike", ())]
        is_mixed = name == "mixed" or name in result["dialects"]
        limit_s = MIXED_S if is_mixed else ALONE_S
        if row["slowest_s"] > limit_s:
            wrong.append(f"{name}: an episode took {row['slowest_s']:.1f} s, limit {limit_s:.0f} s")
        if row["peak_mib"] > MAX_PEAK_MIB:
            wrong.append(f"{name}: {row['peak_mib']:.0f} MiB on top, limit {MAX_PEAK_MIB:.0f} MiB")
        if row["paid_wrongly"]:
            wrong.append(f"{name}: {row['paid_wrongly']} episodes have a reward that nobody gave")
        if row["strays"]:
            wrong.append(f"{name}: {row['strays']} requests went where a redirect led")
        if not row["injected"] and name not in fault_inputs.POLICY_TEXTS:
            wrong.append(f"{name}: was never injected")
    for name, row in result["dialects"].items():
        if not row["wanted"] == row["episodes"] == sum(row["ends"].values()):
            wrong.append(f"{name}: {row['wanted']} started, the accounts have {row['episodes']}")
        if bool(row["paid"]) == (name == "g1"):
            wrong.append(f"{name}: {row['paid']} episodes succeeded")
    mixed = result["mixed"]
    account = dict(mixed["account"])
    started, running = account.pop("started"), account["running"]
    ended = mixed["episodes"] + mixed["cancelled"]
    if running or started != sum(account.values()) or started != ended:
        wrong.append(f"mixed: {started} started, {ended} ended, but the account is {account}")
    published = account["published"]
    if not published == mixed["records"] == mixed["distinct"] == GROUP * mixed["groups_whole"]:
        wrong.append(
            f"mixed: {published} published, {mixed['records']} records in shards, "
            f"{mixed['distinct']} of them distinct, {mixed['groups_whole']} groups whole"
        )
    if published < mixed["wanted"]:
        wrong.append(f"mixed: {published} of {mixed['wanted']} episodes after its whole time")
    if mixed["env_errors_in_shards"]:
        wrong.append(f"mixed: {mixed['env_errors_in_shards']} env_errors were published")
    if mixed["growth_mib"] > MAX_GROWTH_MIB:
        wrong.append(f"mixed: grew by {mixed['growth_mib']:.0f} MiB, limit {MAX_GROWTH_MIB:.0f}")
    return wrong


def run(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
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
                settings.faults, lambda name: play_alone(world, name, settings.repeats)
            ),
            "inputs": await rows(settings.inputs, lambda name: play_input(world, name))
            | await rows(settings.texts, lambda name: play_text(world, name)),
        }
        gc.collect()
        with tempfile.TemporaryDirectory(prefix="bench-faults-") as directory:
            result["mixed"] = await play_mixed(world, settings.mixed_episodes, Path(directory))
        say(format_row("mixed", result["mixed"]))
        result["dialects"] = {}
        for name in fault_dialects.DIALECTS:
            played = await play_dialect(world, name, settings)
            say(format_row(name, played))
            result["dialects"][name] = played
        return result

    started_s = time.monotonic()
    try:
        with fault_actor.proxy() as port, contextlib.redirect_stdout(sys.stderr):
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
