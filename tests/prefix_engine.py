"""Pieces of the engine tests of families whose context is one prefill: PaliGemma, Florence-2.

Logprobs are compared with the learner's; what is sampled, and in what contexts, is each test's.
"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import family_world as world
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.families.border import PlacedScreen, TokenRows
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring

# The shorter context reads so few positions that the last token of one of 33 would be left out.
CFG = EngineConfig(
    batch_sizes=(5,),
    context_lengths=(24, 40),
    prefill_rows=(2,),
    prefill_lengths=(40,),
    image_rows=(1,),
    image_row_patches=12,
    max_new_tokens=8,
    decode_steps=1,
)


def request(ids: list[int], screen, seed: int) -> SampleRequest:
    """Greedy, of a context with one screen."""
    return SampleRequest(
        context_ids=np.array(ids, np.int32),
        screens=(screen,),
        max_new_tokens=8,
        temperature=0.0,
        seed=seed,
    )


def sample_all(engine: Engine, asked: list[SampleRequest]) -> list[SampleResult]:
    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            return await asyncio.gather(*map(engine.sample, asked))

    return asyncio.run(run())


@jax.jit
def _logprobs(graphdef, trainable, frozen, rows, vision, forbidden_v):
    model = nnx.merge(graphdef, trainable, frozen)
    x_btd = model.hidden(rows, model.encode_images(vision))
    return scoring.token_logprobs(model, x_btd, rows.token_ids_bt, forbidden_v=forbidden_v)


def learners(
    policy, words: Vocabulary, asked: SampleRequest, sampled: np.ndarray, trainable=None
) -> np.ndarray:
    """float32[S], what the learner computes for the sampled tokens; all rows have one length."""
    ids = np.concatenate([asked.context_ids, sampled]).astype(np.int32)
    length, context_tokens = len(ids), len(asked.context_ids)

    def row(values: np.ndarray, padding: int = 0) -> np.ndarray:
        return np.pad(values, (0, 56 - length), constant_values=padding)[None]

    packed = policy.inputs.pack_screens([PlacedScreen(asked.screens[0], 0, 0, 1)], 1, 12)
    rows_v = np.arange(asked.screens[0].tokens)
    rows = TokenRows(
        row(ids),
        row(policy.inputs.positions(ids, asked.screens)[0])[None],
        row(np.ones(length, np.int32)),
        row(vision_index(ids, world.IMAGE_TOKEN, rows_v), -1),
        turn_ids_bt=row((np.arange(length) >= context_tokens).astype(np.int32)),
    )
    trainable = policy.trainable if trainable is None else trainable
    forbidden_v = np.isin(np.arange(world.VOCAB), words.forbidden_ids)
    logprobs_bt = _logprobs(
        policy.graphdef, trainable, policy.frozen, rows, packed.arrays, forbidden_v
    )
    return np.asarray(logprobs_bt)[0, context_tokens:length]


def assert_logprobs(policy, words: Vocabulary, asked: SampleRequest, result: SampleResult) -> None:
    expected_s = learners(policy, words, asked, result.token_ids)
    np.testing.assert_allclose(result.full_logprobs, expected_s, atol=1e-4)


def assert_new_policy_in_a_turn(policy, words: Vocabulary, asked: SampleRequest) -> None:
    """Context and what was sampled are computed again; what was sampled stays causal.

    Args:
      policy: with adapters.
      asked: of 16 tokens, so that both together are longer than a call.
    """
    other = jax.tree.map(lambda x: 2 * x, policy.trainable)
    cfg = dataclasses.replace(CFG, max_new_tokens=16)
    engine = Engine(policy, words, cfg, policy_version=1)

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            await engine.warm_up()
            turns = [
                asyncio.create_task(engine.sample(dataclasses.replace(asked, seed=seed)))
                for seed in (0, 1)
            ]
            while engine.metrics()["engine/tokens_sampled"] < 6:
                await asyncio.sleep(0)
            engine.set_policy(other, 2)
            return await asyncio.gather(*turns)

    for result in asyncio.run(run()):
        old_s, new_s = (
            learners(policy, words, asked, result.token_ids, trainable)
            for trainable in (policy.trainable, other)
        )
        assert set(result.policy_versions) == {1, 2}
        assert np.abs(old_s - new_s).max() > 0.01
        expected_s = np.where(result.policy_versions == 1, old_s, new_s)
        np.testing.assert_allclose(result.full_logprobs, expected_s, atol=1e-4)


def assert_int8_cache_is_near(policy, words: Vocabulary, asked: SampleRequest) -> None:
    engine = Engine(policy, words, dataclasses.replace(CFG, cache_dtype="int8"))
    (result,) = sample_all(engine, [asked])
    expected_s = learners(policy, words, asked, result.token_ids)
    difference = np.abs(result.full_logprobs - expected_s).max()
    assert 0 < difference < 0.3
    assert jnp.isfinite(result.full_logprobs).all()
