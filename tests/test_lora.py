import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import small_model
from uirl_jax.errors import ConfigError
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models import scoring
from uirl_jax.models.lora import Linear, LoraConfig, LoRAParam

IDS_BT = np.random.default_rng(0).integers(0, 50, (2, 6)).astype(np.int32)
ROWS = TokenRows(
    IDS_BT,
    positions_abt=np.broadcast_to(np.arange(6, dtype=np.int32), (3, 2, 6)),
    segment_ids_bt=np.ones((2, 6), np.int32),
)


hidden = jax.jit(Qwen2VL.hidden, static_argnames="adapters")


def forward(
    model: Qwen2VL, *, adapters: bool = True, dropout_key: jax.Array | None = None
) -> np.ndarray:
    return np.asarray(hidden(model, ROWS, None, adapters=adapters, dropout_key=dropout_key))


encode_images = jax.jit(Qwen2VL.encode_images, static_argnames="adapters")
VISION = {
    "pixels_ipf": np.random.default_rng(1).normal(size=(2, 8, 96)).astype(np.float32),
    "patch_positions_ip2": np.zeros((2, 8, 2), np.int32),
    "patch_segments_ip": np.ones((2, 8), np.int32),
}


def see(
    model: Qwen2VL, *, adapters: bool = True, dropout_key: jax.Array | None = None
) -> np.ndarray:
    return np.asarray(encode_images(model, VISION, adapters=adapters, dropout_key=dropout_key))


def with_adapters(value: float, lora: LoraConfig = small_model.LORA) -> Qwen2VL:
    """No constants: a LayerNorm would take them out again."""
    graphdef, adapters, frozen = nnx.split(small_model.fresh(lora=lora), LoRAParam, ...)

    def wave(x: jax.Array) -> jax.Array:
        return value * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    return nnx.merge(graphdef, jax.tree.map(wave, adapters), frozen)


def base(lora: LoraConfig = small_model.LORA) -> Qwen2VL:
    """The frozen leaves of the same model, in a model that has no adapters."""
    _, _, frozen = nnx.split(small_model.fresh(lora=lora), LoRAParam, ...)
    graphdef, _ = nnx.split(small_model.fresh(lora=None))
    return nnx.merge(graphdef, frozen)


def test_hidden_fresh_adapters_equal_the_base_bit_for_bit():
    fresh = small_model.fresh()
    np.testing.assert_array_equal(forward(fresh), forward(base()))


def test_hidden_adapters_off_equals_the_base_and_reads_no_adapter():
    # NaN in every adapter would show in the result if one product with them were left.
    np.testing.assert_array_equal(forward(with_adapters(np.nan), adapters=False), forward(base()))
    assert not np.allclose(forward(with_adapters(0.1)), forward(base()), atol=1e-3)


