"""What only some families ask of the shared decoder: DecoderConfig.qk_norm, visual levels, angles.

Whole models are compared with transformers in the tests of their families.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models import decoder, layers
from uirl_jax.models.blocks import Remat
from uirl_jax.models.decoder import Decoder, DecoderConfig, Rotary, VisualLevels
from uirl_jax.models.lora import LoraConfig, LoRAParam

CONFIG = DecoderConfig(
    vocab_size=20,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    qk_norm=True,
)
TOKENS = 9
LEVELS = 2
INDEX_BT = np.array([[-1, 3, 0, -1, 1, 1, -1, -1, -1]], np.int32)
TABLE_ME = np.random.default_rng(0).normal(size=(4, 12 * (1 + LEVELS))).astype(np.float32)


@functools.cache
def make_decoder(remat: Remat = "none") -> Decoder:
    made = Decoder(
        CONFIG,
        lora=LoraConfig(rank=2),
        table=WEIGHTS,
        rngs=nnx.Rngs(0),
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        remat=remat,
    )
    graphdef, state = nnx.split(made)
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(x.dtype), state)
    return nnx.merge(graphdef, noisy)


def rotary(tokens: int = TOKENS) -> Rotary:
    positions_3bt = np.broadcast_to(np.arange(tokens), (3, 1, tokens))
    return Rotary(*layers.interleaved_mrope_angles(positions_3bt, 8, 100.0, (2, 1, 1)))


def inputs_btd() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(1, TOKENS, 12)).astype(np.float32)


extend = jax.jit(Decoder.extend, static_argnames=("slot_b", "span"))


@jax.jit
def rows(model: Decoder, x_btd: jax.Array, visual: VisualLevels | None) -> tuple:
    segments_bt = jnp.ones((1, TOKENS), jnp.int32)
    return model.rows(x_btd, rotary(), segments_bt, None, visual, collect=True)


def block(model: Decoder, layer: int) -> decoder.DecoderBlock:
    """One block on its own: a decoder of this block alone gives its output."""
    graphdef, state = nnx.split(model.blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[layer : layer + 1], state))


def test_rows_visual_levels_are_added_after_the_first_blocks_at_visual_tokens_only():
    model, x_btd = make_decoder(), inputs_btd()
    _, after_lbtd = rows(model, x_btd, VisualLevels(TABLE_ME, INDEX_BT))
    single = nnx.merge(*nnx.split(model))
    single.depth = 1
    for layer in range(CONFIG.num_hidden_layers):
        single.blocks = block(model, layer)
        x_btd = np.array(rows(single, x_btd, None)[0])
        if layer < LEVELS:
            for token, row in enumerate(INDEX_BT[0]):
                if row >= 0:
                    x_btd[0, token] += TABLE_ME[row, 12 * (1 + layer) : 12 * (2 + layer)]
        np.testing.assert_allclose(after_lbtd[layer], x_btd, atol=1e-5)


def test_embed_takes_the_first_columns_of_wide_visual_rows():
    model = make_decoder()
    ids_bt = np.arange(TOKENS, dtype=np.int32)[None]
    x_btd = model.embed(ids_bt, TABLE_ME, INDEX_BT)
    for token, row in enumerate(INDEX_BT[0]):
        expected_d = TABLE_ME[row, :12] if row >= 0 else model.embedding[...][token]
        np.testing.assert_array_equal(x_btd[0, token], expected_d)


@pytest.mark.parametrize("by_layer", [False, True])
def test_extend_cut_between_visual_tokens_equals_rows_with_visual_levels(by_layer):
    model, x_btd = make_decoder(), inputs_btd()
    expected_btd = model.final_norm(rows(model, x_btd, VisualLevels(TABLE_ME, INDEX_BT))[0])
    cache = decoder.init_cache(CONFIG, 1, TOKENS, jnp.float32)
    graphdef, state = nnx.split(model.blocks)
    layer_blocks = [
        nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state))
        for i in range(CONFIG.num_hidden_layers)
    ]
    for part in (slice(0, 5), slice(5, TOKENS)):
        cos_bth, sin_bth = rotary()
        y_btd, cache = model.extend(
            x_btd[:, part],
            Rotary(cos_bth[:, part], sin_bth[:, part]),
            cache,
            np.array([part.start], np.int32),
            slot_b=None,
            span=None,
            blocks=layer_blocks if by_layer else None,
            visual=VisualLevels(TABLE_ME, INDEX_BT[:, part]),
        )
        np.testing.assert_allclose(y_btd, expected_btd[:, part], atol=1e-4)


def test_backward_pass_keeps_nothing_of_the_levels_for_each_layer():
    """Only the blocks' inputs, [L,B,T,D]: neither vectors of a level nor a copy of the table."""
    graphdef, adapters, frozen = nnx.split(make_decoder("full"), LoRAParam, ...)

    def loss(adapters, table_me):
        model = nnx.merge(graphdef, adapters, frozen)
        return rows(model, inputs_btd(), VisualLevels(table_me, INDEX_BT))[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(adapters, TABLE_ME))
    stacked = set(re.findall(r"f32\[4,[\d,]+\]", text))
    assert "f32[4,1,9,12]" in stacked
    assert not stacked & {"f32[4,4,36]", "f32[4,2,9,12]", "f32[4,2,1,9,12]"}


