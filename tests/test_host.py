"""Many episodes: groups arrive whole and in order, faults cost retries, nothing goes uncounted."""

import asyncio
import dataclasses
import functools
import shutil

import pytest

from tests import actor_world as world
from tests.acting import (
    ACTOR,
    BASE,
    CFG,
    RUN,
    acting,
    any_click,
    assert_adds_up,
    indices,
    publish,
    take,
    task_of,
    until,
)
from tests.sample_trajectories import make_trajectory
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import ActorConfig, run_tasks
from uirl_jax.actor.journal import Journal
from uirl_jax.actor.player import Attempt, Player
from uirl_jax.errors import PolicyError
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, TaskSpec, Trajectory

# ------------------------------------------------------------------------------ with a learner


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_actor_beside_a_learner_publishes_whole_groups_in_order_and_never_runs_ahead(
    tmp_path, max_staleness
):
    cfg = ActorConfig(3, 2, max_staleness=max_staleness, steps=3, poll_s=0.01)
    published_version, started = 0, []

    def task_for_group(index, tallies):
        started.append(index)
        assert len(started) <= (max_staleness + published_version + 1) * cfg.groups_per_step
        return task_of(index)

    async def run():
        nonlocal published_version
        queue, trained = ShardQueue(open_store(tmp_path), RUN, BASE), []
        async with (
            world.verifier() as url,
            acting(tmp_path, url, world.engine(), cfg=cfg, task_for_group=task_for_group) as (
                actor,
                _,
                reports,
            ),
        ):
            publish(tmp_path, 0)
            for step in range(cfg.steps):
                groups = await take(queue, 2, step, max_staleness, actor)
                for group in groups:
                    assert len(group) == 3 and len({t.group_id for t in group}) == 1
                    assert {t.task for t in group} == {task_of(int(group[0].group_id))}
                    assert len({t.turns[0].image_keys for t in group}) == 1
                    assert len({t.episode_id for t in group}) == 3
                    versions = {turn.policy_version for t in group for turn in t.turns}
                    assert versions <= set(range(step - max_staleness, step + 1))
                    assert max_staleness or versions == {step}
                trained += indices(groups)
                published_version = step + 1
                publish(tmp_path, step + 1, trained)
            report = await actor
            assert await world.open_sessions(url) == 0
        assert len(set(trained)) == 6
        assert max_staleness or trained == [0, 1, 2, 3, 4, 5]
        assert report == reports[-1]
        assert_adds_up(report)
        assert report["actor/running"] == 0
        queue.poll()
        assert report["actor/published"] == queue.accounting()["published"]
        for name in ("actor/reward", "agent_loop/generate_sequences/mean", "engine/requests"):
            assert name in report

    asyncio.run(run())


def test_actor_with_faults_on_the_way_refills_and_counts(tmp_path):
    def fault(call, number):
        return "error" if call == "act" and number % 5 == 2 else None

    cfg, engine = ActorConfig(3, 4, env_retries=20, report_s=0.0), any_click()

    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 0)
        async with (
            world.verifier() as target,
            world.faulty(target, fault) as (url, _),
            acting(tmp_path, url, engine, cfg=cfg) as (actor, stop, reports),
        ):
            groups = await take(queue, 4, 0, actor=actor)
            stop.set()
            report = await actor
            assert await world.open_sessions(target) == 0
        assert indices(groups) == [0, 1, 2, 3]
        assert all(len(group) == 3 for group in groups)
        reasons = {t.stop_reason for group in groups for t in group}
        assert StopReason.ENV_ERROR not in reasons
        assert report["actor/env_error"] > 0
        assert report["actor/published"] == 12
        seeds = [request.seed for request in engine.requests]  # also of what is played again
        assert len(set(seeds)) == len(seeds)
        for moment in reports:  # at any time, not only at the end
            assert_adds_up(moment)

    asyncio.run(run())


def test_actor_whose_fleet_goes_and_comes_back_elsewhere_carries_on(tmp_path, capsys):
    async def run():
        queue, urls = ShardQueue(open_store(tmp_path), RUN, BASE), []
        publish(tmp_path, 0)
        cfg = ActorConfig(3, 6, env_retries=2, steps=1, poll_s=0.01)
        engine = any_click()
        async with acting(tmp_path, lambda: urls, engine, cfg=cfg) as (actor, _, _):
            async with world.verifier() as url:
                urls[:] = [url]
                await take(queue, 1, 0, actor=actor)
            seen = len(engine.requests)
            for _ in range(4):  # more often than a member may fail while the fleet is up
                await until(lambda: "verifier_down" in capsys.readouterr().out, actor)
            urls.clear()
            await until(lambda: "no_verifier" in capsys.readouterr().out, actor)
            assert len(engine.requests) <= seen + 6
            async with world.verifier() as url:
                urls[:] = [url]
                groups = await take(queue, 5, 0, actor=actor)
                publish(tmp_path, 1, range(6))
                report = await actor
                assert await world.open_sessions(url) == 0
        assert indices(groups) == [1, 2, 3, 4, 5]
        assert_adds_up(report)
        assert report["actor/published"] == 18

    asyncio.run(run())


