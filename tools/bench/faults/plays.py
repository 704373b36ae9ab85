"""What is played against the proxy: faults alone, bad inputs, bad texts, and the mixtures.

Each play gives a row: how its episodes ended, what was injected, how long they took, and what this
process's memory and event loop did meanwhile.
"""

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.faults import dialects, inputs, proxy
from tools.bench.faults.actor import (
    RUN_ID,
    RUN_SEED,
    Ended,
    JumpingClock,
    World,
    errs,
    task_of,
)
from uirl_jax import policy_sync
from uirl_jax.actor.host import ActorConfig, LearnerLink, TaskSource, run_actor
from uirl_jax.actor.rollout import derive_seed
from uirl_jax.shards.reader import read_shard
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, Trajectory

MIXED_START_S, MIXED_EPISODE_S = 60.0, 0.25  # the mixed run is over by then, or it hangs
BASE_HASH = "base"
MIXED = "mixed-10"
GROUP = 4
MIB = 2**20


class Watch:
    """This process's memory, and how late its event loop was, while the block runs."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self._interval_s = interval_s
        self.before_mib = self.peak_mib = 0.0
        self.stalled_s = 0.0

    async def __aenter__(self) -> "Watch":
        self.before_mib = self.peak_mib = rss_mib()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

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
    tasks = [task_of(seed) for seed in range(2 * len(proxy.FAULTS[fault]) * repeats)]
    jumping = JumpingClock().ticking() if fault == "clock_jumps" else contextlib.nullcontext()
    async with Watch() as watch:
        with jumping:
            trajectories = await world.play(fault, tasks)
    unlike = []
    for trajectory in trajectories:
        seed, end = trajectory.task.seed, trajectory.stop_reason
        expected = StopReason.FAILED if errs(seed) else StopReason.COMPLETED
        if not proxy.survives(fault, seed):
            expected = StopReason.ENV_ERROR
        if end is not expected:
            call, always = proxy.strike(fault, seed)
            unlike.append(f"{call} {'always' if always else 'once'}: {end}, expected {expected}")
    report = await world.report(fault)
    return row_of(trajectories, report, watch) | {"unlike": unlike}


async def play_input(world: World, name: str) -> dict[str, Any]:
    """Two episodes that meet a bad answer."""
    async with Watch() as watch:
        trajectories = await world.play(name, [task_of(seed) for seed in range(2)])
    row = row_of(trajectories, await world.report(name), watch)
    return row | {"unlike": _unlike(trajectories, inputs.INPUTS[name].ends)}


async def play_text(world: World, name: str) -> dict[str, Any]:
    """An episode in which the policy says something bad."""
    seed = RUN_SEED + 1 + list(inputs.POLICY_TEXTS).index(name)
    async with Watch() as watch:
        trajectories = await world.play("none", [task_of(0)], inputs.POLICY_TEXTS[name], seed=seed)
    row = row_of(trajectories, await world.report("none"), watch)
    return row | {"unlike": _unlike(trajectories, (inputs.FORMAT_ERROR,))}


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
        arrays={"none": np.zeros(1, np.float32)},
        base_hash=BASE_HASH,
        run_id=RUN_ID,
        extra={"groups_trained": []},
    )
    stop, memory_mib = asyncio.Event(), []
    cfg = ActorConfig(GROUP, groups_per_step=groups, env_retries=8, poll_s=0.05, report_s=0.2)
    # Whoever is abandoned is replaced by a group of a higher index; each attempt has its own seed.
    attempts = [(), *((number,) for number in range(1, 1 + cfg.env_retries))]
    for index, member, attempt in itertools.product(range(2 * groups), range(GROUP), attempts):
        world.engine.expect(derive_seed(RUN_SEED, index, member, *attempt), task_of(index))

    def on_report(metrics: dict[str, float]) -> None:
        memory_mib.append((metrics["actor/published"], rss_mib()))
        late = time.monotonic() - started_s > MIXED_START_S + MIXED_EPISODE_S * episodes
        if late or metrics["actor/published"] >= GROUP * groups:
            stop.set()

    started_s = time.monotonic()
    async with Watch() as watch, world.player(MIXED) as player:
        metrics = await run_actor(
            player,
            cfg,
            LearnerLink(workdir, BASE_HASH, world.layout, lambda adapters: None),
            TaskSource(lambda index, tallies: task_of(index), RUN_SEED),
            stop,
            on_report,
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


async def play_dialect(
    world: World, dialect: str, episodes: int, concurrency: int
) -> dict[str, Any]:
    """The mixture in another dialect; none of its episodes is played again."""
    async with Watch() as watch:
        played = await dialects.play(world, dialect, episodes, concurrency)
    return played | {
        "injected": sum(played["injected"].values()),
        "peak_mib": watch.peak_mib - watch.before_mib,
        "stalled_s": watch.stalled_s,
    }
