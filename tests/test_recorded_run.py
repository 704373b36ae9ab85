"""Pictures of three sizes in one run: what engine and learner compiled for one serves them all."""

import asyncio
import functools
import itertools

import jax
import numpy as np

from tests import actor_world as world
from tests.recorded_rows import InMemory, click, row
from uirl_jax.actor.rollout import RolloutSetup, run_episode
from uirl_jax.learner import algorithm
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.shards import batching
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.client.image_header import image_size
from uirl_jax.verifiers.client.rules import no_own_rule
from uirl_jax.verifiers.recorded import rewards
from uirl_jax.verifiers.recorded.in_process import RecordedClient
from uirl_jax.verifiers.recorded.sets import RecordedSets

SIZES = ((224, 168), (112, 112), (84, 196))
BATCH = batching.BatchConfig(
    rows=4, row_lengths=(256,), image_rows=(8,), patch_lengths=(48,), sampled_lengths=(8,)
)
GROUP = 4


def groups_on(sizes, engine_count):
    """A group on a row of each size, and how many programs the engine had after each."""
    rows = InMemory([row(n, [click(size=size, shade=n)]) for n, size in enumerate(sizes)])
    find = rewards.with_weights({"gaussian": 1.0}, no_own_rule)

    async def play():
        counts, groups = [], []
        async with world.engine() as engine:
            client = RecordedClient(RecordedSets({"made": rows}), find_own_rule=find)
            setup = RolloutSetup(client, engine, world.chat(), world.inputs(), world.ROLLOUT)
            for seed in range(len(sizes)):
                task = TaskSpec("recorded/made", seed, max_turns=1)
                episode = functools.partial(run_episode, task, setup, group_id=str(seed))
                playing = (episode(seed=GROUP * seed + member) for member in range(GROUP))
                groups.append(await asyncio.gather(*playing))
                counts.append(engine.metrics()["engine/compile_count"])
        return groups, counts

    groups, counts = asyncio.run(play())
    engine_count += counts
    return groups


def test_three_sizes_in_one_run_compile_nothing_that_one_did_not():
    engine_count: list[float] = []
    groups = groups_on(SIZES, engine_count)
    seen = [
        {image_size(data, max_pixels=10**6) for record in group for data in record.images.values()}
        for group in groups
    ]
    assert seen == [{size} for size in SIZES]
    tokens = [{count for r in group for count in r.image_tokens.values()} for group in groups]
    assert tokens == [{12}, {9}, {10}]
    assert engine_count[0] > 0 and set(engine_count) == {engine_count[0]}

    policy = world.policy()
    optimizer = learner_state.make_optimizer(learner_state.OptimizerConfig(lr=1e-3), 10)
    cfg = AlgorithmConfig()
    steps = learner_step.make_steps(
        policy.graphdef, optimizer, learner_step.StepConfig(cfg.loss, None, use_reference=True)
    )
    trainable = jax.tree.map(np.array, policy.trainable)  # the step donates it
    state = learner_state.init_state(
        trainable, optimizer, None, policy.family.weights.sharding_rules
    )
    counts = []
    # Each size alone, then all in one batch.
    for members in ([groups[0]], [groups[1]], [groups[2]], [g[:1] for g in groups]):
        state, metrics, _ = algorithm.learn(
            members,
            cfg,
            steps,
            state,
            policy.frozen,
            make_batches=functools.partial(batching.make_batches, inputs=policy.inputs, cfg=BATCH),
            mesh=None,
            seed=0,
        )
        assert np.isfinite(metrics["learner/grad_norm"])
        counts.append(steps.compile_count())
    assert all(before == after for before, after in itertools.pairwise(counts)), counts
