"""tools.add_point_tokens: the model with tokens for places, and what reads it."""

import dataclasses
import json
import shutil
import stat

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.family_world import change
from tools import add_point_tokens, make_base_model
from tools.base_models.point_tokenizer import PointTokens
from tools.base_models.tiny_architectures import BASES
from uirl_jax import actions
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.types import Action
from uirl_jax.vlm import VLM

BASE = "uirl_jax/assets/tiny-ui-base"
SCREEN = (160, 210)


def run(*arguments: object) -> int:
    return add_point_tokens.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    out = tmp_path_factory.mktemp("points") / "model"
    assert run(BASE, f"--out={out}") == 0
    return out


def chat_of(directory, action_format=""):
    cfg = ChatConfig(action_format=action_format).completed(directory)
    return Chat(directory, cfg, family_of(directory).chat)


def test_tables_grow_and_old_rows_stay_bit_for_bit(grown):
    old, new = (
        safetensors.numpy.load_file(f"{directory}/model.safetensors") for directory in (BASE, grown)
    )
    assert old.keys() == new.keys()
    for name, array in old.items():
        same = new[name][: len(array)] if "embed_tokens" in name else new[name]
        first = 478 if "embed_tokens" in name else len(array)  # of rows without a token before
        assert np.array_equal(same[:first].view(np.uint16), array[:first].view(np.uint16)), name
    (name,) = (name for name in old if "embed_tokens" in name)
    rows_vd = new[name].astype(np.float32)
    assert rows_vd.shape == (640, 192)  # 478 + 128 ids, up to a multiple of 64
    assert json.loads((grown / "config.json").read_text())["vocab_size"] == 640
    used_vd, drawn_nd = rows_vd[:478], rows_vd[478:606]
    assert not rows_vd[606:].any()
    assert len(np.unique(drawn_nd, axis=0)) == 128
    # Of 128 draws, mean and deviation are off by 0.09 and 0.06 deviations; five times that.
    assert np.all(np.abs(drawn_nd.mean(0) - used_vd.mean(0)) < 0.45 * used_vd.std(0))
    assert np.all(np.abs(drawn_nd.std(0) / used_vd.std(0) - 1) < 0.35)


def test_files_have_the_permissions_of_the_old_ones(grown):
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o044 for path in grown.iterdir()}
    assert modes == {0o044}


def test_click_is_four_tokens_and_reads_back(grown):
    chat = chat_of(grown)
    assert chat.action_format.name == "points_64" and chat.cfg.prompt_template == "{instruction}"
    text = actions.format_action(Action("click", x=16, y=107), SCREEN, chat.action_format)
    ids = chat.completion_ids(text)
    assert text == "<x_6><y_32> click" and ids[:2].tolist() == [478 + 6, 478 + 64 + 32]
    assert chat.decode(ids) == text
    spoken = chat.encode(text)  # an instruction that spells them is plain text
    assert not np.isin(spoken, np.arange(478, 606)).any()
    rows = chat_of(BASE, "text").vocabulary(512)
    assert 478 in rows.forbidden_ids and 478 not in chat.vocabulary(640).forbidden_ids
    assert set(range(606, 640)) <= set(chat.vocabulary(640).forbidden_ids)


def test_transformers_reads_the_model_and_the_tokens(grown):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(grown)
    assert tokenizer.encode("<x_6><y_32> click")[:2] == [484, 574]
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        grown, dtype=torch.float32, attn_implementation="eager"
    )
    ids_bt = np.array([[464, 484, 574, 3]])
    with torch.no_grad():
        expected_btv = model(input_ids=torch.from_numpy(ids_bt)).logits.numpy()
    got_btv = VLM.from_pretrained(grown).logits(ids_bt, np.ones_like(ids_bt))
    assert got_btv.shape == (1, 4, 640)
    np.testing.assert_allclose(got_btv, expected_btv, atol=1e-4)


def test_spare_rows_are_used_before_the_table_grows(tmp_path):
    model = shutil.copytree(BASE, tmp_path / "model")
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    (name,) = (name for name in tensors if "embed_tokens" in name)
    tensors[name] = np.tile(tensors[name], (2, 1))
    safetensors.numpy.save_file(tensors, model / "model.safetensors")
    change(model / "config.json", vocab_size=1024)
    assert run(model, "--bins=32", f"--out={tmp_path / 'out'}") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 1024
    rows_vd = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")[name]
    new = slice(478, 478 + 64)
    assert rows_vd.shape == (1024, 192) and not np.array_equal(rows_vd[new], tensors[name][new])
    rest = np.r_[0:478, 542:1024]
    assert np.array_equal(rows_vd[rest].view(np.uint16), tensors[name][rest].view(np.uint16))


