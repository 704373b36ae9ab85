"""One verifier that cannot play a task does not end a run; a task that nobody can play does."""

import asyncio
import collections
import dataclasses

import pytest

from tests import actor_world as world
from tests.acting import BASE, RUN, acting, any_click, publish, take
from tests.field_servers import SHEET
from tests.recorded_rows import InMemory, click, row
from uirl_jax.actor import fleet as fleet_module
from uirl_jax.actor.fleet import MISMATCHED_EPISODES, MISMATCHED_ROWS, Fleet
from uirl_jax.actor.host import ActorConfig, run_tasks
from uirl_jax.actor.player import Player
from uirl_jax.errors import ConfigError, VerifierFullError
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, TaskSpec
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.open_session import ServerLimits
from uirl_jax.verifiers.server.server import serve

CFG = ActorConfig(2, 3, poll_s=0.01)
URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
FITS, LARGE = (224, 168), (300, 400)  # pixels of recorded rows, for `SmallRows`


def misspelt(index: int, tallies: object = None) -> TaskSpec:
    return TaskSpec("desktop/click_buton", seed=index)


class SmallRows(world.ScriptedEngine):
    """Refuses large screens as an engine whose rows are short does."""

    async def sample(self, request):
        if request.screens[-1].size_px != (224, 168):
            raise ConfigError("a screenshot is larger than a row: raise engine.image_row_patches")
        return await super().sample(request)


def test_task_that_no_verifier_knows_ends_the_run_with_the_servers_hint(tmp_path):
    async def run():
        publish(tmp_path, 0)
        async with (
            world.verifier() as first,
            world.verifier() as second,
            acting(
                tmp_path, lambda: [first, second], any_click(), cfg=CFG, task_for_group=misspelt
            ) as (actor, _, _),
        ):
            said = r"'desktop/click_buton' cannot be played: .*HTTP 422.*click_button"
            with pytest.raises(ConfigError, match=said):
                await asyncio.wait_for(actor, 60.0)

    asyncio.run(run())


def test_verifier_that_refuses_a_task_is_marked_and_the_others_play_it(tmp_path, capsys):
    def fault(call, number):
        return "unknown" if call == "session" else None

    async def run():
        publish(tmp_path, 0)
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        async with (
            world.verifier() as good,
            world.faulty(good, fault) as (bad, _),
            acting(tmp_path, lambda: [good, bad], any_click(), cfg=CFG) as (actor, _, _),
        ):
            for step in range(4):
                await take(queue, 3, step, actor=actor)
                publish(tmp_path, step + 1, range(3 * (step + 1)))

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert printed.count("event=verifier_mismatch") == 1
    assert "verifier_down" not in printed and "group_abandoned" not in printed


def test_screen_that_does_not_fit_the_engine_ends_the_episode_and_not_the_run(tmp_path, capsys):
    """The engine's error is the episode's; the task is given up as nobody can play it."""
    tasks = [TaskSpec("desktop/click_button", 3, "misses=9", 2), dataclasses.replace(SHEET, seed=3)]

    async def run():
        publish(tmp_path, 0)
        engine = SmallRows(lambda turn: "click(60, 40)")
        async with (
            world.verifier() as url,
            acting(
                tmp_path, url, engine, cfg=CFG, task_for_group=lambda index, _: tasks[index % 2]
            ) as (actor, _, _),
        ):
            with pytest.raises(ConfigError, match=r"cannot be played.*raise engine\.image"):
                await asyncio.wait_for(actor, 60.0)
            assert await world.open_sessions(url) == 0
        assert engine.requests  # the other task was played meanwhile

    asyncio.run(run())
    assert "event=verifier_mismatch" in capsys.readouterr().out


def recorded(*sizes: tuple[int, int]) -> RecordedSets:
    rows = [row(n, [click(size=size, shade=n)], "train") for n, size in enumerate(sizes)]
    return RecordedSets({"made": InMemory(rows)})


def recorded_row(index: int, tallies: object = None) -> TaskSpec:
    return TaskSpec("recorded/made", seed=index)


