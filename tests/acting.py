"""Actors in this process: real actor, queue and verifier; the test is the learner."""

import asyncio
import contextlib
import time

import numpy as np

from tests import actor_world as world
from uirl_jax import policy_sync
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import ActorConfig, LearnerLink, TaskSource, run_actor
from uirl_jax.actor.player import Player
from uirl_jax.engine.engine import Engine
from uirl_jax.store import open_store
from uirl_jax.types import TaskSpec

RUN, ACTOR, BASE = "run", "a0", "base"
CFG = ActorConfig(group_size=3, groups_per_step=2, poll_s=0.01, report_s=0.1)
COUNTERS = ("published", "env_error", "running", "lost")


def task_of(index: int, tallies: object = None) -> TaskSpec:
    return TaskSpec("desktop/click_button", seed=100 + index, variant="misses=9", max_turns=2)


def any_click() -> world.ScriptedEngine:
    return world.ScriptedEngine(lambda turn: "click(60, 40)" if turn % 3 else "click(160, 120)")


def publish(workdir, version, trained=(), **changes):
    fields = {"base_hash": BASE, "run_id": RUN} | changes
    return policy_sync.publish(
        open_store(workdir),
        version=version,
        step=version,
        arrays={"a": np.full(3, version, np.float32)},
        extra={"groups_trained": [[i, i + 1] for i in sorted(trained)]},
        **fields,
    )


@contextlib.asynccontextmanager
async def acting(
    workdir, urls, engine, *, cfg=CFG, task_for_group=task_of, concurrency=6, actor_id=ACTOR
):
    """(the running actor's task, its stop event, its reports); cancelled at the end."""
    base_urls = (lambda: [urls]) if isinstance(urls, str) else urls
    async with contextlib.AsyncExitStack() as stack:
        real = engine if isinstance(engine, Engine) else None
        if real is not None:
            await stack.enter_async_context(real)
        fleet = await stack.enter_async_context(Fleet(base_urls, world.client, max_rest_s=0.3))
        player = Player(
            fleet,
            engine,
            world.chat(),
            world.inputs(),
            world.ROLLOUT,
            concurrency=concurrency,
            run_id=RUN,
            actor_id=actor_id,
        )
        stop, reports = asyncio.Event(), []
        actor = asyncio.create_task(
            run_actor(
                player,
                cfg,
                LearnerLink(
                    workdir,
                    BASE,
                    world.layout(),
                    lambda adapters: world.policy().trainable if engine is real else None,
                ),
                TaskSource(task_for_group, run_seed=7),
                stop,
                reports.append,
            )
        )
        try:
            yield actor, stop, reports
        finally:
            actor.cancel()
            await asyncio.gather(actor, return_exceptions=True)


async def until(condition, actor=None):
    end_s = time.monotonic() + 120.0  # only for a defect: nothing here takes seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        if actor is not None and actor.done():
            actor.result()
            raise AssertionError("the actor ended early")
        await asyncio.sleep(0.01)


async def take(queue, n_groups, version, max_staleness=0, actor=None):
    taken = []

    def looked():
        queue.poll()
        groups = queue.take_groups(n_groups, version, max_staleness)
        taken.append(groups)
        return groups is not None

    await until(looked, actor)
    return taken[-1]


def indices(groups):
    return [int(group[0].group_id) for group in groups]


def assert_adds_up(report):
    assert report["actor/started"] == sum(report[f"actor/{name}"] for name in COUNTERS), report
