"""PaliGemma in the engine: a context is one prefill, whose tokens see each other.

Greedy tokens are compared with transformers' generate, logprobs with the learner's.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from tests import family_engine
from tests import family_world as world
from tests.family_checks import with_random_adapters
from tests.prefix_engine import (
    CFG,
    assert_int8_cache_is_near,
    assert_logprobs,
    assert_new_policy_in_a_turn,
    request,
    sample_all,
)
from uirl_jax.engine.engine import Engine, SampleRequest, SampleResult
from uirl_jax.errors import ConfigError
from uirl_jax.families.chat import Vocabulary
from uirl_jax.models.lora import LoraConfig

VOCABULARY = Vocabulary((-1,), family_engine.FORBIDDEN)  # nothing ends a turn
LORA = LoraConfig(rank=2, targets=("attention", "mlp"))


def context(inputs, words: int, seed: int = 0, *, screen_seed: int = 0) -> SampleRequest:
    """A screen, <bos> and words, as PaliGemma's chat has them."""
    screen = world.screen_of(inputs, (3, 2), screen_seed)
    text = np.random.default_rng(seed).integers(3, 280, words)
    ids = [*[world.IMAGE_TOKEN] * screen.tokens, 2, *text]
    return request(ids, screen, seed)


@pytest.mark.parametrize("config", ["paligemma_odd", "paligemma_2", "paligemma_2_odd"])
def test_engine_greedy_tokens_of_turns_equal_generate(config):
    """The turns of an episode: each context is computed anew, with the screens of others or not."""
    policy = world.policy_of(config)
    side = policy.inputs.grid_side**2 + 1
    turns = [
        dataclasses.replace(context(policy.inputs, words, n, screen_seed=n % 2), episode="one")
        for n, words in enumerate((9, 1, 33 - side))
    ]
    engine = Engine(policy, VOCABULARY, CFG)

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            return [await engine.sample(turn) for turn in turns]

    results = asyncio.run(run())
    for asked, result in zip(turns, results, strict=True):
        expected = family_engine.generated(world.reference_of(config), policy.inputs, asked)
        assert result.token_ids.tolist() == expected
        assert_logprobs(policy, VOCABULARY, asked, result)
    # Tied to its embeddings, a random model says one word again and again.
    assert len({token for result in results for token in result.token_ids}) > 2
    metrics = engine.metrics()
    assert metrics["engine/cached_tokens"] == 0
    assert metrics["engine/prefill_tokens"] == sum(len(turn.context_ids) - 1 for turn in turns)
    assert metrics["engine/images_encoded"] == 2


def test_engine_one_prefill_serves_a_group_and_no_other_context_that_begins_alike():
    policy = world.policy_of("paligemma_2")
    one = dataclasses.replace(context(policy.inputs, 12), temperature=1.0)
    group = [dataclasses.replace(one, seed=seed) for seed in (1, 2)]
    # What the engine holds of the first is all but its last token.
    longer = dataclasses.replace(one, context_ids=np.append(one.context_ids, np.int32(5)), seed=3)
    other_end = np.append(one.context_ids[:-1], one.context_ids[-1] + 1).astype(np.int32)
    others = [longer, dataclasses.replace(one, context_ids=other_end, seed=4)]
    engine = Engine(policy, VOCABULARY, CFG)
    asked = [one, *group, *others]
    results = sample_all(engine, asked)
    for one_asked, result in zip(asked, results, strict=True):
        assert_logprobs(policy, VOCABULARY, one_asked, result)
    assert len({tuple(result.token_ids) for result in results[:3]}) > 1
    computed = [one, *others]
    metrics = engine.metrics()
    assert metrics["engine/prefill_tokens"] == sum(len(r.context_ids) - 1 for r in computed)
    assert metrics["engine/cached_tokens"] == 2 * (len(one.context_ids) - 1)


def test_engine_new_policy_in_a_turn_computes_context_and_what_was_sampled_again():
    policy = with_random_adapters(world.policy_of("paligemma_2", LORA))
    asked = dataclasses.replace(context(policy.inputs, 30), max_new_tokens=16)
    assert_new_policy_in_a_turn(policy, VOCABULARY, asked)


def test_engine_whose_prefill_would_cut_contexts_is_refused():
    policy = world.policy_of("paligemma")
    cfg = dataclasses.replace(CFG, prefill_lengths=(16, 32))
    with pytest.raises(ConfigError, match=r"paligemma cannot .*prefill_lengths=\(16, 32\) below"):
        Engine(policy, VOCABULARY, cfg)


def test_int8_cache_gives_nearly_the_learners_logprobs():
    policy = world.policy_of("paligemma")
    assert_int8_cache_is_near(policy, VOCABULARY, context(policy.inputs, 9))