def test_recorded_rows_that_do_not_fit_are_abandoned_and_the_others_trained_on(tmp_path, capsys):
    async def run():
        publish(tmp_path, 0)
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        engine = SmallRows(lambda turn: "click(60, 40)")
        async with (
            serve(recorded=recorded(LARGE, LARGE, *[FITS] * 38)) as port,
            acting(
                tmp_path,
                f"http://127.0.0.1:{port}",
                engine,
                cfg=CFG,
                task_for_group=recorded_row,
                concurrency=4,
            ) as (actor, _, _),
        ):
            groups = await take(queue, 3, 0, actor=actor)
            assert min(group[0].task.seed for group in groups) == 2

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert printed.count("event=group_abandoned") == 2
    assert "verifier_down" not in printed and "verifier_mismatch" not in printed


def test_recorded_row_that_does_not_fit_is_an_env_error_of_an_evaluation():
    async def run():
        engine = SmallRows(lambda turn: "click(60, 40)")
        async with (
            serve(recorded=recorded(LARGE, FITS)) as port,
            Fleet(lambda: [f"http://127.0.0.1:{port}"], world.client) as fleet,
        ):
            player = Player(
                fleet, engine, world.chat(), world.inputs(), world.ROLLOUT, concurrency=2
            )
            retries = 2 * MISMATCHED_EPISODES
            (large,) = await run_tasks(player, [recorded_row(0)], env_retries=retries)
            (fits,) = await run_tasks(player, [recorded_row(1)])
        assert large.stop_reason is StopReason.ENV_ERROR
        assert fits.stop_reason is not StopReason.ENV_ERROR
        assert player.statistics.read()["actor/env_errors"] == 1 + retries

    asyncio.run(run())


def test_full_verifier_is_a_limit_and_not_a_fault(tmp_path, capsys, monkeypatch):
    refused = asyncio.Event()  # an episode has found no room
    full = Fleet.full

    def watched(*args):
        full(*args)
        refused.set()

    class Patient(world.ScriptedEngine):
        async def sample(self, request):
            await refused.wait()  # else episodes may end before a third one begins
            return await super().sample(request)

    monkeypatch.setattr(Fleet, "full", watched)
    engine = Patient(lambda turn: "click(60, 40)")

    async def run():
        publish(tmp_path, 0)
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        async with (
            serve(limits=ServerLimits(max_sessions=2)) as port,
            acting(tmp_path, f"http://127.0.0.1:{port}", engine, cfg=CFG) as (actor, stop, _),
        ):
            await take(queue, 3, 0, actor=actor)
            stop.set()
            report = await actor
        assert report["actor/env_error"] == 0
        assert report["actor/published"] == 6

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert printed.count("event=verifier_full") == 1 and "episodes_at_most=2" in printed
    assert "verifier_down" not in printed


def test_fleet_full_verifier_without_an_announced_capacity_gets_what_it_ran():
    async def run():
        async with Fleet(lambda: URLS[:1], world.client) as fleet:
            running = [await fleet.next() for _ in range(3)]
            fleet.full(running[2], 0, wait_s=0.01)
            assert running[0].capacity == 2
            waiting = asyncio.create_task(fleet.next())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            fleet.worked(running[0])
            assert await waiting is running[0]

    asyncio.run(run())


def test_fleet_task_that_worked_before_is_no_mistake_of_the_config():
    async def run():
        async with Fleet(lambda: URLS, world.client) as fleet:
            verifiers = collections.deque([await fleet.next("a"), await fleet.next("a")])
            fleet.worked(verifiers[0], task_name="a")
            for verifier in verifiers:
                for _ in range(MISMATCHED_EPISODES):
                    fleet.mismatched(verifier, TaskSpec("a", 0), "unknown task")
            assert verifiers[1].rest_s > 0.0  # tried again after a pause
            with pytest.raises(ConfigError, match="task 'b' cannot be played: unknown task"):
                for verifier in verifiers:
                    for _ in range(MISMATCHED_EPISODES):
                        fleet.mismatched(verifier, TaskSpec("b", 0), "unknown task")

    asyncio.run(run())


