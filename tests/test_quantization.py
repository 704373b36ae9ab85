"""int8 projections: what they cost in accuracy, what they save, and that training leaves them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests import small_model, step_world
from tests.model_files import load_pretrained, save_adapter, save_pretrained
from uirl_jax.config.schema import LearnerConfig, ModelConfig, RunConfig, TaskConfig
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.models import quantization, sharding
from uirl_jax.models.lora import Linear, LoraConfig, LoRAParam

# Wide enough for a channel's largest weight to be what it is in a real model, about 3 sigma.
CONFIG = Qwen2VLConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    mrope_section=(8, 12, 12),
    tie_word_embeddings=True,
    initializer_range=0.2,
    vision=VisionConfig(
        depth=2, embed_dim=64, num_heads=2, mlp_ratio=2, hidden_size=256, patch_size=4
    ),
)
TOKENS = 24
IDS_BT = np.random.default_rng(0).integers(0, 512, (4, TOKENS)).astype(np.int32)
POSITIONS_3BT = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (3, 4, TOKENS))
TEXT = TokenRows(IDS_BT, POSITIONS_3BT, segment_ids_bt=np.ones_like(IDS_BT))
VISION_INDEX_BT = np.where(np.arange(TOKENS) < 4, np.arange(TOKENS), -1) * np.ones((4, 1), np.int32)
VISION = {
    "pixels_ipf": np.random.default_rng(1).normal(size=(1, 16, 96)).astype(np.float32),
    "patch_positions_ip2": np.zeros((1, 16, 2), np.int32),
    "patch_segments_ip": np.ones((1, 16), np.int32),
}
LORA = LoraConfig(rank=4, targets=("all", "vision", "merger"))


@functools.cache
def pair() -> tuple[Qwen2VL, Qwen2VL]:
    """The same weights in float32 and with int8 projections; adapters are zero."""
    plain = Qwen2VL(CONFIG, lora=LORA, rngs=nnx.Rngs(0))
    return plain, quantized(Qwen2VL(CONFIG, lora=LORA, rngs=nnx.Rngs(0)))


def quantized(model: nnx.Module) -> nnx.Module:
    return quantization.quantized(model, WEIGHTS.projections)


@jax.jit
def outputs(model: Qwen2VL) -> tuple[jax.Array, jax.Array]:
    rows = TEXT._replace(vision_index_bt=VISION_INDEX_BT)
    x_btd = model.hidden(rows, model.encode_images(VISION))
    return x_btd, model.logits(x_btd)


def distance(left, right) -> float:
    return float(np.linalg.norm(np.asarray(left) - right) / np.linalg.norm(np.asarray(right)))


def oracle(weight_oi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number by number, in Python's floats."""
    q_oi, scales = np.zeros(weight_oi.shape, int), []
    for o, row in enumerate(weight_oi.tolist()):
        scale = max(abs(value) for value in row) / 127 or 1.0
        scales.append(scale)
        for i, value in enumerate(row):
            q_oi[o, i] = round(value / scale)
    return q_oi, np.array(scales)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_quantize_rows_equals_a_loop_over_the_numbers(dtype):
    rng = np.random.default_rng(0)
    # More rows than are taken at a time, of magnitudes from 1e-4 to 1e3; one of zeros.
    weight_oi = rng.normal(size=(300, 17)) * 10.0 ** rng.uniform(-4, 3, (300, 1))
    weight_oi[7] = 0
    weight_oi = weight_oi.astype(dtype)
    q_oi, scale_o = quantization.quantize_rows(weight_oi)
    expected_oi, expected_o = oracle(weight_oi.astype(np.float64))
    assert (q_oi.dtype, scale_o.dtype) == (np.int8, np.float32)
    np.testing.assert_allclose(scale_o, expected_o, rtol=1e-6)
    # A quotient within float32's rounding of a half may go either way.
    different = q_oi != expected_oi
    assert different.mean() < 1e-3
    assert np.abs(q_oi - expected_oi).max() <= 1
    error_oi = np.abs(weight_oi.astype(np.float64) - q_oi * scale_o[:, None].astype(np.float64))
    assert (error_oi <= 0.50001 * scale_o[:, None]).all()
    assert np.abs(q_oi[np.arange(300) != 7]).max(axis=1).min() == 127  # the whole range is used