def test_actor_gives_a_group_up_after_its_retries_and_does_not_try_it_again(tmp_path, capsys):
    def fault(call, number):
        return "error" if call == "act" and number == 0 else None

    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 0)
        cfg = ActorConfig(1, 2, env_retries=0, poll_s=0.01)
        async with world.verifier() as target, world.faulty(target, fault) as (url, _):
            async with acting(tmp_path, url, any_click(), cfg=cfg, concurrency=1) as (actor, _, _):
                groups = await take(queue, 2, 0, actor=actor)
                assert indices(groups) == [1, 2]
            async with acting(tmp_path, url, any_click(), cfg=cfg, concurrency=1) as (actor, _, _):
                publish(tmp_path, 1, [1, 2])
                assert indices(await take(queue, 2, 1, actor=actor)) == [3, 4]

    asyncio.run(run())
    assert "event=group_abandoned group=0" in capsys.readouterr().out


def test_instance_that_the_verifier_refuses_costs_its_group_alone(tmp_path, capsys):
    def task_for_group(index, tallies=None):
        task = task_of(index)
        return dataclasses.replace(task, variant="nonsense") if index == 1 else task

    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 0)
        cfg = ActorConfig(1, 2, env_retries=1, poll_s=0.01)
        how = {"cfg": cfg, "concurrency": 1, "task_for_group": task_for_group}
        async with (
            world.verifier() as url,
            acting(tmp_path, url, any_click(), **how) as (actor, _, _),
        ):
            assert indices(await take(queue, 2, 0, actor=actor)) == [0, 2]

    asyncio.run(run())
    assert "event=group_abandoned group=1" in capsys.readouterr().out


def test_actor_that_lags_samples_with_the_policy_of_so_many_versions_ago(tmp_path):
    taken: list[int] = []

    class Recording(world.ScriptedEngine):
        def set_policy(self, trainable: object, version: int) -> None:
            taken.append(version)
            super().set_policy(trainable, version)

    cfg = ActorConfig(2, 1, max_staleness=2, policy_lag=2, poll_s=0.01)
    engine = Recording(lambda turn: "click(1, 1)")

    async def run():
        publish(tmp_path, 0)
        async with (
            world.verifier() as url,
            acting(tmp_path, url, engine, cfg=cfg) as (actor, _, _),
        ):
            for version in range(1, 5):
                await until(lambda count=version: len(taken) == count, actor)
                publish(tmp_path, version)
            await until(lambda: len(taken) == 5, actor)

    asyncio.run(run())
    assert taken == [0, 0, 0, 1, 2]


def test_actor_stopped_publishes_what_is_whole_and_counts_the_rest(tmp_path):
    """Group 1 is whole, but group 0, which comes before it, hangs."""

    # Told apart by their instructions: which asks first is chance.
    def task_for_group(index, tallies):
        name = "desktop/click_button" if index else "desktop/enter_text"
        return TaskSpec(name, index, max_turns=1)

    class Hanging(world.ScriptedEngine):
        async def sample(self, request):
            if "press OK" in world.chat().decode(request.context_ids):
                await asyncio.Event().wait()
            return await super().sample(request)

    async def run():
        publish(tmp_path, 0)
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        cfg = ActorConfig(2, 2, poll_s=0.01, report_s=0.0)
        async with (
            world.verifier() as url,
            acting(
                tmp_path,
                url,
                Hanging(lambda turn: "click(60, 40)"),
                cfg=cfg,
                task_for_group=task_for_group,
                concurrency=4,
            ) as (actor, stop, reports),
        ):
            # Each report is of the time since the last one.
            await until(lambda: any(report["actor/turns"] > 0 for report in reports), actor)
            await asyncio.sleep(0.5)
            queue.poll()
            assert queue.accounting()["published"] == 0  # not before group 0
            assert all(report["actor/running"] <= 4 for report in reports)
            for report in reports:
                assert_adds_up(report)
            stop.set()
            report = await actor
            assert await world.open_sessions(url) == 0
        queue.poll()
        (group,) = queue.take_groups(1, 0, 0)
        assert int(group[0].group_id) == 1
        assert (report["actor/published"], report["actor/lost"]) == (2, 2)
        assert_adds_up(report)

    asyncio.run(run())


