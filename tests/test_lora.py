import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import small_model
from uirl_jax.errors import ConfigError
from uirl_jax.models import qwen2_vl
from uirl_jax.models.lora import Linear, LoraConfig, LoRAParam
from uirl_jax.models.qwen2_vl import Qwen2VL

IDS_BT = np.random.default_rng(0).integers(0, 50, (2, 6)).astype(np.int32)
POSITIONS_3BT = np.broadcast_to(np.arange(6, dtype=np.int32), (3, 2, 6))


hidden = jax.jit(qwen2_vl.hidden, static_argnames="adapters")


def forward(model: Qwen2VL, *, adapters: bool = True) -> np.ndarray:
    x_btd = hidden(
        model, IDS_BT, None, None, POSITIONS_3BT, np.ones((2, 6), np.int32), adapters=adapters
    )
    return np.asarray(x_btd)


def with_adapters(value: float) -> Qwen2VL:
    graphdef, adapters, frozen = nnx.split(small_model.fresh(), LoRAParam, ...)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.full_like(x, value), adapters), frozen)


def base() -> Qwen2VL:
    """The frozen leaves of the same model, in a model that has no adapters."""
    _, _, frozen = nnx.split(small_model.fresh(), LoRAParam, ...)
    graphdef, _ = nnx.split(small_model.fresh(lora=None))
    return nnx.merge(graphdef, frozen)


def test_hidden_fresh_adapters_equal_the_base_bit_for_bit():
    fresh = small_model.fresh()
    np.testing.assert_array_equal(forward(fresh), forward(base()))


def test_hidden_adapters_off_equals_the_base_and_reads_no_adapter():
    # NaN in every adapter would show in the result if one product with them were left.
    np.testing.assert_array_equal(forward(with_adapters(np.nan), adapters=False), forward(base()))
    assert not np.allclose(forward(with_adapters(0.1)), forward(base()), atol=1e-3)


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        (("attention", "mlp"), {*"qkvo", "gate", "up", "down"}),
        (("attention",), {*"qkvo"}),
        (("mlp",), {"gate", "up", "down"}),
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
        x_btd = hidden(model, IDS_BT, None, None, POSITIONS_3BT, np.ones((2, 6), np.int32))
        return qwen2_vl.token_logprobs(model, x_btd, IDS_BT).sum()

    grads = jax.jit(jax.grad(loss))(adapters)["text"]["blocks"]
    for name, leaf in grads.items():
        assert np.abs(leaf["lora_b"][...]).max() > 1e-6, name
        assert not np.any(leaf["lora_a"][...]), name


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"targets": ("vision",)}, {"targets": ()}])
def test_lora_config_impossible_values_are_a_config_error(wrong):
    with pytest.raises(ConfigError, match=f"lora.{next(iter(wrong))}"):
        LoraConfig(**wrong)