def test_gradient_of_the_table_is_that_of_its_looked_up_vectors():
    """Against finite differences, in the direction of the gradient."""
    model, x_btd = make_decoder(), inputs_btd()

    @jax.jit
    def loss(table_me):
        return jnp.square(rows(model, x_btd, VisualLevels(table_me, INDEX_BT))[0]).sum()

    gradient_me = np.asarray(jax.grad(loss)(TABLE_ME))
    assert not gradient_me[2].any()  # row 2 stands nowhere
    assert not gradient_me[:, :12].any()  # `embed` reads these
    assert all(np.abs(gradient_me[row, 12:]).min() > 0 for row in (0, 1, 3))
    step_me = 1e-3 * gradient_me / np.linalg.norm(gradient_me)
    rise = (loss(TABLE_ME + step_me) - loss(TABLE_ME - step_me)) / 2e-3
    np.testing.assert_allclose(rise, np.linalg.norm(gradient_me), rtol=2e-3)


def test_qk_norm_scales_of_queries_and_keys_cancel():
    """Normed heads do not see the scale of their projections; without norms they do."""
    x_btd = inputs_btd()
    for qk_norm, same in ((True, True), (False, False)):
        cfg = dataclasses.replace(CONFIG, qk_norm=qk_norm, num_hidden_layers=1)
        model = Decoder(
            cfg,
            lora=None,
            table=WEIGHTS,
            rngs=nnx.Rngs(0),
            param_dtype=jnp.float32,
            compute_dtype=jnp.float32,
            remat="none",
        )
        before_btd = rows(model, x_btd, None)[0]
        for projection in (model.blocks.q_proj, model.blocks.k_proj):
            projection.kernel[...] = 3.0 * projection.kernel[...]
        # The norm's epsilon: 1e-6 of a mean square near 1.
        assert np.allclose(rows(model, x_btd, None)[0], before_btd, atol=1e-4) == same


@pytest.mark.parametrize(
    ("head_dim", "sections"),
    [(128, (24, 20, 20)), (32, (6, 5, 5)), (20, (2, 6, 2)), (8, (4, 0, 0))],
)
def test_interleaved_angles_equal_a_loop(head_dim, sections):
    positions_3bt = np.random.default_rng(0).integers(0, 2000, (3, 2, 5))
    cos_bth, sin_bth = layers.interleaved_mrope_angles(positions_3bt, head_dim, 5e6, sections)
    for pair in range(head_dim // 2):
        axis = pair % 3 if pair < 3 * sections[pair % 3] else 0
        angle_bt = positions_3bt[axis] * 5e6 ** (-2 * pair / head_dim)
        # Float32: 2,000 radians are known to 1e-4.
        np.testing.assert_allclose(cos_bth[..., pair], np.cos(angle_bt), atol=3e-4)
        np.testing.assert_allclose(sin_bth[..., pair], np.sin(angle_bt), atol=3e-4)