def test_quantize_rows_of_the_smallest_numbers_overflow_nothing():
    weight_oi = np.full((2, 3), np.finfo(np.float32).smallest_subnormal)
    q_oi, scale_o = quantization.quantize_rows(weight_oi)
    assert np.isfinite(scale_o).all() and (scale_o > 0).all()
    assert np.abs(q_oi * scale_o[:, None]).max() < 1e-37


def test_linear_int8_is_the_product_with_the_dequantised_kernel():
    linear = Linear(6, 5, use_bias=True, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    linear.kernel[...] = linear.kernel[...] * np.array([1, 10, 100, 0.1, 0.01])
    holder = nnx.Dict(q_proj=linear)
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    before = np.asarray(linear(x))
    quantized(holder)
    kernel_io = np.asarray(linear.kernel[...], np.float64) * np.asarray(linear.kernel_scale[...])
    np.testing.assert_allclose(linear(x), x @ kernel_io, rtol=1e-5)
    assert 0 < distance(linear(x), before) < 0.01


def kl_of(logits_btv: jax.Array, others_btv: jax.Array) -> np.ndarray:
    """Nats from the first distribution to the second, [B,T]."""
    p_btv, q_btv = jax.nn.log_softmax(logits_btv), jax.nn.log_softmax(others_btv)
    return np.asarray((jnp.exp(p_btv) * (p_btv - q_btv)).sum(axis=-1))


def test_int8_outputs_are_near_those_of_float32():
    """Measured 2026-11-21: hidden states 2.8 % away, KL 0.0028 nats on average, 0.009 at most.

    Four random layers; their most likely token has a probability of 0.52 on average. Bounds are
    half as much again.
    """
    (x_btd, logits_btv), (int8_btd, int8_btv) = (outputs(model) for model in pair())
    assert 0.005 < distance(int8_btd, x_btd) < 0.042
    kl_bt = kl_of(logits_btv, int8_btv)
    assert kl_bt.mean() < 0.0042 and kl_bt.max() < 0.015
    assert (logits_btv.argmax(-1) == int8_btv.argmax(-1)).mean() > 0.95


def test_int8_in_bfloat16_is_the_float32_computation_rounded():
    """Products of int8 values, which bfloat16 holds exactly: rounding is all there is between."""
    graphdef, state = nnx.split(pair()[1])
    narrow = nnx.split(quantized(narrow_model()))[0]
    rounded = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == jnp.int8 else leaf.astype(jnp.bfloat16), state
    )
    widened = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == jnp.int8 else leaf.astype(jnp.float32), rounded
    )
    expected_btd, _ = outputs(nnx.merge(graphdef, widened))
    got_btd, _ = outputs(nnx.merge(narrow, rounded))
    assert got_btd.dtype == jnp.bfloat16
    assert distance(got_btd.astype(jnp.float32), expected_btd) < 0.02


def narrow_model() -> Qwen2VL:
    return Qwen2VL(CONFIG, lora=LORA, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)


def test_int8_adapters_off_equals_fresh_adapters():
    _, model = pair()
    x_btd = jax.jit(functools.partial(Qwen2VL.hidden, adapters=False))(model, TEXT, None)
    y_btd = jax.jit(Qwen2VL.hidden)(model, TEXT, None)
    # Not bit for bit, as with float32 weights: the two programs fuse the scaling differently.
    np.testing.assert_allclose(x_btd, y_btd, atol=2e-5)


def test_int8_every_projection_and_nothing_else_is_quantised():
    dtypes = {
        "/".join(sharding.leaf_names(path)): leaf.dtype.name
        for path, leaf in jax.tree.leaves_with_path(nnx.state(pair()[1]))
    }
    int8 = {name for name, dtype in dtypes.items() if dtype == "int8"}
    text = {f"text/blocks/{name}/kernel" for name in WEIGHTS.projections_of(("all",))}
    vision = {f"visual/blocks/{name}/kernel" for name in ("qkv", "proj", "fc1", "fc2")}
    assert int8 == text | vision | {f"visual/merger_{name}/kernel" for name in ("fc1", "fc2")}
    assert {name for name in dtypes if name.endswith("kernel_scale")} == {
        f"{name}_scale" for name in int8
    }
    assert set(dtypes.values()) == {"int8", "float32"}


