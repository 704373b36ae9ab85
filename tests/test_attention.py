"""Every implementation of attention against the plain one, and the plain one against a loop.

The kernels run here as far as they can: the TPU's interpreted, and compiled by libtpu where it is
installed (`pytest -m tpu_aot`); cuDNN's only on a GPU (`pytest -m gpu`).
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from uirl_jax.errors import ModelError
from uirl_jax.models import attention, sharding, splash

# How far a kernel may be from the plain implementation, as a part of the largest number there.
# float32: sums in another order, measured 1e-6. bfloat16: its numbers are 2**-8 apart; plain rounds
# the weights to it before the values are summed and the kernels do not, and all round results.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2**-7}


def naive_attention(q_btnh, k_bskh, v_bskh, mask_bts) -> np.ndarray:
    out_btnh = np.zeros(q_btnh.shape)
    group = q_btnh.shape[2] // k_bskh.shape[2]
    for b, t, n in np.ndindex(q_btnh.shape[:3]):
        seen = np.flatnonzero(mask_bts[b, t])
        scores = k_bskh[b, seen, n // group] @ q_btnh[b, t, n] / np.sqrt(q_btnh.shape[-1])
        weights = np.exp(scores - scores.max())
        out_btnh[b, t, n] = weights @ v_bskh[b, seen, n // group] / weights.sum()
    return out_btnh


def packed_rows(tokens: int) -> np.ndarray:
    """int32[3,T]: two segments and padding, one whole segment, nothing but padding."""
    segment_ids_bt = np.zeros((3, tokens), np.int32)
    segment_ids_bt[0, : tokens * 3 // 4] = 2
    segment_ids_bt[0, : tokens // 3] = 1
    segment_ids_bt[1] = 1
    return segment_ids_bt


def random_qkv(rows, tokens, heads, kv_heads, head_dim, dtype=jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(rows, tokens, n, head_dim)), dtype)
        for n in (heads, kv_heads, kv_heads)
    ]


def output_and_gradients(
    qkv, segment_ids_bt, prefix_segments_bt=None, *, causal, implementation, placed=None
) -> list:
    """[B,T,N,H], and the gradients of q, k and v of a sum with random weights; float32."""
    weights_btnh = np.random.default_rng(1).normal(size=qkv[0].shape).astype(np.float32)

    @functools.partial(jax.jit, in_shardings=placed)
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def run(q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt):
        out_btnh = attention.attention(
            q_btnh,
            k_btkh,
            v_btkh,
            segment_ids_bt,
            causal=causal,
            prefix_segments_bt=prefix_segments_bt,
            implementation=implementation,
        )
        return jnp.sum(out_btnh.astype(jnp.float32) * weights_btnh), out_btnh

    (_, out_btnh), gradients = run(*qkv, segment_ids_bt, prefix_segments_bt)
    assert {x.dtype for x in (out_btnh, *gradients)} == {qkv[0].dtype}
    return [np.asarray(x.astype(jnp.float32)) for x in (out_btnh, *gradients)]


def assert_close(got: list, expected: list, tolerance: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=name, equal_nan=False
        )


# --------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("most_bytes", [2**30, 700])
def test_masked_attention_whole_or_in_chunks_equals_a_loop(most_bytes, monkeypatch):
    monkeypatch.setattr(attention, "_MAX_SCORES_BYTES", most_bytes)
    rng = np.random.default_rng(0)
    q_btnh = rng.normal(size=(2, 7, 6, 4)).astype(np.float32)
    k_bksh, v_bksh = rng.normal(size=(2, 2, 2, 5, 4)).astype(np.float32)
    mask_bts = rng.random((2, 7, 5)) < 0.5
    mask_bts[..., 2] = True
    got_btnh = attention.masked_attention(q_btnh, k_bksh, v_bksh, mask_bts)
    expected_btnh = naive_attention(q_btnh, k_bksh.swapaxes(1, 2), v_bksh.swapaxes(1, 2), mask_bts)
    np.testing.assert_allclose(got_btnh, expected_btnh, atol=1e-5)


def test_masked_attention_in_chunks_has_the_gradients_of_the_whole(monkeypatch):
    qkv, rows = random_qkv(3, 7, 4, 2, 8), packed_rows(7)
    expected = output_and_gradients(qkv, rows, causal=True, implementation="xla")
    monkeypatch.setattr(attention, "_MAX_SCORES_BYTES", 700)
    got = output_and_gradients(qkv, rows, causal=True, implementation="xla")
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
@pytest.mark.parametrize(("tokens", "places"), [(1, 9), (12, 40), (130, 300)])
def test_cached_attention_equals_whole_rows(implementation, tokens, places):
    """Rows that begin, go on, and fill their slot; what the slot holds beyond them is garbage."""
    rng = np.random.default_rng(tokens)
    start_b = np.array([0, 3, places - tokens])
    q_bsnh = rng.normal(size=(3, places, 4, 16)).astype(np.float32)
    k_bskh, v_bskh = rng.normal(size=(2, 3, places, 2, 16)).astype(np.float32)
    rows, new_bt = np.arange(3)[:, None], start_b[:, None] + np.arange(tokens)
    causal_tt = np.tril(np.ones((places, places), bool))[None].repeat(3, axis=0)
    expected_btnh = naive_attention(q_bsnh, k_bskh, v_bskh, causal_tt)[rows, new_bt]
    got_btnh = attention.cached_attention(
        q_bsnh[rows, new_bt],
        k_bskh[rows, new_bt],
        v_bskh[rows, new_bt],
        k_bskh.swapaxes(1, 2),
        v_bskh.swapaxes(1, 2),
        start_b,
        implementation=implementation,
    )
    np.testing.assert_allclose(got_btnh, expected_btnh, atol=1e-5)


def test_segment_mask_of_two_segments_and_padding_is_the_table():
    causal = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool
    )
    segment_ids_bt = np.array([[1, 1, 2, 2, 0]], np.int32)
    got_bts = attention.segment_mask(jnp.asarray(segment_ids_bt), causal=True)
    np.testing.assert_array_equal(got_bts[0], causal)
    got_bts = attention.segment_mask(jnp.asarray(segment_ids_bt), causal=False)
    np.testing.assert_array_equal(got_bts[0], causal | causal.T)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_packed_rows_equals_a_loop(causal):
    segment_ids_bt = packed_rows(9)
    qkv = random_qkv(3, 9, 6, 2, 4)
    mask_bts = segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]
    if causal:
        mask_bts &= np.tril(np.ones((9, 9), bool))
    got_btnh = attention.attention(*qkv, segment_ids_bt, causal=causal)  # auto: xla on a CPU
    expected_btnh = naive_attention(*(np.asarray(x) for x in qkv), mask_bts)
    np.testing.assert_allclose(got_btnh, expected_btnh, atol=1e-5)


def short_segments(tokens: int, longest: int) -> np.ndarray:
    """int32[3,T]: segments of all lengths up to `longest`, with padding of any length; padding."""
    rng = np.random.default_rng(tokens)
    segment_ids_bt = np.zeros((3, tokens), np.int32)
    for row, padding in ((0, 0), (1, tokens // 3)):
        lengths = rng.integers(1, longest + 1, tokens)
        lengths[::3] = longest
        segments_t = np.repeat(1 + np.arange(tokens), lengths)[: tokens - padding]
        segment_ids_bt[row, : tokens - padding] = segments_t
    return segment_ids_bt


@pytest.mark.parametrize(("tokens", "longest"), [(4, 4), (9, 4), (24, 4), (23, 5), (13, 1)])
def test_window_attention_equals_a_loop_and_has_its_gradients(tokens, longest):
    segment_ids_bt = short_segments(tokens, longest)
    qkv = random_qkv(3, tokens, 4, 2, 4)
    mask_bts = segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]
    expected_btnh = naive_attention(*(np.asarray(x) for x in qkv), mask_bts)
    weights_btnh = np.random.default_rng(1).normal(size=qkv[0].shape).astype(np.float32)
    real_bt11 = (segment_ids_bt > 0)[..., None, None]

    def run(function, **options):
        def loss(q_btnh, k_btkh, v_btkh):
            out_btnh = function(q_btnh, k_btkh, v_btkh, segment_ids_bt, **options)
            return jnp.sum(jnp.where(real_bt11, out_btnh * weights_btnh, 0)), out_btnh

        (_, out_btnh), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return [np.asarray(x) for x in (out_btnh, *gradients)]

    got = run(attention.window_attention, longest=longest)
    whole = run(attention.attention, causal=False)
    # Padding is meaningless, but never 0 / 0.
    assert np.isfinite(got[0]).all()
    for array in (got, whole):
        array[0] = np.where(real_bt11, array[0], 0)
    np.testing.assert_allclose(got[0], np.where(real_bt11, expected_btnh, 0), atol=1e-5)
    assert_close(got, whole, 1e-5)


def test_window_attention_of_a_long_row_holds_no_scores_of_the_whole():
    qkv = random_qkv(1, 512, 2, 2, 4)
    text = str(
        jax.make_jaxpr(lambda *x: attention.window_attention(*x, longest=16))(
            *qkv, np.ones((1, 512), np.int32)
        )
    )
    assert "16,48]" in text
    assert "512,512]" not in text


@pytest.mark.parametrize("tokens", [6, 7, 13])  # 13: more blocks than are compiled
def test_attention_in_causal_blocks_equals_the_whole(tokens, monkeypatch):
    segment_ids_bt = packed_rows(tokens)
    mask_bts = attention.segment_mask(segment_ids_bt, causal=True)
    qkv = random_qkv(3, tokens, 6, 2, 4)

    def whole(q_btnh, k_btkh, v_btkh):
        k_bkth, v_bkth = k_btkh.swapaxes(1, 2), v_btkh.swapaxes(1, 2)
        return jnp.sum(attention.masked_attention(q_btnh, k_bkth, v_bkth, mask_bts) ** 3)

    def blocks(*qkv):
        return jnp.sum(attention.attention(*qkv, segment_ids_bt, causal=True) ** 3)

    expected, expected_gradients = jax.value_and_grad(whole, argnums=(0, 1, 2))(*qkv)
    monkeypatch.setattr(attention, "_CAUSAL_BLOCK", 2)
    monkeypatch.setattr(attention, "_MAX_CAUSAL_BLOCKS", 4)
    text = str(jax.make_jaxpr(blocks)(*qkv))
    assert text.count("exp ") == min(-(-tokens // 2), 4)  # a softmax each
    got, got_gradients = jax.value_and_grad(blocks, argnums=(0, 1, 2))(*qkv)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(got_gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


# -------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "causal"),
    [
        (jnp.float32, 64, 2, True),
        (jnp.float32, 80, 4, False),  # as in the vision tower
        (jnp.float32, 128, 1, True),
        (jnp.bfloat16, 80, 4, False),
        (jnp.bfloat16, 128, 2, True),  # as in the text tower
    ],
)
def test_splash_interpreted_equals_plain(dtype, head_dim, kv_heads, causal, monkeypatch):
    monkeypatch.setattr(splash, "_BLOCK", 128)  # two blocks, the second one padded
    segment_ids_bt = packed_rows(200)
    qkv = random_qkv(3, 200, 4, kv_heads, head_dim, dtype)
    run = functools.partial(output_and_gradients, qkv, segment_ids_bt, causal=causal)
    assert_close(run(implementation="splash"), run(implementation="xla"), TOLERANCE[dtype])


def check_four_devices() -> None:
    """The body of a test below, in a process of its own: the device count is fixed at start."""
    mesh = sharding.make_mesh(data=1, fsdp=2, model=2)
    for rows, heads, kv_heads in (
        (2, 4, 2),  # everything is cut
        (2, 6, 3),  # both devices of the model axis need the second kv head
        (3, 3, 3),  # neither rows nor heads divide: every device computes all
    ):
        qkv, segment_ids_bt = random_qkv(rows, 20, heads, kv_heads, 8), packed_rows(20)[:rows]
        expected = output_and_gradients(qkv, segment_ids_bt, causal=True, implementation="xla")
        axes = [("batch", None, "wide", None)] * 3 + [("batch", None)]
        placed = tuple(
            NamedSharding(mesh, sharding.partition_spec(a, x.shape, dict(mesh.shape)))
            for a, x in zip(axes, (*qkv, segment_ids_bt), strict=True)
        )
        placed += (None,)  # no prefixes
        with jax.set_mesh(mesh):
            got = output_and_gradients(
                qkv, segment_ids_bt, causal=True, implementation="splash", placed=placed
            )
        assert_close(got, expected, 1e-5)


def in_a_process(check: str, devices: int) -> None:
    """Runs module.function of tests on so many fake devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", f"from tests import {check.split('.')[0]}; {check}()"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_splash_on_four_fake_devices_equals_one():
    in_a_process("test_attention.check_four_devices", 4)