@pytest.mark.parametrize("targets", [("vision",), ("merger",)])
def test_encode_images_adapters_off_equals_the_base_and_reads_no_adapter(targets):
    lora = LoraConfig(rank=2, targets=targets)
    base_md = see(base(lora))
    np.testing.assert_array_equal(see(with_adapters(0.0, lora)), base_md)
    np.testing.assert_array_equal(see(with_adapters(np.nan, lora), adapters=False), base_md)
    assert not np.allclose(see(with_adapters(0.3, lora)), base_md, atol=1e-3)
    # The text tower has none of them.
    np.testing.assert_array_equal(forward(with_adapters(np.nan, lora)), forward(base(lora)))


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        (("attention", "mlp"), {*"qkvo", "gate", "up", "down"}),
        (("attention",), {*"qkvo"}),
        (("mlp",), {"gate", "up", "down"}),
        (("all",), {*"qkvo", "gate", "up", "down"}),
        (("q_proj", "v_proj"), {*"qv"}),
    ],
)
def test_split_counts_the_leaves_of_the_targets(targets, projections):
    model = small_model.fresh(lora=LoraConfig(rank=2, targets=targets))
    _, adapters, frozen = nnx.split(model, LoRAParam, ...)
    blocks = adapters["text"]["blocks"]
    assert set(adapters) == {"text"}
    assert set(blocks) == {f"{name}_proj" for name in projections}
    assert len(jax.tree.leaves(adapters)) == 2 * len(projections)
    assert all(
        leaf.shape[0] == 3 and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(adapters)
    )
    # 12 leaves of text blocks, embedding and norm; 12 of vision blocks and 7 around them.
    assert len(jax.tree.leaves(frozen)) == 12 + 2 + 12 + 7
    assert not any(
        isinstance(leaf, LoRAParam)
        for leaf in jax.tree.leaves(frozen, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def test_split_counts_the_leaves_of_the_vision_tower():
    model = nnx.eval_shape(
        lambda: small_model.fresh(lora=LoraConfig(rank=2, targets=("vision", "merger")))
    )
    _, adapters, _ = nnx.split(model, LoRAParam, ...)
    assert set(adapters) == {"visual"}
    assert set(adapters["visual"]) == {"blocks", "merger_fc1", "merger_fc2"}
    assert set(adapters["visual"]["blocks"]) == {"qkv", "proj", "fc1", "fc2"}
    assert adapters["visual"]["blocks"]["qkv"]["lora_b"].shape == (2, 2, 48)
    assert adapters["visual"]["merger_fc2"]["lora_a"].shape == (64, 2)


def test_targets_of_gives_the_projections_back_with_groups_by_name():
    targets_of, projections_of = WEIGHTS.targets_of, WEIGHTS.projections_of
    assert targets_of(projections_of(("all", "qkv"))) == ("attention", "mlp", "qkv")
    assert targets_of(WEIGHTS.projections) == ("attention", "mlp", "vision", "merger")
    assert targets_of({"v_proj", "q_proj"}) == ("q_proj", "v_proj")
    for name in WEIGHTS.projections:
        assert projections_of(targets_of({name})) == {name}


def test_split_without_lora_leaves_no_adapters():
    _, adapters, _ = nnx.split(small_model.fresh(lora=None), LoRAParam, ...)
    assert jax.tree.leaves(adapters) == []


def test_stacked_layers_have_weights_of_their_own():
    model = small_model.fresh()
    for leaf in (model.text.blocks.q_proj.kernel[...], model.text.blocks.q_proj.lora_a[...]):
        assert len({float(layer[0, 0]) for layer in leaf}) == 3
    assert not np.array_equal(
        model.text.blocks.q_proj.kernel[...], model.text.blocks.o_proj.kernel[...]
    )


def test_linear_adapters_add_scale_times_the_low_rank_product():
    rng = np.random.default_rng(0)
    linear = Linear(
        5,
        4,
        use_bias=True,
        lora=LoraConfig(rank=3, alpha=6.0),
        rngs=nnx.Rngs(0),
        param_dtype=jnp.float32,
    )
    linear.bias[...] = rng.normal(size=4)
    linear.lora_b[...] = rng.normal(size=(3, 4))
    x = rng.normal(size=(2, 5)).astype(np.float32)
    kernel, bias, a, b = (
        np.asarray(leaf[...]) for leaf in (linear.kernel, linear.bias, linear.lora_a, linear.lora_b)
    )
    np.testing.assert_allclose(linear(x), x @ kernel + bias + 2.0 * (x @ a @ b), atol=1e-5)
    np.testing.assert_allclose(linear(x, adapters=False), x @ kernel + bias, atol=1e-6)


def test_gradient_of_fresh_adapters_moves_b_and_not_yet_a():
    graphdef, adapters, frozen = nnx.split(small_model.fresh(), LoRAParam, ...)

    def loss(adapters):
        model = nnx.merge(graphdef, adapters, frozen)
        x_btd = hidden(model, ROWS, None)
        return scoring.token_logprobs(model, x_btd, IDS_BT).sum()

    grads = jax.jit(jax.grad(loss))(adapters)["text"]["blocks"]
    for name, leaf in grads.items():
        assert np.abs(leaf["lora_b"][...]).max() > 1e-6, name
        assert not np.any(leaf["lora_a"][...]), name


def test_rslora_scales_by_the_root_of_the_rank():
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


def revealing_linear(rate: float) -> Linear:
    """y = dropout(x): the kernel is 0, A and B are 1."""
    lora = LoraConfig(rank=64, alpha=64.0, dropout=rate)
    linear = Linear(64, 64, lora=lora, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    linear.kernel[...] = jnp.zeros((64, 64))
    linear.lora_a[...] = linear.lora_b[...] = jnp.eye(64)
    return linear


def test_linear_dropout_zeroes_inputs_and_scales_up_the_rest():
    x = np.random.default_rng(0).uniform(1, 2, (50, 64)).astype(np.float32)
    y = np.asarray(revealing_linear(0.25)(x, dropout_key=jax.random.key(0)))
    kept = y != 0
    np.testing.assert_allclose(y[kept], (x / 0.75)[kept], rtol=1e-6)
    # 3200 draws: the standard deviation of their share is 0.0077.
    assert kept.mean() == pytest.approx(0.75, abs=0.03)
    assert len({row.tobytes() for row in kept}) == 50


def test_linear_dropout_mean_over_keys_is_the_output_without():
    rng = np.random.default_rng(0)
    lora = LoraConfig(rank=3, alpha=6.0, dropout=0.4)
    linear = Linear(5, 4, use_bias=True, lora=lora, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    linear.bias[...] = rng.normal(size=4)
    linear.lora_b[...] = rng.normal(size=(3, 4))
    x = rng.normal(size=(2, 5)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 10_000)
    samples = np.asarray(jax.vmap(lambda key: linear(x, dropout_key=key))(keys))
    standard_error = samples.std(axis=0) / 100
    assert np.all(np.abs(samples.mean(axis=0) - linear(x)) < 5 * standard_error)
    # Small enough for the test to see the base dropped, or the rest not scaled up.
    assert np.all(standard_error < 0.1 * np.abs(linear(x) - linear(x, adapters=False)))


def test_dropout_key_none_and_rate_zero_are_no_dropout_bit_for_bit():
    lora = LoraConfig(rank=2, alpha=8.0, targets=("all", "vision", "merger"))
    dropping = with_adapters(0.1, dataclasses.replace(lora, dropout=0.5))
    plain = with_adapters(0.1, lora)
    key, other = jax.random.key(0), jax.random.key(1)
    for run in (forward, see):
        expected = run(plain)
        np.testing.assert_array_equal(run(dropping), expected)
        np.testing.assert_array_equal(run(plain, dropout_key=key), expected)
        dropped = run(dropping, dropout_key=key)
        np.testing.assert_array_equal(run(dropping, dropout_key=key), dropped)
        for else_ in (expected, run(dropping, dropout_key=other)):
            assert np.abs(dropped - else_).max() > 1e-3
        np.testing.assert_array_equal(
            run(dropping, adapters=False, dropout_key=key), run(plain, adapters=False)
        )


def test_dropout_draws_for_every_layer_and_projection_and_once_more_when_recomputed():
    """With one token, a row of A's gradient is 0 where that layer's input was zeroed."""
    lora = LoraConfig(rank=2, alpha=8.0, dropout=0.5)

    def zeroed(remat):
        graphdef, adapters, frozen = nnx.split(
            small_model.noisy(lora=lora, remat=remat), LoRAParam, ...
        )

        def loss(adapters):
            model = nnx.merge(graphdef, adapters, frozen)
            one_token = TokenRows(
                ROWS.token_ids_bt[:1, :1],
                ROWS.positions_abt[:, :1, :1],
                ROWS.segment_ids_bt[:1, :1],
            )
            x_btd = model.hidden(one_token, None, dropout_key=jax.random.key(0))
            return (x_btd * np.arange(32)).sum()

        grads = jax.jit(jax.grad(loss))(adapters)["text"]["blocks"]
        return {name: np.asarray(leaf["lora_a"][...]) for name, leaf in grads.items()}

    grads = zeroed("none")
    for name, recomputed in zeroed("full").items():
        np.testing.assert_allclose(grads[name], recomputed, rtol=1e-3, atol=1e-5)
    # q and k get no gradient: with one token there is nothing to choose between.
    kept = [grads[f"{name}_proj"] != 0 for name in ("v", "o", "gate", "up", "down")]
    kept = [mask_ld for mask_ldr in kept for mask_ld in mask_ldr.any(axis=-1)]
    assert len({mask_d.tobytes() for mask_d in kept}) == 5 * 3
    # 456 draws: the standard deviation of their share is 0.023.
    assert np.concatenate(kept).mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 0}, {"targets": ()}, {"dropout": 1.0}, {"dropout": -0.1}],
)
def test_lora_config_impossible_values_are_a_config_error(wrong):
    with pytest.raises(ConfigError, match=f"lora.{next(iter(wrong))}") as error:
        LoraConfig(**wrong)
    assert "\n" not in str(error.value)


def test_projections_of_an_unknown_target_says_which_and_what_is_known():
    lora = LoraConfig(targets=("attention", "head"))
    message = r"'head' is unknown, expected some of \('attention', 'm"
    with pytest.raises(ConfigError, match=rf"^lora\.targets=.*{message}") as error:
        WEIGHTS.projections_of(lora.targets)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=message):
        small_model.fresh(lora=lora)


def test_the_kernels_gradient_on_the_cpu_is_a_product_of_two_matrices():
    """Of rows and tokens apart XLA's CPU compiler would copy a transpose of all activations."""
    linear = Linear(5, 7, lora=small_model.LORA, rngs=nnx.Rngs(0), param_dtype=jnp.dtype("float32"))
    graphdef, state = nnx.split(linear)
    x_btd = jnp.ones((2, 3, 5))
    derived = jax.jit(jax.grad(lambda state: nnx.merge(graphdef, state)(x_btd).sum()))
    program = derived.lower(state).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    # Gradients of the kernel and of the adapter's two matrices, what these are made of: x A, and
    # its gradient.
    assert len(products) == 5
    assert all("x3x" not in line for line in products), products


def test_linear_of_no_rows_has_no_rows():
    linear = Linear(5, 7, lora=small_model.LORA, rngs=nnx.Rngs(0), param_dtype=jnp.dtype("float32"))
    assert linear(jnp.ones((0, 3, 5))).shape == (0, 3, 7)
