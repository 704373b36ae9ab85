"""Florence-2 in the engine: a context is one prefill, an encoder's and the decoder's first tokens.

Greedy tokens are compared with transformers' generate, logprobs with the learner's.
"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import family_world as world
from tests.family_checks import with_random_adapters
from tests.oracles import florence2_torch
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.errors import ConfigError
from uirl_jax.families.border import PlacedScreen, TokenRows
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoraConfig

BOS, END = florence2_torch.BOS, florence2_torch.END
FORBIDDEN = (BOS, *range(288, 292))
VOCABULARY = Vocabulary((-1,), FORBIDDEN)  # nothing ends a turn
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
LORA = LoraConfig(rank=2, targets=("attention", "mlp"))


def context(inputs, words: int, seed: int = 0, *, screen_seed: int = 0) -> SampleRequest:
    """A screen and words, as Florence-2's chat has them."""
    screen = world.screen_of(inputs, (3, 2), screen_seed)
    text = np.random.default_rng(seed).integers(3, 280, words)
    ids = [*[world.IMAGE_TOKEN] * screen.tokens, BOS, *text, END, END, BOS]
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


@jax.jit
def _logprobs(graphdef, trainable, frozen, rows, vision):
    model = nnx.merge(graphdef, trainable, frozen)
    forbidden_v = np.isin(np.arange(world.VOCAB), FORBIDDEN)
    x_btd = model.hidden(rows, model.encode_images(vision))
    return scoring.token_logprobs(model, x_btd, rows.token_ids_bt, forbidden_v=forbidden_v)


def learners(policy, asked: SampleRequest, sampled: np.ndarray, trainable=None) -> np.ndarray:
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
    logprobs_bt = _logprobs(policy.graphdef, trainable, policy.frozen, rows, packed.arrays)
    return np.asarray(logprobs_bt)[0, context_tokens:length]


def assert_logprobs(policy, asked: SampleRequest, result: SampleResult) -> None:
    expected_s = learners(policy, asked, result.token_ids)
    np.testing.assert_allclose(result.full_logprobs, expected_s, atol=1e-4)


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
        assert_logprobs(policy, asked, result)
    assert len({token for _, result in played.turns for token in result.token_ids}) > 2
    metrics = played.after_turns
    assert metrics["engine/cached_tokens"] == 0
    prefilled = sum(len(asked.context_ids) - 1 for asked, _ in played.turns)
    assert metrics["engine/prefill_tokens"] == prefilled
    assert metrics["engine/images_encoded"] == 2


def test_engine_one_prefill_serves_a_group_and_no_other_context_that_begins_alike(played):
    policy = world.policy_of("florence2_odd")
    for asked, result in played.group:
        assert_logprobs(policy, asked, result)
    assert len({tuple(result.token_ids) for _, result in played.group[:3]}) > 1
    lengths = [len(asked.context_ids) - 1 for asked, _ in played.group]
    assert played.counted("engine/prefill_tokens") == lengths[0] + lengths[3] + lengths[4]
    assert played.counted("engine/cached_tokens") == 2 * lengths[0]


def test_engine_new_policy_in_a_turn_computes_context_and_what_was_sampled_again():
    """Also where both together are longer than a call."""
    policy = with_random_adapters(world.policy_of("florence2_odd", LORA))
    other = jax.tree.map(lambda x: 2 * x, policy.trainable)
    cfg = dataclasses.replace(CFG, max_new_tokens=16)
    words = 40 - 4 - policy.inputs.tokens
    asked = dataclasses.replace(context(policy.inputs, words), max_new_tokens=16, temperature=1.0)
    engine = Engine(policy, VOCABULARY, cfg, policy_version=1)

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
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
            learners(policy, asked, result.token_ids, trainable)
            for trainable in (policy.trainable, other)
        )
        assert set(result.policy_versions) == {1, 2}
        assert np.abs(old_s - new_s).max() > 0.01
        expected_s = np.where(result.policy_versions == 1, old_s, new_s)
        np.testing.assert_allclose(result.full_logprobs, expected_s, atol=1e-4)


def test_engine_whose_prefill_would_cut_contexts_is_refused():
    cfg = dataclasses.replace(CFG, prefill_lengths=(16, 32))
    with pytest.raises(ConfigError, match=r"florence2 cannot .*prefill_lengths=\(16, 32\) below"):
        Engine(world.policy_of("florence2_odd"), VOCABULARY, cfg)


def test_int8_cache_gives_nearly_the_learners_logprobs():
    policy = world.policy_of("florence2_odd")
    asked = context(policy.inputs, 9)
    engine = Engine(policy, VOCABULARY, dataclasses.replace(CFG, cache_dtype="int8"))
    (result,) = sample_all(engine, [asked])
    difference = np.abs(result.full_logprobs - learners(policy, asked, result.token_ids)).max()
    assert 0 < difference < 0.3
    assert jnp.isfinite(result.full_logprobs).all()
