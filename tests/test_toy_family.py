"""A family that the package does not know lives its whole life: nothing outside its folder changes.

It is loaded, sampled with prefix reuse, trained by GRPO on the bundled verifier with packing and
shared prompts, evaluated, exported and loaded again.
"""

import asyncio
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import family_life, tiny_config, toy_family
from tests.toy_family.config import ToyConfig
from tests.toy_family.inputs import TOKENS
from uirl_jax.config import reading, schema
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import loading, table
from uirl_jax.families.border import Capabilities, PlacedScreen, Screen, TokenRows
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoraConfig
from uirl_jax.run import check_family

SPECIAL = ("<eos>", "<user>", "<agent>", "<image>")
LORA = LoraConfig(rank=4, alpha=8.0)
ENGINE = EngineConfig(
    context_lengths=(96,),
    max_new_tokens=8,
    batch_sizes=(2,),
    prefill_rows=(2,),
    prefill_lengths=(32,),
    image_rows=(2,),
    image_row_patches=TOKENS,
    slots=2,
)


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch) -> None:
    monkeypatch.setitem(table.FAMILIES, "toy", toy_family.FAMILY)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A model directory with random weights and a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("toy")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    cfg = ToyConfig(tokenizer.get_vocab_size() + 4, tokenizer.token_to_id("<image>"))
    model = toy_family.FAMILY.make_model(cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    loading.save_model(toy_family.FAMILY, model, directory)
    return directory


def load(model_dir: Path, **options) -> loading.PolicyModel:
    """With adapters as if trained: fresh ones change nothing."""
    policy = loading.load(model_dir, lora=LORA, seed=0, **options)
    rng = np.random.default_rng(1)
    lora = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), policy.trainable
    )
    return dataclasses.replace(policy, trainable=lora)


def screen(policy: loading.PolicyModel, seed: int) -> Screen:
    pixels_hwc = np.random.default_rng(seed).integers(0, 256, (168, 224, 3), np.uint8)
    cut = policy.inputs.cut_screen(Image.fromarray(pixels_hwc))
    return dataclasses.replace(cut, key=f"screen {seed}")


def learner_logprobs(policy: loading.PolicyModel, asked: SampleRequest, sampled) -> np.ndarray:
    """float32[S]: what the learner's pass says of the tokens that the engine sampled."""
    ids_t = np.concatenate([asked.context_ids, np.array(sampled, np.int32)])
    placed = [PlacedScreen(one, row, 0, 1) for row, one in enumerate(asked.screens)]
    packed = policy.inputs.pack_screens(placed, len(placed), TOKENS)
    rows_v = np.concatenate([np.arange(TOKENS) + first for first in packed.first_tokens])
    rows = TokenRows(
        ids_t[None],
        policy.inputs.positions(ids_t, asked.screens)[:, None],
        np.ones_like(ids_t)[None],
        vision_index(ids_t, policy.inputs.image_token_id, rows_v)[None],
    )
    model = nnx.merge(policy.graphdef, policy.trainable, policy.frozen)
    x_btd = model.hidden(rows, model.encode_images(packed.arrays))
    forbidden_v = np.isin(np.arange(policy.cfg.vocab_size), chat(policy).forbidden_ids)
    forbidden_v |= np.arange(policy.cfg.vocab_size) >= chat(policy).vocab_size
    scores_bt = scoring.token_logprobs(model, x_btd, rows.token_ids_bt, forbidden_v=forbidden_v)
    return np.asarray(scores_bt)[0, len(asked.context_ids) :]


def chat(policy: loading.PolicyModel) -> Chat:
    cfg = ChatConfig(system_prompt="", prompt_template="{instruction}")
    return Chat(policy.path, cfg, policy.family.chat)


def test_toy_context_has_its_own_layout(model_dir):
    policy = load(model_dir)
    words = chat(policy)
    context = words.context("Go <user>", [screen(policy, 0)], [])
    text = words.decode(context.ids)
    assert text == "<user>" + "<image>" * TOKENS + "Go <user><agent>"
    assert np.count_nonzero(context.ids == words.forbidden_ids[0]) == 1, "a text opens no turn"


def test_toy_engine_reuses_a_prefix_and_gives_the_learners_logprobs(model_dir):
    policy = load(model_dir)
    words = chat(policy)
    screens = [screen(policy, 0), screen(policy, 1)]
    engine = Engine(policy, words.vocabulary(policy.cfg.vocab_size), ENGINE)

    def request(sampled: list[np.ndarray]) -> SampleRequest:
        context = words.context("Go", screens[: len(sampled) + 1], sampled)
        return SampleRequest(
            context_ids=context.ids,
            screens=tuple(screens[: len(sampled) + 1]),
            max_new_tokens=6,
            temperature=1.0,
            seed=len(sampled),
            episode="e",
        )

    async def run() -> tuple:
        async with engine, asyncio.timeout(300):
            first = await engine.sample(request([]))
            before = engine.metrics()["engine/prefill_tokens"]
            second = await engine.sample(request([first.token_ids]))
            return first, second, engine.metrics()["engine/prefill_tokens"] - before

    first, second, prefilled = asyncio.run(run())
    for asked, result in ((request([]), first), (request([first.token_ids]), second)):
        expected = learner_logprobs(policy, asked, result.token_ids)
        # Two float32 paths that sum in another order.
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert (
        prefilled < len(request([first.token_ids]).context_ids) - len(request([]).context_ids) + 2
    )


def test_toy_trains_evaluates_exports_and_loads_again(model_dir, tmp_path):
    family_life.assert_trains_exports_and_loads_again(model_dir, tmp_path, row_patches=TOKENS)


def test_family_that_cannot_prefill_in_chunks_refuses_such_an_engine(model_dir):
    whole = dataclasses.replace(toy_family.FAMILY, capabilities=Capabilities(chunked_prefill=False))
    policy = dataclasses.replace(load(model_dir), family=whole)
    vocabulary = chat(policy).vocabulary(policy.cfg.vocab_size)
    with pytest.raises(ConfigError, match=r"family toy cannot .*prefill_lengths=.*chunked_prefill"):
        Engine(policy, vocabulary, ENGINE)


def test_run_refuses_by_name_what_the_family_cannot_do():
    nothing = Capabilities(**dict.fromkeys(vars(Capabilities()), False))
    family = dataclasses.replace(toy_family.FAMILY, capabilities=nothing)
    cfg = tiny_config.get_config()
    cfg.model.path = "nowhere"
    cfg.tasks[0].max_turns = 3
    cfg.engine.prefill_lengths = (32,)
    resolved = reading.from_config(schema.RunConfig, cfg)
    with pytest.raises(ConfigError) as caught:
        check_family(resolved, family)
    for value in (
        *("learner.batch.pack=True needs packing", "share_prompts=True needs share_in_group"),
        *("max_turns=3", "chat.max_screenshots=6 needs multi_image", "(32,) below"),
    ):
        assert value in str(caught.value)
    check_family(resolved, toy_family.FAMILY)


def test_directory_of_another_family_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="model_type='bert' is not supported; supported: qwen2_vl"):
        loading.load(tmp_path, lora=None, seed=0)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("idefics3", "its tiles of a screen are not computed")],
)
def test_families_that_are_not_computed_are_refused_with_the_reason(model_type, why, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(ModelError, match=f"'{model_type}' is not supported .{why}") as error:
        loading.load(tmp_path, lora=None, seed=0)
    assert "\n" not in str(error.value)
