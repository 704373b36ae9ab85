"""The pieces that model families share: norms, rotary embeddings, attention, table lookup.

Pure functions of arrays; a family's module owns the parameters and decides what goes where.
Softmax, norms and angles are computed in float32 whatever the dtype of x is.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Scores above this many bytes are not held at once: attention then goes through the queries in
# chunks. 512 MiB is 16 heads of 2,900 x 2,900 in float32.
_MAX_SCORES_BYTES = 512 * 2**20


class RMSNorm(nnx.Module):
    """x / rms(x) * scale."""

    def __init__(self, features: int, *, eps: float, param_dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * self.scale[...].astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias."""

    def __init__(self, features: int, *, eps: float, param_dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        y32 = x32 * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y32.astype(x.dtype)


def quick_gelu(x: jax.Array) -> jax.Array:
    """x sigmoid(1.702 x), CLIP's cheap GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def rotary_frequencies(pairs: int, theta: float) -> np.ndarray:
    """float32[pairs]: theta ** (-i / pairs), radians per position of each rotated pair."""
    return (1.0 / theta ** (np.arange(pairs, dtype=np.float32) / pairs)).astype(np.float32)


def mrope_angles(
    positions_3bt: jax.Array, head_dim: int, theta: float, sections: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B,T,H/2], of multimodal RoPE.

    The pairs of a head are cut into sections: the first turns with the time position, the second
    with the height, the third with the width (a fourth with time again, and so on).
    Source: Qwen2-VL, arXiv:2409.12191, section 2.1; transformers' recomposition_frequencies.
    """
    frequencies_h = rotary_frequencies(head_dim // 2, theta)
    axis_h = np.repeat(np.arange(len(sections)) % 3, sections)
    # Float32 angles: bfloat16 cannot tell position 256 from 257.
    positions_bt3 = jnp.moveaxis(positions_3bt.astype(jnp.float32), 0, -1)
    angles_bth = positions_bt3[..., axis_h] * frequencies_h
    return jnp.cos(angles_bth), jnp.sin(angles_bth)


def axial_angles(
    positions_bt2: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B,T,H/2], of the vision tower's 2-D RoPE: half the pairs each axis.

    Source: transformers, Qwen2VLVisionRotaryEmbedding.
    """
    frequencies_h = rotary_frequencies(head_dim // 4, theta)
    angles_bt2h = positions_bt2.astype(jnp.float32)[..., None] * frequencies_h
    angles_bth = angles_bt2h.reshape(*positions_bt2.shape[:-1], head_dim // 2)
    return jnp.cos(angles_bth), jnp.sin(angles_bth)


def rotate(x_btnh: jax.Array, cos_bth: jax.Array, sin_bth: jax.Array) -> jax.Array:
    """Rotary embedding: pair i is (x[i], x[i + H/2]), turned by its angle in float32."""
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_bth[..., None, :], sin_bth[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


def segment_mask(segment_ids_bt: jax.Array, *, causal: bool) -> jax.Array:
    """bool[B,T,T], True where the query (row) may look at the key (column).

    Padding is segment 0 and looks at padding: no query is without a key, so no softmax is 0 / 0,
    and nothing of it reaches a real token. Two packed sequences and padding, causal:

        segment 1 1 2 2 0
              1 x . . . .
              1 x x . . .
              2 . . x . .
              2 . . x x .
              0 . . . . x
    """
    mask_bts = segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]
    if causal:
        tokens = segment_ids_bt.shape[-1]
        mask_bts &= np.tril(np.ones((tokens, tokens), bool))
    return mask_bts


def attention(
    q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, mask_bts: jax.Array
) -> jax.Array:
    """Softmax attention with grouped heads; query head n reads kv head n // (N / K).

    Args:
      mask_bts: bool[B,T,S], True where a query may look; every query needs at least one key.
    Returns: [B,T,N,H] in q's dtype; scores and softmax in float32.
    """
    batch, tokens, heads, _ = q_btnh.shape
    slots = k_bskh.shape[1]
    chunks = -(-4 * batch * heads * tokens * slots // _MAX_SCORES_BYTES)
    if chunks > 1 and tokens > 1:
        return _attention_in_chunks(q_btnh, k_bskh, v_bskh, mask_bts, min(chunks, tokens))
    return _attend(q_btnh, k_bskh, v_bskh, mask_bts)


def _attend(
    q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, mask_bts: jax.Array
) -> jax.Array:
    """attention() with all scores at once."""
    batch, tokens, heads, head_dim = q_btnh.shape
    slots, kv_heads = k_bskh.shape[1:3]
    # The group goes next to the queries, so that one matrix product serves a kv head's whole group
    # and no key is repeated.
    group = heads // kv_heads
    q_bkgth = q_btnh.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkmh = (q_bkgth * head_dim**-0.5).reshape(batch, kv_heads, group * tokens, head_dim)
    scores_bkms = jnp.einsum("bkmh,bskh->bkms", q_bkmh, k_bskh, preferred_element_type=jnp.float32)
    scores_bkgts = scores_bkms.reshape(batch, kv_heads, group, tokens, slots)
    scores_bkgts = jnp.where(mask_bts[:, None, None], scores_bkgts, jnp.finfo(jnp.float32).min)
    weights_bkgts = jax.nn.softmax(scores_bkgts, axis=-1).astype(v_bskh.dtype)
    weights_bkms = weights_bkgts.reshape(batch, kv_heads, group * tokens, slots)
    out_bkmh = jnp.einsum("bkms,bskh->bkmh", weights_bkms, v_bskh)
    out_bkgth = out_bkmh.reshape(batch, kv_heads, group, tokens, head_dim)
    return out_bkgth.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, head_dim)


def _attention_in_chunks(
    q_btnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, mask_bts: jax.Array, chunks: int
) -> jax.Array:
    """attention() for one chunk of queries after the other, recomputed in the backward pass."""
    tokens = q_btnh.shape[1]
    size = -(-tokens // chunks)
    padding = chunks * size - tokens
    q_btnh = jnp.pad(q_btnh, ((0, 0), (0, padding), (0, 0), (0, 0)))
    # Padded queries look at everything: their result is cut off, but must not be 0 / 0.
    mask_bts = jnp.pad(mask_bts, ((0, 0), (0, padding), (0, 0)), constant_values=True)

    def split(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array.reshape(array.shape[0], chunks, size, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend(part[0], k_bskh, v_bskh, part[1])

    out_cbtnh = jax.lax.map(one, (split(q_btnh), split(mask_bts)))
    out_btnh = jnp.moveaxis(out_cbtnh, 0, 1).reshape(q_btnh.shape)
    return out_btnh[:, :tokens]


def lookup(table_vd: jax.Array, ids_bt: jax.Array) -> jax.Array:
    """table_vd[ids_bt], [B,T,D]."""
    return jnp.take(table_vd, ids_bt, axis=0, mode="clip")