def test_actor_cancelled_leaves_no_session_and_no_task(tmp_path):
    engine = world.ScriptedEngine(lambda turn: "wait(0.2)")

    async def run():
        publish(tmp_path, 0)
        async with world.verifier() as url:
            before = world.our_tasks()
            async with acting(tmp_path, url, engine) as (actor, _, _):
                await until(lambda: len(engine.requests) >= 3, actor)
                actor.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await actor
                assert await world.open_sessions(url) == 0
            assert world.our_tasks() == before
            assert set(engine.released) >= {request.episode for request in engine.requests}
        journal = Journal(tmp_path, ACTOR, RUN)
        assert journal.settle(lambda index: False) == 0  # close() had counted them
        assert journal.total("started") == journal.total("lost") > 0
        journal.close()

    asyncio.run(run())


def test_actor_killed_and_restarted_repeats_what_was_lost_and_nothing_else(tmp_path, capsys):
    """SIGKILL is a copy of the workdir, taken while group 1 runs: no code runs after it."""
    first, second = tmp_path / "first", tmp_path / "second"

    class Slow(world.ScriptedEngine):
        async def sample(self, request):
            if len(self.requests) >= 4:
                self.requests.append(request)
                await asyncio.Event().wait()
            return await super().sample(request)

    cfg = ActorConfig(2, 2, steps=1, poll_s=0.01)
    task = TaskSpec("desktop/click_button", seed=1, variant="misses=9", max_turns=2)

    async def run():
        publish(first, 0)
        slow = Slow(lambda turn: "click(1, 1)")
        async with (
            world.verifier() as url,
            acting(first, url, slow, cfg=cfg, concurrency=2, task_for_group=lambda *_: task) as (
                actor,
                _,
                _,
            ),
        ):
            await until(lambda: len(slow.requests) == 6, actor)  # group 0 is whole, group 1 began
            await until(lambda: list(first.glob("shards/*/*.tfrecord")), actor)
            await until(lambda: "published 0 2" in next(first.glob("actor/*")).read_text(), actor)
            shutil.copytree(first, second)
        capsys.readouterr()
        again = world.ScriptedEngine(lambda turn: "click(1, 1)")
        queue = ShardQueue(open_store(second), RUN, BASE)
        async with (
            world.verifier() as url,
            acting(second, url, again, cfg=cfg, concurrency=2, task_for_group=lambda *_: task) as (
                actor,
                _,
                _,
            ),
        ):
            groups = await take(queue, 2, 0, actor=actor)
            publish(second, 1, [0, 1])
            report = await actor
        assert indices(groups) == [0, 1]
        assert len({request.seed for request in slow.requests}) == 6  # by group, member and turn
        lost_seeds = {request.seed for request in slow.requests[4:]}
        assert {request.seed for request in again.requests} >= lost_seeds
        assert len(again.requests) == 4  # group 1 alone: two members of two turns
        assert report["actor/lost"] == 2 and report["actor/published"] == 4
        assert_adds_up(report)
        assert "event=actor_restarted actor=a0 episodes_lost=2" in capsys.readouterr().out

    asyncio.run(run())


def test_actor_that_cannot_write_a_shard_waits_until_it_can(tmp_path, capsys):
    async def run():
        publish(tmp_path, 0)
        directory = tmp_path / "shards" / ACTOR
        directory.parent.mkdir()
        directory.write_bytes(b"")  # a file in its place is as good as a full disk: ShardError
        async with (
            world.verifier() as url,
            acting(tmp_path, url, any_click(), cfg=dataclasses.replace(CFG, steps=1)) as (
                actor,
                _,
                _,
            ),
        ):
            await until(lambda: "shard_not_published" in capsys.readouterr().out, actor)
            directory.unlink()
            queue = ShardQueue(open_store(tmp_path), RUN, BASE)
            assert indices(await take(queue, 2, 0, actor=actor)) == [0, 1]
            publish(tmp_path, 1, [0, 1])
            report = await actor
        assert report["actor/published"] == 6
        assert_adds_up(report)

    asyncio.run(run())


