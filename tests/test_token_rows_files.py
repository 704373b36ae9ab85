"""Rows of tokens in files: names of tokens, peft's adapters both ways, merged models, refusals."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import small_model, test_export, tiny_config, tiny_model
from tests.model_files import load_adapter, load_pretrained, save_adapter
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import florence2, loading
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.config import read_model_config
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.families.token_ids import with_token_ids
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig, LoRAParam

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

BOX, QUAD = ("<|box_start|>", "<|box_end|>"), ("<|quad_start|>", "<|quad_end|>")


@pytest.fixture(scope="module", params=["tied", "untied"])
def model_dir(request, tmp_path_factory):
    tied = request.param == "tied"
    return tiny_model.write(tmp_path_factory.mktemp(request.param), tied=tied)


def added_ids(model_dir, *names) -> list[int]:
    added = json.loads((model_dir / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    return sorted(ids[name] for name in names)


# --------------------------------------------------------------------------------- names of tokens


def test_names_and_patterns_are_found_among_the_added_tokens(model_dir):
    def ids(*names, **more):
        lora = with_token_ids(LoraConfig(trainable_tokens=names, **more), model_dir, 10**6)
        assert lora is not None
        assert with_token_ids(lora, model_dir, 10**6) == lora
        return list(lora.token_ids)

    assert ids(*BOX) == added_ids(model_dir, *BOX)
    assert ids("<|box_*|>", "<|quad_end|>") == added_ids(model_dir, *BOX, QUAD[1])
    assert ids("<|*d_start|>") == added_ids(model_dir, QUAD[0])
    assert ids(BOX[0], trainable_token_ids=(2,)) == [2, *added_ids(model_dir, BOX[0])]
    plain = LoraConfig()
    assert with_token_ids(plain, model_dir, 1) is plain and not plain.trains_tokens


def test_names_that_are_no_added_tokens_are_one_error(model_dir):
    wrong = ("<|box_strt|>", "a", "<point_*>", "<|BOX_*|>", *BOX)
    with pytest.raises(ConfigError) as error:
        with_token_ids(LoraConfig(trainable_tokens=wrong), model_dir, 100)
    text = str(error.value)
    assert text.startswith(f"{model_dir}: lora.trainable_tokens: ") and "\n" not in text
    near = "'<|box_strt|>' is no token of the tokenizer; its 14 added tokens have names like "
    assert f"{near}'<|box_start|>'" in text
    assert "'a' is an ordinary token, expected an added one" in text
    assert "lora.trainable_token_ids" in text
    assert "'<point_*>' matches no added token" in text and "'<|BOX_*|>' matches no" in text
    beyond = added_ids(model_dir, *BOX)[0]
    assert f"id {beyond} is beyond the 100 rows" in text


def test_family_without_rows_refuses_the_key(tmp_path):
    lora = LoraConfig(trainable_tokens=("<loc_0>",))
    with pytest.raises(ConfigError, match=r"florence2 cannot do this: model\.lora\.train"):
        loading.check(florence2.FAMILY, tmp_path, lora=lora)


def test_run_with_a_server_refuses_the_key():
    cfg = tiny_config.get_config()
    cfg.model.lora.trainable_tokens = BOX
    assert reading.from_config(RunConfig, cfg).model.lora.trainable_tokens == BOX
    cfg.engine.kind = "openai"
    cfg.engine.openai = {"url": "http://x", "model": "m", "adapters_dir": "adapters"}
    with pytest.raises(ConfigError, match=r"engine\.kind='openai': .*model\.lora\.trainable_tok"):
        reading.from_config(RunConfig, cfg)


# ------------------------------------------------------------------------ loading, saving, merging


def noise(state: nnx.State, seed: int = 7, scale: float = 0.3) -> nnx.State:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), state)


def test_load_starts_at_the_base_and_adapter_and_merged_model_keep_the_rows(model_dir, tmp_path):
    lora = LoraConfig(rank=2, targets=("v_proj",), trainable_tokens=("<|quad_*|>",))
    ids = added_ids(model_dir, *QUAD)
    tables = load_file(model_dir / "model.safetensors")
    names = {"text/embedding_rows/rows": "model.embed_tokens.weight"}
    if "lm_head.weight" in tables:
        names["text/head_rows/rows"] = "lm_head.weight"
    options = {"lora": lora, "seed": 0, "param_dtype": "bfloat16"}
    for quantize in ("none", "int8"):
        model = loading.load(model_dir, quantize=quantize, **options)
        fresh = weights.adapters_to_numpy(model.trainable)
        assert {path for path in fresh if path.endswith("rows")} == set(names)
        for path, name in names.items():
            expected = tables[name][ids].astype(jnp.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(fresh[path], expected)
            assert fresh[path].dtype == np.float32

    trained = noise(model.trainable)
    loading.save_adapter(model, tmp_path / "adapter", lora=trained)
    again = loading.load(model_dir, adapter=tmp_path / "adapter", **options)
    expected = weights.adapters_to_numpy(trained)
    for path, array in weights.adapters_to_numpy(again.trainable).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)

    loading.save_merged(model_dir, lora, trained, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == tables.keys()
    for path, name in names.items():
        table = tables[name].copy()
        table[ids] = expected[path]
        np.testing.assert_array_equal(merged[name], table, err_msg=name)

    other = dataclasses.replace(lora, trainable_tokens=BOX)
    with pytest.raises(ModelError, match=r"model\.lora\.trainable_tokens=\('<\|box_start\|>', .*"):
        loading.load(model_dir, lora=other, seed=0, adapter=tmp_path / "adapter")
    said = loading.adapter_lora(model_dir, tmp_path / "adapter")
    assert said == dataclasses.replace(lora, trainable_tokens=(), trainable_token_ids=tuple(ids))


def test_adapter_with_rows_of_the_embeddings_alone_starts_at_the_untied_head_of_the_base(tmp_path):
    model_dir = tiny_model.write(tmp_path / "model", tied=False)
    lora = LoraConfig(rank=2, targets=("v_proj",), trainable_tokens=QUAD)
    model = loading.load(model_dir, lora=lora, seed=0)
    adapter = tmp_path / "adapter"
    loading.save_adapter(model, adapter, lora=noise(model.trainable))
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.token_adapter.trainable_tokens_delta"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    change_config(adapter, trainable_token_indices=added_ids(model_dir, *QUAD))  # peft's list
    got = weights.adapters_to_numpy(
        loading.load(model_dir, lora=lora, seed=0, adapter=adapter).trainable
    )
    fresh = weights.adapters_to_numpy(model.trainable)
    np.testing.assert_array_equal(got["text/head_rows/rows"], fresh["text/head_rows/rows"])
    assert np.abs(got["text/embedding_rows/rows"] - fresh["text/embedding_rows/rows"]).max() > 0.1


def test_exports_of_a_run_hold_the_rows_and_say_so(model_dir, tmp_path):
    section = {"rank": 2, "alpha": 4.0, "targets": ("v_proj",), "trainable_tokens": QUAD}
    lora = LoraConfig(**section)
    model = loading.load(model_dir, lora=lora, seed=0)
    trained = noise(model.trainable)
    whole = nnx.merge(model.graphdef, trained, model.frozen)
    workdir = test_export.write_run(tmp_path / "run", model_dir, whole, lora=section)
    for kind in ("adapter", "merged"):
        test_export.run(kind, f"--workdir={workdir}", f"--out={tmp_path / kind}")

    expected = weights.adapters_to_numpy(trained)
    again = loading.load(model_dir, lora=lora, seed=0, adapter=tmp_path / "adapter")
    for path, array in weights.adapters_to_numpy(again.trainable).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "and the embeddings of added tokens." in card
    assert "vLLM loads no adapter with rows of tokens" in card and "vllm serve" not in card
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"]
    rows_nd = expected["text/embedding_rows/rows"]
    np.testing.assert_array_equal(merged[added_ids(model_dir, *QUAD)], rows_nd)
    assert "vllm serve" in (tmp_path / "merged" / "README.md").read_text()


# -------------------------------------------------------------------------------------- refusals


def change_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ({"embed_tokens": [3, 7], "lm_head": [3, 8]}, "different tokens for embed_tokens and lm_"),
        ({"q_proj": [3, 7]}, "of 'q_proj', expected those of embed_tokens and lm_head"),
        ([3, 3], r"of 'embed_tokens': expected different numbers below 50"),
        ([3, 50], r"expected different numbers below 50"),
        (["3"], r"=\['3'\], expected numbers of tokens"),
        ([3, 7, 8], r"is \[2, 32\], expected \[3, 32\]"),
    ],
)
def test_indices_that_are_not_computed_are_refused(tmp_path, indices, message):
    lora = LoraConfig(rank=2, targets=("v_proj",), trainable_token_ids=(3, 7))
    save_adapter(small_model.fresh(small_model.UNTIED, lora), tmp_path)
    change_config(tmp_path, trainable_token_indices=indices)
    with pytest.raises(ModelError, match=message):
        load_adapter(tmp_path, small_model.UNTIED)


def test_own_rows_of_a_tied_head_and_whole_modules_are_refused(tmp_path):
    lora = LoraConfig(rank=2, targets=("v_proj",), trainable_token_ids=(3, 7))
    save_adapter(small_model.fresh(small_model.CONFIG, lora), tmp_path)
    saved = load_adapter(tmp_path, small_model.CONFIG)
    # A tied head may be listed too, and the rows of the file are in the order of its tokens.
    change_config(tmp_path, trainable_token_indices={"lm_head": [7, 3], "embed_tokens": [7, 3]})
    turned = load_adapter(tmp_path, small_model.CONFIG)
    assert turned.lora == saved.lora == lora
    rows_nd = saved.arrays["text/embedding_rows/rows"]
    np.testing.assert_array_equal(turned.arrays["text/embedding_rows/rows"], rows_nd[::-1])
    change_config(tmp_path, trainable_token_indices={"lm_head": [3, 7]})
    with pytest.raises(ModelError, match="of 'lm_head', expected those of embed_tokens"):
        load_adapter(tmp_path, small_model.CONFIG)

    advice = "merge the adapter onto its base with peft's merge_and_unload"
    whole = ["embed_tokens", "lm_head"]
    change_config(tmp_path, trainable_token_indices=None, modules_to_save=whole)
    said = re.escape(f"modules_to_save={whole!r} is not supported (whole modules")
    with pytest.raises(ModelError, match=f"{said}.*{advice}"):
        load_adapter(tmp_path, small_model.CONFIG)
    # peft adds whole tables by itself where the vocabulary was resized after loading.
    change_config(tmp_path, modules_to_save=None)
    path = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.model.language_model.embed_tokens.weight"
    save_file(load_file(path) | {name: np.zeros((52, 32), np.float32)}, path)
    with pytest.raises(ModelError, match=rf"unexpected {re.escape(name)}.*{advice}"):
        load_adapter(tmp_path, small_model.CONFIG)


# ------------------------------------------------------------------------------------------- peft

TOKENS_BT = np.array([[3, 17, 100, 5, 44, 8, 44, 71], [9, 5, 2, 90 - 1, 100, 5, 30, 1]], np.int32)
ROWS = TokenRows(
    TOKENS_BT,
    positions_abt=np.broadcast_to(np.arange(8, dtype=np.int32), (3, 2, 8)),
    segment_ids_bt=np.ones_like(TOKENS_BT),
)
WEIGHTS_BTV = np.random.default_rng(5).normal(size=(2, 8, 101)).astype(np.float32)
PEFT_IDS = [44, 5, 100]  # peft keeps any order


@jax.jit
def ours(model: Qwen2VL) -> tuple[jax.Array, nnx.State]:
    """Logits, and the gradients of a weighted sum of them with respect to the adapters."""
    graphdef, adapters, base = nnx.split(model, LoRAParam, ...)

    def loss(adapters):
        model = nnx.merge(graphdef, adapters, base)
        logits_btv = model.logits(model.hidden(ROWS, None))
        return (logits_btv * WEIGHTS_BTV).sum(), logits_btv

    (_, logits_btv), grads = jax.value_and_grad(loss, has_aux=True)(adapters)
    return logits_btv, grads


def theirs(wrapped) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    import torch

    wrapped.zero_grad()
    ids = torch.tensor(TOKENS_BT).long()
    kinds = torch.zeros_like(ids).int()
    logits_btv = wrapped(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds
    ).logits
    (logits_btv * torch.tensor(WEIGHTS_BTV)).sum().backward()
    grads = {
        name: parameter.grad.numpy()
        for name, parameter in wrapped.named_parameters()
        if "trainable_tokens_delta" in name
    }
    return logits_btv.detach().numpy(), grads


def assert_same(model: Qwen2VL, wrapped, ids: list[int]) -> None:
    """Of the largest number: float32 sums of 128 products in another order, through 3 blocks."""
    logits_btv, grads = ours(model)
    expected_btv, expected_grads = theirs(wrapped)
    assert np.abs(logits_btv - expected_btv).max() < 1e-5 * np.abs(expected_btv).max()
    rows = {
        name: array
        for name, array in weights.adapters_to_numpy(grads).items()
        if name.endswith("/rows")
    }
    assert len(rows) == len(expected_grads)
    for name, got_nd in rows.items():
        module = "embed_tokens" if "embedding" in name else "lm_head"
        [wanted_nd] = [array for key, array in expected_grads.items() if module in key]
        wanted_nd = wanted_nd[np.argsort(ids)]
        assert np.abs(got_nd - wanted_nd).max() < 2e-5 * np.abs(wanted_nd).max(), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_peft_computes_the_same_with_adapters_of_either(tied, tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    from tests.oracles import qwen2_vl_torch

    def reference():
        return qwen2_vl_torch.make_reference(head_dim=32, tied=tied)

    base_dir = tmp_path / "base"
    reference().save_pretrained(base_dir)
    lora = LoraConfig(
        rank=3, alpha=6.0, targets=("q_proj", "v_proj"), trainable_token_ids=tuple(PEFT_IDS)
    )
    model = load_pretrained(base_dir, lora=lora)
    nnx.update(model, noise(nnx.state(model, LoRAParam)))

    # Ours -> peft: the same numbers, and what it writes again is what we wrote.
    save_adapter(model, tmp_path / "ours", base_model=base_dir)
    wrapped = peft.PeftModel.from_pretrained(reference(), tmp_path / "ours", is_trainable=True)
    assert_same(model, wrapped.eval(), sorted(PEFT_IDS))
    wrapped.save_pretrained(tmp_path / "again")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "again")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(tensor, files[1][name], err_msg=name)

    # peft -> ours.
    indices = PEFT_IDS if tied else {"embed_tokens": PEFT_IDS, "lm_head": PEFT_IDS}
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        trainable_token_indices=indices,
    )
    wrapped = peft.get_peft_model(reference(), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(tmp_path / "theirs")
    adapter = load_adapter(tmp_path / "theirs", read_model_config(base_dir))
    assert adapter.lora.token_ids == tuple(sorted(PEFT_IDS))
    model = load_pretrained(base_dir, lora=adapter.lora)
    adapters = weights.adapters_from_numpy(adapter.arrays, nnx.state(model, LoRAParam))
    nnx.update(model, adapters)
    assert_same(model, wrapped, PEFT_IDS)
