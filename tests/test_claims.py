"""Several actors on one workdir: each group is played once, and nothing becomes stale."""

import asyncio
import contextlib
import random
import threading

import pytest

from tests import actor_world as world
from tests.acting import BASE, RUN, acting, indices, publish, take, until
from uirl_jax import policy_sync
from uirl_jax.actor import claims
from uirl_jax.actor.admission import PublishedShards
from uirl_jax.actor.claims import Claims
from uirl_jax.actor.host import ActorConfig
from uirl_jax.policy_sync import MANIFEST
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.lease import is_alive, only_actor

STEPS, GROUPS, MEMBERS = 6, 4, 2


class Unhurried(world.ScriptedEngine):
    """Answers after a time of its own; `pause_s=inf` never answers."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(lambda turn: "click(60, 40)")
        self._pause_s, self._random = pause_s, random.Random(pause_s)

    async def sample(self, request):
        if self._pause_s == float("inf"):
            self.requests.append(request)
            await asyncio.Event().wait()
        await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._pause_s)
        return await super().sample(request)


@contextlib.asynccontextmanager
async def actor_of(workdir, url, number, pause_s, cfg):
    """An actor as `run.Run.act` starts it: with the lease of its number."""
    engine = Unhurried(pause_s)
    with only_actor(open_store(workdir), f"a{number}", lambda: None):
        async with acting(
            workdir, url, engine, cfg=cfg, concurrency=4, actor_id=f"a{number}"
        ) as running:
            yield running[0], engine


def config(**changes):
    return ActorConfig(MEMBERS, GROUPS, steps=STEPS, poll_s=0.01, **changes)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("actors", [1, 2, 8])
def test_actors_of_different_speed_lose_nothing_to_staleness(tmp_path, actors, max_staleness):
    cfg = config(max_staleness=max_staleness)

    async def run():
        queue, trained = ShardQueue(open_store(tmp_path), RUN, BASE), []
        publish(tmp_path, 0)
        async with world.verifier() as url, contextlib.AsyncExitStack() as stack:
            running = [
                await stack.enter_async_context(
                    actor_of(tmp_path, url, number, 0.004 * 2**number, cfg)
                )
                for number in range(actors)
            ]
            for step in range(STEPS):
                groups = await take(queue, GROUPS, step, max_staleness)
                trained += [int(group[0].group_id) for group in groups]
                publish(tmp_path, step + 1, trained)
            await asyncio.gather(*(actor for actor, _ in running))
        queue.poll()
        accounts = queue.accounting()
        assert len(set(trained)) == len(trained) == STEPS * GROUPS
        assert accounts["trained"] == STEPS * GROUPS * MEMBERS
        assert accounts["published"] == accounts["trained"] + accounts["pending"]
        if max_staleness == 0:
            assert accounts["pending"] == 0 and sorted(trained) == list(range(STEPS * GROUPS))
            assert not open_store(tmp_path).names("claims")

    asyncio.run(run())


def test_an_actor_that_was_held_up_before_its_claim_starts_no_group_of_the_past(
    tmp_path, monkeypatch
):
    """Others have trained on the group meanwhile: it would be played again, by an old policy."""
    free, held_up, claim = threading.Event(), threading.Event(), Claims.take

    def slow_take(claims, index, version):
        if not held_up.is_set():  # the first take of all
            held_up.set()
            free.wait(60.0)
        return claim(claims, index, version)

    monkeypatch.setattr(Claims, "take", slow_take)

    async def run():
        store, names = open_store(tmp_path), [f"claims/{RUN}/{i:08d}" for i in range(GROUPS)]
        queue = ShardQueue(store, RUN, BASE)
        publish(tmp_path, 0)
        async with world.verifier() as url, actor_of(tmp_path, url, 1, 0.0, config()) as (slow, _):
            await asyncio.to_thread(held_up.wait, 60.0)
            async with actor_of(tmp_path, url, 0, 0.0, config()) as (actor, _):
                groups = await take(queue, GROUPS, 0, actor=actor)
                publish(tmp_path, 1, indices(groups))
                await until(lambda: not set(names) & set(store.names("claims")), actor)
            free.set()
            groups = await take(queue, GROUPS, 1, actor=slow)
        assert min(indices(groups)) >= GROUPS
        accounts = queue.accounting()
        assert accounts["stale"] == accounts["duplicate"] == 0

    asyncio.run(run())


def test_a_manifest_that_is_damaged_while_a_group_is_claimed_is_read_again(tmp_path, monkeypatch):
    damaged, claim = [], Claims.take

    def damaging_take(claims, index, version):
        if not damaged:
            damaged.append(open_store(tmp_path).put(MANIFEST, b"{"))
        return claim(claims, index, version)

    monkeypatch.setattr(Claims, "take", damaging_take)

    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 0)
        async with world.verifier() as url, actor_of(tmp_path, url, 0, 0.0, config()) as (actor, _):
            await until(lambda: damaged, actor)
            await asyncio.sleep(0.3)  # of several looks; too short a time would only hide a defect
            publish(tmp_path, 0)
            groups = await take(queue, GROUPS, 0, actor=actor)
        assert indices(groups) == list(range(GROUPS))

    asyncio.run(run())


def test_groups_that_a_policy_trained_are_not_played_again_if_it_cannot_be_loaded(
    tmp_path, monkeypatch, capsys
):
    """Their owner has released its claims, and in a bucket its shards are not looked at."""
    store, put_manifest = open_store(tmp_path), policy_sync._replace
    other = Claims(store, RUN, "a1", overdue_s=600.0)
    assert all(other.take(index, 0) for index in range(GROUPS))

    def put_manifest_of_damaged_file(store, manifest):
        store.put(manifest.path, b"damaged")
        return put_manifest(store, manifest)

    async def run():
        queue = ShardQueue(store, RUN, BASE)
        publish(tmp_path, 0)
        cfg = config(max_staleness=1)
        async with world.verifier() as url, actor_of(tmp_path, url, 0, 0.0, cfg) as (actor, _):
            groups = await take(queue, GROUPS, 0, 1, actor)
            with monkeypatch.context() as damaging:
                damaging.setattr(policy_sync, "_replace", put_manifest_of_damaged_file)
                publish(tmp_path, 1, range(GROUPS))
            other.release(*range(GROUPS))
            await until(lambda: "policy_not_taken" in capsys.readouterr().out, actor)
            await asyncio.sleep(0.3)  # of several looks; too short a time would only hide a defect
            publish(tmp_path, 2, [*range(GROUPS), *indices(groups)])
            await take(queue, GROUPS, 2, 1, actor)
        assert min(group.index for group in PublishedShards(store, RUN).poll()) == GROUPS

    asyncio.run(run())


def test_claims_of_a_killed_actor_do_not_hold_up_the_others(tmp_path, monkeypatch):
    """Its groups are played by it again after the restart, or other groups take their place."""
    monkeypatch.setattr(claims, "CHECK_S", 0.05)
    store = open_store(tmp_path)
    dead = Claims(store, RUN, "a1", overdue_s=600.0)
    assert all(dead.take(index, 0) for index in range(3))  # and it is killed

    async def run():
        queue = ShardQueue(store, RUN, BASE)
        publish(tmp_path, 0)
        async with world.verifier() as url, actor_of(tmp_path, url, 0, 0.0, config()) as (actor, _):
            groups = await take(queue, GROUPS, 0, actor=actor)
        assert [int(group[0].group_id) for group in groups] == [3, 4, 5, 6]

    assert not is_alive(store, "a1")
    asyncio.run(run())
    again = Claims(store, RUN, "a1", overdue_s=600.0)
    assert again.unavailable() == set()


def test_claims_of_a_living_actor_hold_the_others_up_until_they_are_overdue(tmp_path):
    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 0)
        cfg = config(overdue_s=0.5)
        async with (
            world.verifier() as url,
            actor_of(tmp_path, url, 1, float("inf"), cfg) as (_, hung),
        ):
            await until(lambda: len(hung.requests) == 4)  # two groups of two members
            async with actor_of(tmp_path, url, 0, 0.0, cfg) as (actor, engine):
                await until(lambda: len(engine.requests) >= 2 * 2 * 2, actor)
                groups = await take(queue, GROUPS, 0, actor=actor)
        assert [int(group[0].group_id) for group in groups] == [2, 3, 4, 5]

    asyncio.run(run())


def test_claims_damaged_or_foreign_files_are_survived(tmp_path):
    store = open_store(tmp_path)
    store.put(f"claims/{RUN}/00000003", b"\xff\xfe not a claim")
    store.put(f"claims/{RUN}/00000004", b"a1 7\n")
    store.put(f"claims/{RUN}/notes.txt", b"")
    store.put(f"claims/{RUN}/00000009.abandoned", b"")
    ours = Claims(store, RUN, "a0", overdue_s=600.0)
    assert ours.in_flight() == {3: 0, 4: 7}
    assert ours.unavailable() == {3, 4, 9}
    assert not ours.take(4, 7) and ours.take(5, 8)
    ours.abandon(5)
    assert Claims(store, RUN, "a2", overdue_s=600.0).unavailable() == {3, 4, 5, 9}
    patient = Claims(store, RUN, "a0", overdue_s=0.0)
    assert patient.in_flight() == {}
    assert patient.unavailable() == {3, 4, 5, 9}


def test_claims_one_actor_wins(tmp_path):
    store = open_store(tmp_path)
    first, second = (Claims(store, RUN, name, overdue_s=600.0) for name in ("a0", "a1"))
    assert first.take(0, 0) and not second.take(0, 0)
    second.poll()
    assert second.in_flight() == {0: 0} and second.own() == []
    (tmp_path / f"claims/{RUN}/00000000").unlink()
    first.poll()
    assert first.own() == [0]  # a deleted file does not make it forget what it plays
    first.release(0)
    second.poll()
    assert second.unavailable() == set()


@pytest.mark.parametrize("applied", [0, 1, 2, 3])
def test_a_release_that_fails_never_deletes_another_actors_claim(tmp_path, monkeypatch, applied):
    """The storage goes away after so many deletions: of two claims, then of their labels."""
    store = open_store(tmp_path)
    mine, other = (Claims(store, RUN, name, overdue_s=600.0) for name in ("a0", "a1"))
    assert mine.take(0, 5) and mine.take(1, 5)
    delete, left = store.delete, iter(range(applied))

    def delete_some(*names):
        for name in names:
            if next(left, None) is None:
                raise StoreUnavailableError(5, "away")
            delete(name)

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", delete_some)
        with pytest.raises(StoreUnavailableError):
            mine.release(0, 1)
    other.poll()
    taken = [index for index in (0, 1) if other.take(index, 6)]
    assert len(taken) == min(applied, 2)
    mine.release(*mine.own())  # what an actor does again while the storage was away
    mine.poll()
    other.poll()
    assert other.own() == taken and mine.own() == []
    expected = [f"claims/{RUN}/{i:08d}{label}" for i in taken for label in ("", ".by.a1.6")]
    assert store.names("claims") == expected


def counted_reads(store, monkeypatch):
    names: list[str] = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda name: names.append(name) or read(name))
    return names


def test_a_listing_tells_whose_a_claim_is(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    others = [Claims(store, RUN, f"a{number}.by.1", overdue_s=600.0) for number in range(3)]
    reader = Claims(store, RUN, "a9", overdue_s=600.0)
    for index, other in enumerate(others):
        assert other.take(index, 5 + index)
    names = counted_reads(store, monkeypatch)
    reader.poll()
    assert reader.in_flight() == {0: 5, 1: 6, 2: 7} and names == []
    others[0].release(0)
    reader.poll()
    assert reader.in_flight() == {1: 6, 2: 7}
    assert len(store.names("claims")) == 4  # of the released claim nothing stays


def test_a_claim_that_has_changed_hands_is_noticed(tmp_path):
    store = open_store(tmp_path)
    mine, second, third = (
        Claims(store, RUN, actor_id, overdue_s=600.0) for actor_id in ("a1", "a2", "a3")
    )
    assert second.take(0, 5)
    mine.poll()
    assert mine.in_flight() == {0: 5}
    second.release(0)
    assert third.take(0, 9)
    mine.poll()
    assert mine.in_flight() == {0: 9}
    since = mine._claims[0]
    store.put(f"claims/{RUN}/00000000.by.a2.9", b"")  # it asks for the group, in vain
    mine.poll()
    assert mine._claims[0] == since and since.actor_id == "a3"


@pytest.mark.parametrize("labels", [(), ("a1.5", "a2.7")])
def test_a_claim_without_one_label_is_read(tmp_path, monkeypatch, labels):
    store = open_store(tmp_path)
    for label in labels:  # a2 has lost the race and was killed before it removed its label
        store.put(f"claims/{RUN}/00000012.by.{label}", b"")
    store.put(f"claims/{RUN}/00000012", b"a1 5\n")
    names = counted_reads(store, monkeypatch)
    reader = Claims(store, RUN, "a9", overdue_s=600.0)
    assert reader.in_flight() == {12: 5} and len(names) == 1
    Claims(store, RUN, "a2", overdue_s=600.0)  # the killed one starts again
    expected = {f"claims/{RUN}/00000012"} | (
        {f"claims/{RUN}/00000012.by.a1.5"} if labels else set()
    )
    assert set(store.names("claims")) == expected


def test_a_label_alone_claims_nothing(tmp_path):
    store = open_store(tmp_path)
    store.put(f"claims/{RUN}/00000012.by.a1.5", b"")  # killed between the label and the claim
    reader = Claims(store, RUN, "a9", overdue_s=600.0)
    assert reader.unavailable() == set() and reader.take(12, 6)
