"""Real actors and a real queue on one emulated bucket; an actor while its storage is away."""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.buckets import point_to
from tools.bucket_emulator import emulator
from tools.bucket_emulator.costs import LAYOUT, WaitingPlayer
from uirl_jax import policy_sync
from uirl_jax.actor.claims import CLAIMS, Claims
from uirl_jax.actor.host import ActorConfig, LearnerLink, TaskSource, run_actor
from uirl_jax.shards.reader import scan_shard
from uirl_jax.store import Store, StoreUnavailableError, mirror, open_store
from uirl_jax.store.local import LocalStore
from uirl_jax.types import TaskSpec

ROOT = Path(__file__).parents[1]


def test_costs_of_three_actor_hosts_are_counted_and_every_record_is_accounted_for():
    flags = ("--actors=3", "--members=2", "--episode_s=1", "--minutes=0.2", "--start_s=1")
    process = subprocess.run(
        [sys.executable, "-m", "tools.bucket_emulator.costs", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout)
    assert result["steps"] >= 1 and result["trained"] == 6 * result["steps"]
    assert result["published"] == result["trained"] + result["pending"]
    # Two listings and a manifest in a look, one look every 5 s, and a renewal every 10 s.
    assert 3 * 2 * 720 <= result["per_hour"]["list"] <= 12_000
    assert result["per_hour"]["usd"] > 0


def publish(store: Store, version: int) -> None:
    policy_sync.publish(
        store,
        version=version,
        step=version,
        arrays={"none": np.zeros(1, np.float32)},
        base_hash="base",
        run_id="run",
        extra={"groups_trained": []},
    )


@pytest.mark.parametrize("calls", [("names", "put", "put_new", "delete"), ("open",), ("read",)])
def test_actor_goes_on_after_a_storage_that_was_away(tmp_path, monkeypatch, capsys, calls):
    publish(open_store(tmp_path), 0)

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError(5, "away")

    async def act() -> dict[str, float]:
        stop = asyncio.Event()
        acting = asyncio.create_task(
            run_actor(
                WaitingPlayer("a0", 2, 0.05),
                ActorConfig(2, 100, max_staleness=1, poll_s=0.02),
                LearnerLink(tmp_path, "base", LAYOUT, lambda adapters: None),
                TaskSource(lambda index, tallies: TaskSpec("t", 1, "", 1), 0),
                stop,
            )
        )
        await until_shards(acting, 2)
        with monkeypatch.context() as patch:
            if "read" in calls:  # needed for a new policy alone
                publish(open_store(tmp_path), 1)
            for name in calls:
                patch.setattr(LocalStore, name, away)
            await asyncio.sleep(0.5)
            assert not acting.done()
        await until_shards(acting, 6)
        stop.set()
        return await acting

    async def until_shards(acting: asyncio.Task, count: int) -> None:
        async with asyncio.timeout(20):
            while len(list(tmp_path.glob("shards/a0/*"))) < count:
                assert not acting.done()
                await asyncio.sleep(0.02)

    report = asyncio.run(act())
    assert report["actor/started"] == report["actor/published"] + report["actor/lost"]
    assert "event=storage_unavailable" in "".join(capsys.readouterr())


def begun_run(directory: Path) -> Store:
    """The bucket of a run whose learner has published its first policy and trained nothing."""
    mirror.link(directory, "gs://runs/run")
    store = open_store(directory)
    publish(store, 0)
    return store


def test_actor_that_loses_races_for_groups_stays_within_the_limit(tmp_path, monkeypatch):
    limit = 8
    with emulator() as service:
        point_to(service, monkeypatch)
        store = begun_run(tmp_path)
        for index in range(limit):  # all that may be played, claimed since the actor's last look
            store.put(f"{CLAIMS}/run/{index:08d}", b"a9 0")
        monkeypatch.setattr(Claims, "poll", lambda claims: None)
        monkeypatch.setattr(random, "randrange", lambda stop: stop - 1)

        async def act() -> dict[str, float]:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(1.0, stop.set)
            return await run_actor(
                WaitingPlayer("a0", 4, 0.02),
                ActorConfig(2, limit, max_staleness=0, poll_s=0.02),
                LearnerLink(tmp_path, "base", LAYOUT, lambda adapters: None),
                TaskSource(lambda index, tallies: TaskSpec("t", 1, "", 1), 0),
                stop,
            )

        assert asyncio.run(act())["actor/started"] == 0
        assert store.names("shards") == []


def test_actor_that_is_stopped_keeps_the_claims_of_what_it_has_published(tmp_path, monkeypatch):
    """Others in a bucket read no shard but their own: without a claim a group is played twice."""
    with emulator() as service:
        point_to(service, monkeypatch)

        def act(name: str, ends_at: int) -> None:
            directory = tmp_path / name
            if not directory.exists():
                mirror.link(directory, "gs://runs/run")

            async def run() -> None:
                stop = asyncio.Event()
                acting = asyncio.create_task(
                    run_actor(
                        WaitingPlayer(name, 2, 0.02),
                        ActorConfig(2, 4, max_staleness=0, poll_s=0.02),
                        LearnerLink(directory, "base", LAYOUT, lambda adapters: None),
                        TaskSource(lambda index, tallies: TaskSpec("t", 1, "", 1), 0),
                        stop,
                    )
                )
                async with asyncio.timeout(60):
                    while len(store.names("shards")) < ends_at:
                        assert not acting.done()
                        await asyncio.sleep(0.02)
                stop.set()
                await acting

            asyncio.run(run())

        store = begun_run(tmp_path / "learner")
        act("a0", 2)
        published = store.names("shards/a0")
        claimed = {name.rpartition("/")[2] for name in store.names(CLAIMS) if ".by." not in name}
        assert claimed == {f"{index:08d}" for index in range(len(published))}
        act("a1", len(published) + 2)
        found = [
            entry.group_id for name in store.names("shards") for entry in scan_shard(store, name)[1]
        ]
        groups = Counter(found)
        assert len(groups) >= len(published) + 2
        assert set(groups.values()) == {2}  # members: no group was played twice