@pytest.mark.parametrize(
    ("platform", "dtype", "tokens", "head_dim", "kernel"),
    [
        ("cpu", jnp.bfloat16, 16, 64, False),
        ("tpu", jnp.bfloat16, 16, 64, True),
        ("tpu", jnp.float32, 15, 80, True),
        ("tpu", jnp.float16, 16, 64, False),
        ("gpu", jnp.float32, 16, 64, False),
        ("gpu", jnp.bfloat16, 15, 64, False),
        ("gpu", jnp.bfloat16, 16, 12, False),
        ("gpu", jnp.bfloat16, 16, 136, False),
    ],
)
def test_auto_is_decided_by_the_mesh_and_the_arrays(platform, dtype, tokens, head_dim, kernel):
    """Of the mesh that is compiled for: this host has a CPU alone."""
    device = AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
    mesh = AbstractMesh((1, 1, 1), sharding.MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
    q_btnh = jax.ShapeDtypeStruct((1, tokens, 2, head_dim), dtype)
    segment_ids_bt = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = jax.jit(functools.partial(attention.attention, causal=True))
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = str(run.trace(q_btnh, q_btnh, q_btnh, segment_ids_bt).jaxpr)
    assert ("pallas_call" in jaxpr) == kernel
    assert "interpret=True" not in jaxpr


@pytest.mark.parametrize(("devices", "kernel"), [(1, True), (8, False)])
def test_auto_without_a_mesh_is_a_kernel_on_one_device_alone(devices, kernel, monkeypatch):
    """On several the arrays may be cut, and a Pallas kernel is cut by shard_map or not at all."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    q_btnh = jnp.ones((1, 16, 2, 64))
    run = jax.make_jaxpr(functools.partial(attention.attention, causal=True))
    jaxpr = str(run(q_btnh, q_btnh, q_btnh, jnp.ones((1, 16), jnp.int32)))
    assert ("pallas_call" in jaxpr) == kernel


def test_cudnn_without_a_gpu_is_a_model_error():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ModelError, match=r"the platform is .*, expected an NVIDIA GPU"):
        attention.attention(
            *random_qkv(3, 8, 2, 2, 8), packed_rows(8), causal=True, implementation="cudnn"
        )


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("chip", "dtype", "heads", "kv_heads", "head_dim", "mask"),
    [
        ("v5e", jnp.bfloat16, 12, 2, 128, "causal"),  # the text tower of the 2B model
        ("v5e", jnp.bfloat16, 16, 16, 80, "full"),  # the vision tower
        ("v5e", jnp.float32, 4, 1, 64, "causal"),
        ("v5e", jnp.bfloat16, 12, 2, 128, "shared"),
        ("v6e", jnp.bfloat16, 12, 2, 128, "shared"),
        ("v6e", jnp.float32, 4, 1, 64, "shared"),
    ],
)
def test_auto_for_a_tpu_compiles_to_splash_without_scores(
    chip, dtype, heads, kv_heads, head_dim, mask, monkeypatch
):
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # libtpu asks a server of the cloud otherwise
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x2")
    mesh = sharding.make_mesh(data=1, fsdp=2, model=2, devices=list(topology.devices))
    rows, tokens = 2, 3000

    def array(*shape, dtype=dtype, axes=("batch", None, "wide", None)) -> jax.ShapeDtypeStruct:
        spec = sharding.partition_spec(axes, shape, dict(mesh.shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(q_btnh, k_btkh, v_btkh, segment_ids_bt):
        out_btnh = attention.attention(
            q_btnh,
            k_btkh,
            v_btkh,
            segment_ids_bt,
            causal=mask != "full",
            prefix_segments_bt=segment_ids_bt if mask == "shared" else None,
        )
        return jnp.sum(jnp.square(out_btnh.astype(jnp.float32)))

    kv_btkh = array(rows, tokens, kv_heads, head_dim)
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            .lower(
                array(rows, tokens, heads, head_dim),
                kv_btkh,
                kv_btkh,
                array(rows, tokens, dtype=jnp.int32, axes=("batch", None)),
            )
            .compile()
        )
    # One kernel forward, two backward: of q, and of k and v.
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
    one_head_bytes = 4 * tokens**2
    assert compiled.memory_analysis().temp_size_in_bytes < one_head_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 2), (80, 4), (128, 2), (128, 1)])
def test_cudnn_equals_plain(head_dim, kv_heads, causal):
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, this is {jax.default_backend()}")
    segment_ids_bt = packed_rows(200)
    qkv = random_qkv(3, 200, 4, kv_heads, head_dim, jnp.bfloat16)
    run = functools.partial(output_and_gradients, qkv, segment_ids_bt, causal=causal)
    # cuDNN rounds the weights before the sum too, and the scores' gradient before the products.
    assert_close(
        run(implementation="cudnn"), run(implementation="xla"), 2 * TOLERANCE[jnp.bfloat16]
    )


@pytest.mark.gpu
def test_auto_on_a_gpu_is_cudnn_for_bfloat16_and_plain_for_float32():
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, this is {jax.default_backend()}")
    run = jax.jit(functools.partial(attention.attention, causal=True))
    for dtype, fused in ((jnp.bfloat16, True), (jnp.float32, False)):
        with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
            lowered = run.lower(*random_qkv(3, 16, 4, 2, 64, dtype), packed_rows(16))
        assert ("__cudnn$fmha" in lowered.as_text()) == fused