def test_actor_starts_again_what_the_learner_can_no_longer_use(tmp_path):
    """The learner fell back to version 0: what version 1 sampled is lost, its indices are free,
    and stay so when there is a version 1 again."""

    async def run():
        queue = ShardQueue(open_store(tmp_path), RUN, BASE)
        publish(tmp_path, 1, [0, 1])
        async with world.verifier() as url, acting(tmp_path, url, any_click()) as (actor, _, _):
            await until(lambda: len(list(tmp_path.glob("shards/*/*.tfrecord"))) == 2, actor)
            publish(tmp_path, 0)
            groups = await take(queue, 2, 0, actor=actor)
            publish(tmp_path, 1, [0, 1])
            groups += await take(queue, 2, 1, actor=actor)
        assert indices(groups) == [0, 1, 2, 3]
        assert queue.accounting()["quarantined"] == 6

    asyncio.run(run())


@pytest.mark.parametrize("change", [{"base_hash": "other"}, {"run_id": "other"}])
def test_actor_of_another_run_or_model_is_refused(tmp_path, change):
    async def run():
        publish(tmp_path, 0, **change)
        async with acting(tmp_path, "http://127.0.0.1:9", any_click()) as (actor, _, _):
            with pytest.raises(PolicyError, match="other"):
                await asyncio.wait_for(actor, 20.0)

    asyncio.run(run())


def test_actor_whose_engine_fails_ends_with_the_engines_error(tmp_path):
    class Broken(world.ScriptedEngine):
        async def sample(self, request):
            raise PolicyError("policy version 0 gives logprobs that are not finite")

    async def run():
        publish(tmp_path, 0)
        async with (
            world.verifier() as url,
            acting(tmp_path, url, Broken(lambda turn: "")) as (actor, _, _),
        ):
            with pytest.raises(PolicyError, match="not finite"):
                await asyncio.wait_for(actor, 20.0)
            assert await world.open_sessions(url) == 0

    asyncio.run(run())


# ------------------------------------------------------------------------------ for an evaluation


def evaluated(tasks, fault, **options):
    async def run():
        async with (
            world.verifier() as target,
            world.faulty(target, fault) as (url, proxy),
            Fleet(lambda: [url], world.client, max_rest_s=0.3) as fleet,
        ):
            player = Player(
                fleet, any_click(), world.chat(), world.inputs(), world.ROLLOUT, concurrency=3
            )
            trajectories = await run_tasks(player, tasks, **options)
            return trajectories, proxy, await world.open_sessions(target)

    return asyncio.run(run())


def test_run_tasks_keeps_their_order_and_plays_env_errors_again():
    tasks = [task_of(index) for index in range(7)]

    def fault(call, number):
        return "error" if (call, number) in {("session", 1), ("act", 2), ("progress", 4)} else None

    heard = []
    trajectories, proxy, still_open = evaluated(tasks, fault, on_done=heard.append)
    assert [t.task for t in trajectories] == tasks
    assert sorted(map(id, heard)) == sorted(map(id, trajectories))
    assert StopReason.ENV_ERROR not in {t.stop_reason for t in trajectories}
    assert proxy.seen["session"] == 7 + 3
    assert still_open == 0


def test_run_tasks_reports_env_error_after_its_retries():
    trajectories, proxy, _ = evaluated(
        [task_of(0)], lambda call, number: "error" if call == "session" else None, env_retries=2
    )
    assert [t.stop_reason for t in trajectories] == [StopReason.ENV_ERROR]
    assert proxy.seen["session"] == 3


def test_run_tasks_keeps_the_images_of_the_first_episodes_without_env_error_alone():
    tasks = [task_of(index) for index in range(7)]
    refused = tasks[1].seed

    class Played:
        """Ends the episodes in another order than that of their tasks."""

        async def play(self, task, seed, group, on_start=lambda: None):
            await asyncio.sleep(0.01 * (int(group) * 3 % 7))
            made = make_trajectory(f"e{group}", group)
            reason = StopReason.ENV_ERROR if task.seed == refused else made.stop_reason
            made = dataclasses.replace(made, task=task, stop_reason=reason)
            return Attempt(made, fleet_down=False)

    held: list[Trajectory] = []
    play = functools.partial(run_tasks, Played(), tasks, env_retries=0, on_done=held.append)
    kept = asyncio.run(play(keep_images=3))
    assert [bool(t.images) for t in kept] == [True, False, True, True, False, False, False]
    assert [t.task for t in kept] == tasks and all(t.images for t in held)
    everything = asyncio.run(play())
    assert all(t.images for t in everything)
    assert [t.stop_reason for t in kept] == [t.stop_reason for t in everything]