@pytest.mark.parametrize(("dtype", "share"), [(jnp.bfloat16, 1 / 2), (jnp.float32, 1 / 4)])
def test_int8_halves_the_projections_of_qwen2_vl_2b(dtype, share):
    def abstract(quantize: bool):
        model = nnx.eval_shape(lambda: Qwen2VL(qwen2_vl_2b(), rngs=nnx.Rngs(0), param_dtype=dtype))
        state = nnx.state(quantized(model) if quantize else model)
        return {
            "/".join(sharding.leaf_names(path)): leaf.size * leaf.dtype.itemsize
            for path, leaf in jax.tree.leaves_with_path(state)
        }

    wide, narrow = abstract(False), abstract(True)
    kernels = [name.removesuffix("_scale") for name in narrow if name.endswith("kernel_scale")]
    wide_bytes = sum(wide[name] for name in kernels)
    narrow_bytes = sum(narrow[name] + narrow[f"{name}_scale"] for name in kernels)
    # Scales are float32, one for 1280 to 8960 weights.
    assert narrow_bytes / wide_bytes == pytest.approx(share, rel=0.004)
    # The embedding stays: 0.47 of 4.42 GB in bfloat16.
    assert wide_bytes / sum(wide.values()) > 0.88


def qwen2_vl_2b() -> Qwen2VLConfig:
    return Qwen2VLConfig(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        vision=VisionConfig(hidden_size=1536),
    )


def test_int8_the_wide_kernels_of_one_layer_are_all_that_is_ever_widened():
    """The compiled program's temporaries: less than one layer more than with float32 weights."""
    cfg = dataclasses.replace(CONFIG, num_hidden_layers=16, intermediate_size=2048)

    def temporary_bytes(quantize: bool) -> tuple[int, int]:
        model = nnx.eval_shape(lambda: Qwen2VL(cfg, rngs=nnx.Rngs(0)))
        model = quantized(model) if quantize else model
        arrays = [jnp.asarray(x) for x in (IDS_BT, POSITIONS_3BT, np.ones_like(IDS_BT))]

        def run(model, ids_bt, positions_3bt, segments_bt):
            return model.hidden(TokenRows(ids_bt, positions_3bt, segments_bt), None)

        compiled = jax.jit(run).lower(model, *arrays).compile()
        kernels = model.text.blocks.up_proj.kernel
        return compiled.memory_analysis().temp_size_in_bytes, 4 * kernels.size // 16

    (plain_bytes, one_bytes), (int8_bytes, _) = temporary_bytes(False), temporary_bytes(True)
    assert int8_bytes - plain_bytes < 4 * one_bytes  # gate, up, down and what attention has


# ----------------------------------------------------------------------------------- training


def train(quantize: bool):
    """(metrics of two steps, frozen before and after, gradients' stand-in: Adam's first moment)."""
    graphdef, lora, frozen = step_world.make_model(targets=("all",))
    if quantize:
        model = quantized(nnx.merge(graphdef, lora, frozen))
        graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    before = jax.device_get(frozen)
    optimizer = learner_state.make_optimizer(
        learner_state.OptimizerConfig(lr=1e-2, clip_norm=1e9), 10
    )
    run = learner_step.make_steps(graphdef, optimizer, learner_step.StepConfig())
    state = learner_state.init_state(lora, optimizer)
    arrays = learner_step.to_device(step_world.make_batch(), None)
    moments, metrics = [], []
    for _ in range(2):
        state, scalars = run.policy_update(state, frozen, [arrays])
        metrics.append(learner_step.to_floats(scalars))
        moments.append(jax.device_get(state.opt_state[1][0].mu))
    return metrics, before, jax.device_get(frozen), moments[0]