def test_fleet_gives_a_recorded_set_up_only_if_no_row_of_many_fits(capsys):
    async def run():
        async with Fleet(lambda: URLS[:1], world.client) as fleet:
            verifier = await fleet.next("recorded/a")
            for _ in range(2 * MISMATCHED_ROWS):  # retries of one row
                fleet.mismatched(verifier, TaskSpec("recorded/a", 0), "too large")
            for seed in range(1, MISMATCHED_ROWS - 1):
                fleet.mismatched(verifier, TaskSpec("recorded/a", seed), "too large")
            said = f"'recorded/a' cannot be played: not one of {MISMATCHED_ROWS} rows fits.*: large"
            with pytest.raises(ConfigError, match=said):
                fleet.mismatched(verifier, TaskSpec("recorded/a", MISMATCHED_ROWS), "large")
            fleet.worked(verifier, task_name="recorded/b")
            for seed in range(2 * MISMATCHED_ROWS):
                fleet.mismatched(verifier, TaskSpec("recorded/b", seed), "too large")
            assert verifier.rest_s == 0.0

    asyncio.run(run())
    assert "verifier_down" not in capsys.readouterr().out


def test_fleet_marks_a_verifier_that_lacks_a_recorded_set():
    async def run():
        async with Fleet(lambda: URLS, world.client) as fleet:
            lacks = await fleet.next("recorded/a")
            for seed in range(MISMATCHED_ROWS):
                assert lacks in [await fleet.next("recorded/a") for _ in range(6)]
                fleet.mismatched(lacks, TaskSpec("recorded/a", seed), "unknown task")
            assert lacks not in [await fleet.next("recorded/a") for _ in range(6)]

    asyncio.run(run())


def test_fleet_without_a_url_at_the_moment_ends_no_run():
    """The bundled server is being restarted while an episode on the old one is refused."""

    async def run():
        urls = URLS[:1]
        async with Fleet(lambda: urls, world.client) as fleet:
            verifier = await fleet.next("a")
            urls = []
            for _ in range(2 * MISMATCHED_EPISODES):
                fleet.mismatched(verifier, TaskSpec("a", 0), "unknown task")

    asyncio.run(run())


def test_fleet_tries_a_marked_verifier_again_after_a_while(monkeypatch):
    monkeypatch.setattr(fleet_module, "MISMATCH_REST_S", 0.2)

    async def run():
        async with Fleet(lambda: URLS, world.client) as fleet:
            bad = await fleet.next("a")
            for _ in range(MISMATCHED_EPISODES):
                fleet.mismatched(bad, TaskSpec("a", 0), "being updated")
            assert bad not in [await fleet.next("a") for _ in range(6)]
            assert bad in [await fleet.next("b") for _ in range(6)]
            await asyncio.sleep(0.25)
            assert bad in [await fleet.next("a") for _ in range(12)]

    asyncio.run(run())


def test_session_that_is_gone_before_the_first_turn_is_no_mismatch(tmp_path, capsys):
    """A server restarted between the session and its first screenshot answers 4xx, too."""

    def fault(call, number):
        return "unknown" if call == "screenshot" and number < 2 * MISMATCHED_EPISODES else None

    async def run():
        publish(tmp_path, 0)
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        async with (
            world.verifier() as target,
            world.faulty(target, fault) as (url, _),
            acting(tmp_path, url, any_click(), cfg=ActorConfig(2, 3, env_retries=20)) as (
                actor,
                _,
                _,
            ),
        ):
            await take(queue, 3, 0, actor=actor)

    asyncio.run(run())
    assert "verifier_mismatch" not in capsys.readouterr().out


def test_verifier_full_error_carries_what_the_server_says():
    async def run():
        async with (
            serve(limits=ServerLimits(max_sessions=1)) as port,
            world.client(f"http://127.0.0.1:{port}") as client,
        ):
            await client.create(world.TASK)
            with pytest.raises(VerifierFullError, match="1 of at most 1 sessions") as caught:
                await client.create(world.TASK)
        assert (caught.value.capacity, caught.value.wait_s) == (1, 1.0)

    asyncio.run(run())
