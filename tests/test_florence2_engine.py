"""Florence-2 in the engine: a context is one prefill, an encoder's and the decoder's first tokens.

Greedy tokens are compared with transformers' generate, logprobs with the learner's.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from tests import family_world as world
from tests.family_checks import with_random_adapters
from tests.oracles import florence2_torch
from tests.prefix_engine import (
    CFG,
    assert_int8_cache_is_near,
    assert_logprobs,
    assert_new_policy_in_a_turn,
    request,
)
from uirl_jax.engine.engine import Engine, SampleRequest, SampleResult
from uirl_jax.errors import ConfigError
from uirl_jax.families.chat import Vocabulary
from uirl_jax.models.lora import LoraConfig

BOS, END = florence2_torch.BOS, florence2_torch.END
FORBIDDEN = (BOS, *range(288, 292))
VOCABULARY = Vocabulary((-1,), FORBIDDEN)  # nothing ends a turn
LORA = LoraConfig(rank=2, targets=("attention", "mlp"))


def context(inputs, words: int, seed: int = 0, *, screen_seed: int = 0) -> SampleRequest:
    """A screen and words, as Florence-2's chat has them."""
    screen = world.screen_of(inputs, (3, 2), screen_seed)
    text = np.random.default_rng(seed).integers(3, 280, words)
    ids = [*[world.IMAGE_TOKEN] * screen.tokens, BOS, *text, END, END, BOS]
    return request(ids, screen, seed)


def generated(config: str, inputs, asked: SampleRequest) -> list[int]:
    """Greedily, by a decoder that begins with what generate would force."""
    pixels = world.pixels_of(inputs, list(asked.screens))
    given = florence2_torch.model_inputs(asked.context_ids[None], pixels, [])
    out_bt = world.reference_of(config).generate(
        **given,
        do_sample=False,
        num_beams=1,
        suppress_tokens=list(FORBIDDEN),
        eos_token_id=291,  # forbidden: nothing ends a turn there either
        pad_token_id=1,
        max_new_tokens=asked.max_new_tokens,
    )
    assert out_bt[0, :2].tolist() == [END, BOS]
    return out_bt[0, 2:].tolist()


@dataclasses.dataclass(frozen=True)
class Played:
    """What one engine sampled, and its metrics after the turns and at the end."""

    turns: list[tuple[SampleRequest, SampleResult]]
    after_turns: dict[str, float]
    group: list[tuple[SampleRequest, SampleResult]]
    at_end: dict[str, float]

    def counted(self, name: str) -> float:
        """By the group alone."""
        return self.at_end[name] - self.after_turns[name]


@pytest.fixture(scope="module")
def played() -> Played:
    """The turns of an episode, with the screens of others or not; then samples at once: three of
    one context, one of a longer context that begins with the same words, one of other words."""
    inputs = world.policy_of("florence2_odd").inputs
    turns = [
        dataclasses.replace(context(inputs, words, n, screen_seed=n % 2), episode="one")
        for n, words in enumerate((9, 1, 33 - 4 - inputs.tokens))
    ]
    group = [
        dataclasses.replace(context(inputs, words, text_seed), temperature=1.0, seed=seed)
        for seed, (words, text_seed) in enumerate([(12, 0)] * 3 + [(14, 0), (12, 5)])
    ]
    assert group[0].context_ids[:-3].tolist() == group[3].context_ids[:-5].tolist()
    engine = Engine(world.policy_of("florence2_odd"), VOCABULARY, CFG)

    async def run() -> Played:
        async with engine, asyncio.timeout(600):
            first = [await engine.sample(turn) for turn in turns]
            after_turns = dict(engine.metrics())
            second = await asyncio.gather(*map(engine.sample, group))
        both = (list(zip(*pair, strict=True)) for pair in ((turns, first), (group, second)))
        done, sampled = both
        return Played(done, after_turns, sampled, dict(engine.metrics()))

    return asyncio.run(run())


def test_engine_greedy_tokens_of_turns_equal_generate(played):
    """Each context is computed anew."""
    policy = world.policy_of("florence2_odd")
    for asked, result in played.turns:
        assert result.token_ids.tolist() == generated("florence2_odd", policy.inputs, asked)
        assert_logprobs(policy, VOCABULARY, asked, result)
    assert len({token for _, result in played.turns for token in result.token_ids}) > 2
    metrics = played.after_turns
    assert metrics["engine/cached_tokens"] == 0
    prefilled = sum(len(asked.context_ids) - 1 for asked, _ in played.turns)
    assert metrics["engine/prefill_tokens"] == prefilled
    assert metrics["engine/images_encoded"] == 2


def test_engine_one_prefill_serves_a_group_and_no_other_context_that_begins_alike(played):
    policy = world.policy_of("florence2_odd")
    for asked, result in played.group:
        assert_logprobs(policy, VOCABULARY, asked, result)
    assert len({tuple(result.token_ids) for _, result in played.group[:3]}) > 1
    lengths = [len(asked.context_ids) - 1 for asked, _ in played.group]
    assert played.counted("engine/prefill_tokens") == lengths[0] + lengths[3] + lengths[4]
    assert played.counted("engine/cached_tokens") == 2 * lengths[0]


def test_engine_new_policy_in_a_turn_computes_context_and_what_was_sampled_again():
    policy = with_random_adapters(world.policy_of("florence2_odd", LORA))
    words = 40 - 4 - policy.inputs.tokens
    asked = dataclasses.replace(context(policy.inputs, words), max_new_tokens=16, temperature=1.0)
    assert_new_policy_in_a_turn(policy, VOCABULARY, asked)


def test_engine_whose_prefill_would_cut_contexts_is_refused():
    cfg = dataclasses.replace(CFG, prefill_lengths=(16, 32))
    with pytest.raises(ConfigError, match=r"florence2 cannot .*prefill_lengths=\(16, 32\) below"):
        Engine(world.policy_of("florence2_odd"), VOCABULARY, cfg)


def test_int8_cache_gives_nearly_the_learners_logprobs():
    policy = world.policy_of("florence2_odd")
    assert_int8_cache_is_near(policy, VOCABULARY, context(policy.inputs, 9))