def test_update_with_int8_frozen_weights_trains_the_adapters_alone():
    metrics, before, after, moment = train(quantize=True)
    assert all(np.isfinite(list(scalars.values())).all() for scalars in metrics)
    assert metrics[0]["learner/update_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert quantization.is_quantized(before)
    # After one step Adam's first moment is the gradient times 1 - b1.
    _, plain_before, _, plain_moment = train(quantize=False)
    assert not quantization.is_quantized(plain_before)
    cosines = {}
    for (path, leaf), plain in zip(
        jax.tree.leaves_with_path(moment), jax.tree.leaves(plain_moment), strict=True
    ):
        norms = np.linalg.norm(leaf) * np.linalg.norm(plain)
        cosines[jax.tree_util.keystr(path)] = float((leaf * plain).sum() / norms)
    whole = [
        np.concatenate([x.ravel() for x in jax.tree.leaves(m)]) for m in (moment, plain_moment)
    ]
    cosine = whole[0] @ whole[1] / np.linalg.norm(whole[0]) / np.linalg.norm(whole[1])
    # Measured 2026-11-21: 0.995, and 0.986 for the leaf that is furthest away, q's B.
    assert 0.99 < cosine < 0.9999, (cosine, cosines)
    assert min(cosines.values()) > 0.97, (cosine, cosines)


def test_decode_with_int8_equals_the_whole_rows():
    """What the engine runs on its cache, one token after the other, is what the learner scores."""
    model = pair()[1]
    expected_btd = jax.jit(Qwen2VL.hidden)(model, TEXT, None)
    cache = Qwen2VL.init_cache(CONFIG, 4, TOKENS, jnp.float32)
    extend = jax.jit(Qwen2VL.extend)
    for start, stop in ((0, 20), (20, 21), (21, 22)):
        got_btd, cache = extend(
            model,
            *(IDS_BT[:, start:stop], None, None, POSITIONS_3BT[..., start:stop]),
            *(cache, np.full(4, start, np.int32)),
        )
        np.testing.assert_allclose(got_btd, expected_btd[:, start:stop], atol=1e-4)


# -------------------------------------------------------------------------------- files, configs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("saved")
    save_pretrained(small_model.noisy(small_model.UNTIED, lora=None), model_dir)
    return model_dir


def load(model_dir, **options) -> Qwen2VL:
    return load_pretrained(model_dir, quantize="int8", **options)


def test_load_int8_equals_the_model_quantised_in_memory(saved):
    expected = quantized(small_model.noisy(small_model.UNTIED, lora=None))
    loaded = load(saved, remat="none")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(expected))
    assert nnx.graphdef(loaded) == nnx.graphdef(expected)
    narrow = nnx.state(load(saved, param_dtype=jnp.bfloat16))["text"]["blocks"]["q_proj"]
    assert {name: leaf.dtype.name for name, leaf in narrow.items()} == {
        "kernel": "int8",
        "kernel_scale": "float32",
        "bias": "bfloat16",
    }


def test_save_of_an_int8_model_says_what_to_do_instead(saved, tmp_path):
    with pytest.raises(ModelError, match=r"int8 projections.*tools\.export") as error:
        save_pretrained(load(saved), tmp_path / "merged")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "merged").exists()


def test_save_adapter_of_an_int8_model_is_that_of_the_plain_one(saved, tmp_path):
    lora = LoraConfig(rank=2, targets=("all", "vision"))
    plain = load_pretrained(saved, lora=lora)
    for name, model in (("plain", plain), ("int8", load(saved, lora=lora))):
        save_adapter(model, tmp_path / name)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "int8" / name).read_bytes()


def test_run_config_refuses_a_cold_start_of_int8_weights():
    cfg = RunConfig(
        model=ModelConfig("m", quantize="int8"),
        tasks=(TaskConfig("desktop/click_button"),),
        learner=LearnerConfig(steps=1),
    )
    with pytest.raises(ConfigError, match=r"model\.quantize='int8': a cold start cannot merge"):
        dataclasses.replace(cfg, cold_start=dataclasses.replace(cfg.cold_start, steps=1))
