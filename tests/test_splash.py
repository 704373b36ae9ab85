"""Rows with shared prompts by the TPU's kernel, interpreted, against plain attention.

Without shared prompts, and compiled by libtpu: test_attention.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from tests import test_attention
from uirl_jax.errors import ModelError
from uirl_jax.models import attention, sharding, splash


def shared_prompts(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[3,T] twice: segments, and their prefixes, one of [T] tokens for each kind of row.

    A prompt with two sequences, a sequence alone, padding; two prompts of two; nothing shared.
    """
    segment_ids_bt = np.zeros((3, tokens), np.int32)
    prefix_segments_bt = np.zeros((3, tokens), np.int32)
    for b, (prefixes, used) in enumerate((((1, 1, 1, 4), 7), ((1, 1, 1, 4, 4, 4), 8), ((1,), 8))):
        lengths = np.array_split(np.arange(tokens * used // 8), len(prefixes))
        for segment, (columns, prefix) in enumerate(zip(lengths, prefixes, strict=True), start=1):
            segment_ids_bt[b, columns], prefix_segments_bt[b, columns] = segment, prefix
    return segment_ids_bt, prefix_segments_bt


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads"),
    [(jnp.float32, 16, 4), (jnp.float32, 64, 2), (jnp.bfloat16, 128, 1)],
)
def test_shared_prompts_interpreted_equals_plain(dtype, head_dim, kv_heads, monkeypatch):
    monkeypatch.setattr(splash, "_BLOCK", 128)  # three tiles, the last one padded
    qkv = test_attention.random_qkv(3, 300, 4, kv_heads, head_dim, dtype)
    run = functools.partial(
        test_attention.output_and_gradients, qkv, *shared_prompts(300), causal=True
    )
    test_attention.assert_close(
        run(implementation="splash"), run(implementation="xla"), test_attention.TOLERANCE[dtype]
    )


@st.composite
def layouts(draw, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of contiguous segments, each with an earlier one or itself as its prefix, as [1,T]."""
    segment_ids_bt = np.zeros((1, tokens), np.int32)
    prefix_segments_bt = np.zeros((1, tokens), np.int32)
    first, segment = 0, 1
    while first < tokens and draw(st.booleans() if segment > 1 else st.just(True)):
        end = draw(st.integers(first + 1, tokens))
        segment_ids_bt[:, first:end] = segment
        prefix_segments_bt[:, first:end] = draw(st.integers(1, segment))
        first, segment = end, segment + 1
    return segment_ids_bt, prefix_segments_bt


PROPERTY_TOKENS = 140  # two tiles of 128


@functools.cache
def compiled_for_properties(implementation):
    def run(q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt, weights_btnh):
        out_btnh = attention.attention(
            q_btnh,
            k_btkh,
            v_btkh,
            segment_ids_bt,
            causal=True,
            prefix_segments_bt=prefix_segments_bt,
            implementation=implementation,
        )
        return jnp.sum(out_btnh * weights_btnh), out_btnh

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(layout=layouts(PROPERTY_TOKENS))
def test_shared_prompts_equals_plain_for_every_layout(layout):
    qkv = test_attention.random_qkv(1, PROPERTY_TOKENS, 4, 2, 8)
    weights_btnh = np.random.default_rng(1).normal(size=qkv[0].shape).astype(np.float32)
    original, splash._BLOCK = splash._BLOCK, 128
    try:
        results = [
            compiled_for_properties(name)(*qkv, *layout, weights_btnh) for name in ("splash", "xla")
        ]
    finally:
        splash._BLOCK = original
    got, expected = ([out, *gradients] for (_, out), gradients in results)
    test_attention.assert_close(got, expected, test_attention.TOLERANCE[jnp.float32])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=layouts(64))
def test_no_tile_with_a_pair_to_attend_to_is_skipped(layout):
    block = 8
    mask_tt = np.asarray(attention.segment_mask(*layout, causal=True))[0]
    segments_bt, prefixes_bt = (jnp.asarray(ids_bt) for ids_bt in layout)
    shared_tt = mask_tt & (layout[0][0][:, None] != layout[0][0])
    halves = [x.reshape(8, block, 8, block).any((1, 3)) for x in (shared_tt, mask_tt & ~shared_tt)]
    starts_bt = splash._starts(segments_bt)
    needed_qk = np.asarray(splash._needed_tiles(segments_bt, prefixes_bt, starts_bt, block))[0]
    own_qk = needed_qk[:, 8:]
    assert not (halves[0] & ~needed_qk[:, :8]).any()
    np.testing.assert_array_equal(own_qk, halves[1])


def test_a_group_is_computed_in_the_tiles_of_its_prompt_and_of_each_sequence():
    """A prompt of 64 tokens, eight sequences of 64 after it, in tiles of 32."""
    segments_bt = jnp.repeat(jnp.arange(1, 10), 64)[None]
    needed_qk = splash._needed_tiles(
        segments_bt, jnp.ones_like(segments_bt), splash._starts(segments_bt), 32
    )[0]
    prompt, own = needed_qk[:, :18], needed_qk[:, 18:]
    assert prompt[2:, :2].all() and prompt.sum() == 16 * 2
    assert own.sum() == 9 * 3


def test_shared_prompts_are_splash_in_rows_where_it_wins_and_its_columns_have_names(monkeypatch):
    """Above, auto is plain XLA; asked for by name, an error."""
    monkeypatch.setattr(splash, "MAX_SHARED_TOKENS", 128)
    monkeypatch.setattr(attention, "_PLAIN_SHARED_TOKENS", 64)
    device = AbstractDevice(device_kind="tpu", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1, 1, 1), sharding.MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
    for tokens, kernel in ((64, False), (65, True), (128, True), (129, False)):
        q_btnh = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.bfloat16)
        ids_bt = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def run(q_btnh, ids_bt, implementation="auto"):
            return attention.attention(
                *[q_btnh] * 3,
                ids_bt,
                causal=True,
                prefix_segments_bt=ids_bt,
                implementation=implementation,
            )

        with jax.sharding.use_abstract_mesh(mesh):
            jaxpr = str(jax.jit(run).trace(q_btnh, ids_bt).jaxpr)
        assert ("pallas_call" in jaxpr) == kernel
    with pytest.raises(ModelError, match="rows of 129 tokens with shared prompts, expected at mo"):
        jax.eval_shape(functools.partial(run, implementation="splash"), q_btnh, ids_bt)
    qkv, ids_bt = test_attention.random_qkv(3, 8, 2, 2, 8), test_attention.packed_rows(8)
    with pytest.raises(ModelError, match="shared prompts need causal=True"):
        attention.attention(
            *qkv, ids_bt, causal=False, prefix_segments_bt=ids_bt, implementation="splash"
        )


def check_eight_devices() -> None:
    """The body of a test below, in a process of its own: rows with shared prompts on 2 x 2 x 2."""
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
    for rows, heads, kv_heads in (
        (4, 4, 2),  # everything is cut
        (4, 6, 3),  # both devices of the model axis need the second kv head
        (3, 3, 3),  # neither rows nor heads divide: every device computes all
    ):
        layout = [np.resize(ids_bt, (rows, 20)) for ids_bt in shared_prompts(20)]
        qkv = test_attention.random_qkv(rows, 20, heads, kv_heads, 8)
        expected = test_attention.output_and_gradients(
            qkv, *layout, causal=True, implementation="xla"
        )
        axes = [("batch", None, "wide", None)] * 3 + [("batch", None)] * 2
        placed = tuple(
            NamedSharding(mesh, sharding.partition_spec(a, x.shape, dict(mesh.shape)))
            for a, x in zip(axes, (*qkv, *layout), strict=True)
        )
        with jax.set_mesh(mesh):
            got = test_attention.output_and_gradients(
                qkv, *layout, causal=True, implementation="splash", placed=placed
            )
        test_attention.assert_close(got, expected, 1e-5)


def test_shared_prompts_on_eight_fake_devices_equal_one():
    test_attention.in_a_process("test_splash.check_eight_devices", 8)