def test_output_layer_of_its_own_and_files_in_pieces_grow_too(tmp_path):
    """Weights as of a large model: two files with an index, of which one has both tables."""
    model = shutil.copytree(BASE, tmp_path / "model")
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    (name,) = (name for name in tensors if "embed_tokens" in name)
    (model / "model.safetensors").unlink()
    head = {"lm_head.weight": tensors[name][::-1].copy(), name: tensors.pop(name)}
    files = {"model-00001-of-00002.safetensors": head, "model-00002-of-00002.safetensors": tensors}
    for file, part in files.items():
        safetensors.numpy.save_file(part, model / file)
    index = {"metadata": {"total_size": 1}}
    index["weight_map"] = {tensor: file for file, part in files.items() for tensor in part}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    change(model / "config.json", tie_word_embeddings=False)
    out = tmp_path / "out"
    assert run(model, f"--out={out}") == 0
    grown = safetensors.numpy.load_file(out / "model-00001-of-00002.safetensors")
    assert {array.shape for array in grown.values()} == {(640, 192)}
    # Draws of their own: 24,576 pairs are correlated by 0.006 by chance.
    tables = [array.astype(np.float32) for array in grown.values()]
    draws = [(vd[478:606] - vd[:478].mean(0)) / vd[:478].std(0) for vd in tables]
    assert abs(np.corrcoef(draws[0].ravel(), draws[1].ravel())[0, 1]) < 0.05
    rest = "model-00002-of-00002.safetensors"
    assert (out / rest).read_bytes() == (model / rest).read_bytes()
    sizes = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
    parts = [*grown.values(), *tensors.values()]
    assert sizes["total_size"] == sum(array.nbytes for array in parts)
    assert (
        VLM.from_pretrained(out).logits(np.array([[464, 484]]), np.ones((1, 2), int)).shape[-1]
        == 640
    )


@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "idefics2"])
def test_other_families_are_read_with_their_new_rows(tmp_path, name):
    base = BASES[name]
    if isinstance(base.tokenizer, PointTokens):  # it has such tokens; here it gets others
        changes = {"tokenizer": base.tokenizer.maker, "coordinates": "image", "action_format": ""}
        base = dataclasses.replace(base, **changes)
    trained = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base)[:200], 512)
    model = base.family.make_model(
        base.config(trained), lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32, remat="none"
    )
    make_base_model.write_model(base, model, trained, tmp_path / "model")
    out = tmp_path / "out"
    assert run(tmp_path / "model", f"--out={out}", "--bins=32") == 0
    chat = chat_of(out)
    vlm = VLM.from_pretrained(out)
    ids = chat.completion_ids("<x_3><y_16> click")
    # Tokenizers of Llama's kind put a space before every text.
    assert len(ids) <= 5 and chat.decode(ids).split() == ["<x_3><y_16>", "click"]
    read = actions.parse(chat.decode(ids), SCREEN, chat.action_format)
    assert read == Action("click", x=17, y=108)
    vocab_size = base.family.read_config(out).vocab_size
    assert vlm.logits(ids[None], np.ones((1, len(ids)), int)).shape == (1, len(ids), vocab_size)
    assert vocab_size % 64 == 0 and vocab_size >= chat.vocab_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((BASE,), "is there already"),
        (("nowhere", "--out={out}"), "no config.json"),
        (("{grown}", "--out={out}"), "has the tokens of places already (<x_0>)"),
        (("{loc}", "--out={out}"), "paligemma has tokens for places, in the action format loc"),
        (("{cut}", "--out={out}"), "has 512 rows, config.json's vocab_size is 500"),
        (("{broken}", "--out={out}"), "not a tokenizer.json that can be read"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
    grown, tmp_path, capsys, arguments, said
):
    places = {"grown": grown, "out": tmp_path / "out"}
    for name in ("loc", "cut", "broken"):
        places[name] = shutil.copytree(BASE, tmp_path / name)
    change(tmp_path / "loc" / "config.json", model_type="paligemma")
    change(tmp_path / "cut" / "config.json", vocab_size=500)
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    arguments = [argument.format(**places) for argument in arguments]
    if len(arguments) == 1:
        arguments.append(f"--out={grown}")
    assert run(*arguments) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and said in printed
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
