"""The model of docs/add_a_model.md, which the package does not know, lives its whole life.

It is made, loaded, sampled with prefix reuse, trained by GRPO on the bundled verifier with packing
and shared prompts, evaluated, exported and loaded again.
"""

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from examples import own_model
from examples.own_model import tokenizer
from examples.own_model.config import OwnConfig
from examples.own_model.inputs import COLUMNS, ROWS, TOKENS
from tests import family_life, tiny_config
from tools import supervised_rows
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

ROOT = Path(__file__).parents[1]
TAKEN = dataclasses.replace(own_model.FAMILY, model_type="qwen2_vl")
LORA = LoraConfig(rank=4, alpha=8.0)
ENGINE = EngineConfig(
    context_lengths=(128,),
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
    monkeypatch.setattr(table, "FAMILIES", dict(table.FAMILIES))
    table.add_own("examples.own_model:FAMILY")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A model directory with random weights, smaller than the example's."""
    directory = tmp_path_factory.mktemp("own")
    trained = tokenizer.train_tokenizer(["click(1, 2)"], 300)
    tokenizer.save(trained, directory)
    cfg = OwnConfig(
        trained.get_vocab_size() + 4,
        trained.token_to_id("<image>"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        channels=(8, 12),
    )
    model = own_model.FAMILY.make_model(cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    loading.save_model(own_model.FAMILY, model, directory)
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


def test_own_model_context_has_its_own_layout(model_dir):
    policy = load(model_dir)
    words = chat(policy)
    context = words.context("Go <user>", [screen(policy, 0)], [])
    text = words.decode(context.ids)
    assert text == "<user>" + "<image>" * TOKENS + "Go <user><agent>"
    assert np.count_nonzero(context.ids == words.forbidden_ids[0]) == 1, "a text opens no turn"


def test_own_model_engine_reuses_a_prefix_and_gives_the_learners_logprobs(model_dir):
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


def test_own_model_trains_evaluates_exports_and_loads_again(model_dir, tmp_path):
    family_life.assert_trains_exports_and_loads_again(model_dir, tmp_path, row_patches=TOKENS)


def test_family_that_cannot_prefill_in_chunks_refuses_such_an_engine(model_dir):
    whole = dataclasses.replace(own_model.FAMILY, capabilities=Capabilities(chunked_prefill=False))
    policy = dataclasses.replace(load(model_dir), family=whole)
    vocabulary = chat(policy).vocabulary(policy.cfg.vocab_size)
    with pytest.raises(
        ConfigError, match=r"family own_model cannot .*prefill_lengths=.*chunked_prefill"
    ):
        Engine(policy, vocabulary, ENGINE)


def test_run_refuses_by_name_what_the_family_cannot_do():
    nothing = Capabilities(**dict.fromkeys(vars(Capabilities()), False))
    family = dataclasses.replace(own_model.FAMILY, capabilities=nothing)
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
    check_family(resolved, own_model.FAMILY)
    # The newest turn alone: no context grows.
    resolved = dataclasses.replace(
        resolved, chat=dataclasses.replace(resolved.chat, history_turns=0)
    )
    with pytest.raises(ConfigError) as caught:
        check_family(resolved, family)
    assert "max_turns" not in str(caught.value) and "multi_image" not in str(caught.value)


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


@pytest.mark.parametrize("system", ["", "You click."])
@pytest.mark.parametrize("said", [None, "Be quick."])
def test_template_writes_the_chat_that_the_model_is_trained_on(model_dir, system, said):
    """As transformers renders it, with 48 placeholders a screen."""
    policy = load(model_dir)
    asked = system if said is None else said
    cfg = ChatConfig(system_prompt=asked, prompt_template="{instruction}")
    words = Chat(policy.path, cfg, policy.family.chat)
    screens = [screen(policy, 0), screen(policy, 1)]
    reply = words.completion_ids("click(1, 2)")
    expected = words.decode(words.context("Go", screens, [reply]).ids)
    messages: list[dict] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go"}]},
        {"role": "assistant", "content": "click(1, 2)"},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    if said is not None:
        messages.insert(0, {"role": "system", "content": said})
    template = jinja2.Environment().from_string(policy.family.chat.template(system))
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered.replace("<image>", "<image>" * TOKENS) == expected
    assert not template.render(messages=messages).endswith("<agent>")


def test_image_token_of_another_tokenizer_is_refused(model_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    values = json.loads((copy / "config.json").read_text())
    values["image_token_id"] += 1
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"config.json says image_token_id=\d+, in tokenizer.json"):
        load(copy)


def test_vision_part_that_the_model_lacks_is_refused(model_dir, monkeypatch):
    wrong = dataclasses.replace(own_model.FAMILY, vision_parts=("visual",))
    monkeypatch.setitem(table.FAMILIES, "own_model", wrong)
    with pytest.raises(ModelError, match="the model has no attribute 'visual'"):
        load(model_dir)


def test_markers_of_turns_are_needed_and_the_placeholder_is_never_sampled(model_dir):
    layout = dataclasses.replace(own_model.FAMILY.chat, forbidden=())
    assert set(layout.needed) == {"<eos>", "<user>", "<agent>", "<image>"}
    words = Chat(model_dir, ChatConfig(system_prompt="", prompt_template="{instruction}"), layout)
    assert words.forbidden_ids == (words.image_token_id,)


def test_screens_of_all_modes_are_read(model_dir):
    inputs = load(model_dir).inputs
    for mode in ("L", "RGBA", "P"):
        assert inputs.cut_screen(Image.new(mode, (30, 20))).arrays is not None


def test_convolution_is_that_of_jax(model_dir):
    policy = load(model_dir)
    stage = nnx.merge(policy.graphdef, policy.trainable, policy.frozen).screen.stage1
    x_ihwc = np.random.default_rng(2).normal(size=(2, ROWS, COLUMNS, 8)).astype(np.float32)
    expected = jax.lax.conv_general_dilated(
        stage.norm(x_ihwc),
        stage.conv.kernel[...].reshape(3, 3, 8, 8),
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    expected = x_ihwc + stage.mix(jax.nn.gelu(expected + stage.conv.bias[...]))
    got = stage(x_ihwc, adapters=True, dropout_key=None)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_visual_tokens_stand_in_rows_from_the_top(model_dir):
    """A mark in the screen changes the token of its place and the ones around it."""
    policy = load(model_dir)
    model = nnx.merge(policy.graphdef, policy.trainable, policy.frozen)

    def tokens(image: Image.Image) -> np.ndarray:
        cut = policy.inputs.cut_screen(image)
        packed = policy.inputs.pack_screens([PlacedScreen(cut, 0, 0, 1)], 1, TOKENS)
        return np.asarray(model.encode_images(packed.arrays)).reshape(6, 8, -1)

    blank = Image.new("RGB", (512, 384))
    marked = blank.copy()
    marked.paste((255, 255, 255), (330, 200, 370, 240))  # of 64 x 64 pixels a token
    moved = np.abs(tokens(marked) - tokens(blank)).max(-1)
    assert np.unravel_index(moved.argmax(), moved.shape) == (200 // 64, 330 // 64)
    assert not moved[0].any() and not moved[:, 0].any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"channels": [8]}, "channels=(8,), expected two positive integers"),
        ({"hidden_size": "wide"}, "hidden_size='wide', expected a positive integer"),
        ({"rope_scaling": {}}, "nothing here computes rope_scaling"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0, expected a positive integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x', expected a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected a bool"),
        ({"vocab_size": None}, "vocab_size=None, expected a positive integer"),
    ],
)
def test_config_that_is_not_computed_is_refused(model_dir, tmp_path, change, said):
    values = json.loads((model_dir / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        own_model.FAMILY.read_config(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("examples.own_model:LAYOUT", "has no such name"),
        ("examples.own_model:model", "model is module, expected a families.border.Family"),
        ("examples.nowhere:FAMILY", "no module 'examples.nowhere'"),
        ("tests.test_own_model:TAKEN", "model_type 'qwen2_vl' is another family's"),
    ],
)
def test_family_that_cannot_be_added_is_one_error(reference, said):
    with pytest.raises(ConfigError) as caught:
        table.add_own(reference)
    assert said in str(caught.value) and str(caught.value).startswith("model.family=")


def test_commands_of_the_docs_make_it_train_it_and_export_it(tmp_path):
    """In a process each, as a user runs them; cut down to a few steps."""
    base, run = tmp_path / "base", tmp_path / "run"
    for command in (
        (
            *("examples.own_model.make_base", f"--out={base}", f"--workdir={tmp_path / 'work'}"),
            *("--batch_rows=4", "--finding_steps=2", "--telling_steps=1", "--acting_steps=1"),
        ),
        (
            *("uirl_jax.main", "--config=examples/own_model/quickstart.py", f"--workdir={run}"),
            *(f"--config.model.path={base}", "--config.learner.steps=1"),
            *("--config.evaluation.episodes=8", "--config.learner.groups_per_step=2"),
        ),
        ("tools.export", "merged", f"--workdir={run}", f"--out={tmp_path / 'merged'}"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    assert loading.load(tmp_path / "merged", lora=None, seed=0).family is own_model.FAMILY


def test_instructions_that_begin_otherwise_do_not_share_a_screen(tmp_path):
    """Here the first token behind the screen is the instruction's."""
    trained = tokenizer.train_tokenizer(["Click the red button.", "Type a word."] * 50, 400)
    tokenizer.save(trained, tmp_path)
    own_chat = ChatConfig(system_prompt="", prompt_template="{instruction}")
    chat = Chat(tmp_path, own_chat, own_model.FAMILY.chat)
    cfg = OwnConfig(trained.get_vocab_size(), trained.token_to_id("<image>"))
    inputs = own_model.FAMILY.make_inputs(cfg)
    screen = inputs.cut_screen(Image.new("RGB", (224, 168)))
    options = {"chat": chat, "inputs": inputs, "row_tokens": 256}
    asked = [("Click the red button.", "click(1, 2)"), ("Click the red button.", "click(3, 4)")]
    questions = supervised_rows.questions_about(screen, asked, **options)
    assert len(questions.asked) == 2
    with pytest.raises(ValueError, match=r"'Type a word\.' begins within the token behind"):
        supervised_rows.questions_about(screen, [*asked, ("Type a word.", "wait(1)")], **options)
    few = supervised_rows.questions_about(screen, asked, **options | {"row_tokens": 70})
    assert len(few.asked) == 1  # the second finds no room
