"""Layers that model families share: norms, rotary embeddings, table lookup.

Norms and angles are computed in float32 whatever the dtype of x is.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class RMSNorm(nnx.Module):
    """x / rms(x) * scale.

    Args: from_one: * (1 + scale) instead, in float32 to the end (Gemma).
    """

    def __init__(
        self, features: int, *, eps: float, param_dtype: jnp.dtype, from_one: bool = False
    ) -> None:
        start = jnp.zeros if from_one else jnp.ones
        self.scale = nnx.Param(start((features,), param_dtype))
        self.eps, self.from_one = eps, from_one

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        if self.from_one:
            return (x32 * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)
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
    """x sigmoid(1.702 x), CLIP's approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


def rotary_frequencies(pairs: int, theta: float) -> np.ndarray:
    """float32[pairs]: theta ** (-i / pairs), radians per position of each pair."""
    return (1.0 / theta ** (np.arange(pairs, dtype=np.float32) / pairs)).astype(np.float32)


def mrope_angles(
    positions_abt: jax.Array, head_dim: int, theta: float, sections: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B,T,H/2], of multimodal RoPE.

    The pairs of a head are split into sections: the first rotates by the time position, the second
    by the height, the third by the width (a fourth by time again, and so on).
    Source: Qwen2-VL, arXiv:2409.12191, section 2.1; transformers' recomposition_frequencies.
    """
    frequencies_h = rotary_frequencies(head_dim // 2, theta)
    axis_h = np.repeat(np.arange(len(sections)) % 3, sections)
    # Float32 angles: bfloat16 cannot tell position 256 from 257.
    positions_bt3 = jnp.moveaxis(positions_abt.astype(jnp.float32), 0, -1)
    angles_bth = positions_bt3[..., axis_h] * frequencies_h
    return jnp.cos(angles_bth), jnp.sin(angles_bth)


def interleaved_mrope_angles(
    positions_3bt: jax.Array, head_dim: int, theta: float, sections: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B,T,H/2], of multimodal RoPE whose axes alternate pair by pair.

    Pair j rotates by the height where j % 3 == 1 and by the width where j % 3 == 2, as far as the
    sections of these axes reach; every other pair by the time. Sections of (3, 2, 2) pairs:

        pair   0 1 2 3 4 5 6
        axis   t h w t h w t

    Source: transformers, Qwen3VLTextRotaryEmbedding.recomposition_frequencies.
    """
    pair_h = np.arange(head_dim // 2)
    axis_h = np.zeros(head_dim // 2, np.int32)
    for axis in (1, 2):
        axis_h[(pair_h % 3 == axis) & (pair_h < 3 * sections[axis])] = axis
    positions_bt3 = jnp.moveaxis(positions_3bt.astype(jnp.float32), 0, -1)  # as in mrope_angles
    angles_bth = positions_bt3[..., axis_h] * rotary_frequencies(head_dim // 2, theta)
    return jnp.cos(angles_bth), jnp.sin(angles_bth)


def axial_angles(
    positions_bt2: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[B,T,H/2], of 2-D RoPE: half of the pairs for each axis.

    Source: transformers, Qwen2VLVisionRotaryEmbedding.
    """
    frequencies_h = rotary_frequencies(head_dim // 4, theta)
    angles_bt2h = positions_bt2.astype(jnp.float32)[..., None] * frequencies_h
    angles_bth = angles_bt2h.reshape(*positions_bt2.shape[:-1], head_dim // 2)
    return jnp.cos(angles_bth), jnp.sin(angles_bth)


def rotate(x_btnh: jax.Array, cos_bth: jax.Array, sin_bth: jax.Array) -> jax.Array:
    """Rotary embedding: pair i is (x[i], x[i + H/2]), rotated by its angle in float32."""
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_bth[..., None, :], sin_bth[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


def lookup(table_vd: jax.Array, ids_bt: jax.Array) -> jax.Array:
    """table_vd[ids_bt], [B,T,D]."""
    return jnp.take(table_vd, ids_bt, axis=0, mode="clip")


def level_lookup(patches_ipc: jax.Array, table_cl: np.ndarray) -> jax.Array:
    """float32[I,P,C], the values of pixels' levels.

    A lookup, because arithmetic would be rounded differently in every program that the compiler
    fuses it into.

    Args:
      patches_ipc: uint8, three channels one after the other.
      table_cl: float32[3,256], values of the levels of each channel.
    """
    levels_ipcx = patches_ipc.reshape(*patches_ipc.shape[:2], 3, -1)
    values_ipcx = jnp.stack(
        [jnp.asarray(table_cl)[c][levels_ipcx[:, :, c]] for c in range(3)], axis=2
    )
    return values_ipcx.reshape(patches_ipc.shape)


def lookup_columns(
    table_me: jax.Array,
    index_bt: jax.Array,
    first: jax.Array | int,
    width: int,
    *,
    parts: int = 1,
) -> jax.Array:
    """table_me[index_bt, first : first + width], [B,T,width]; undefined at -1.

    One gather that reads nothing else of the table. Rows of 4 x 4096 bfloat16 of 10,000 visual
    tokens, looked up for 8,192 tokens: compiled for a v5e it moves 206 MB, a lookup in a slice of
    the table 1,051 MB, a slice of whole rows 2,886 MB.

    Args:
      parts: each of so many equal parts of B reads its own part of M. Cut alike over devices, no
        part reads another's devices. NaN, which ends a training, where a row reads another part.
    """
    size = table_me.shape[0] // parts
    index_nbt = index_bt.reshape(parts, -1, index_bt.shape[-1])
    own_nbt = index_nbt - size * jnp.arange(parts)[:, None, None]
    own_nbt = jnp.where(index_nbt < 0, 0, own_nbt)
    starts_nbt2 = jnp.stack([own_nbt, jnp.broadcast_to(first, own_nbt.shape)], axis=-1)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )

    def look_up(table_me: jax.Array, starts_bt2: jax.Array, mode: str) -> jax.Array:
        return jax.lax.gather(table_me, starts_bt2, numbers, (1, width), mode=mode)

    if parts == 1:
        return look_up(table_me, starts_nbt2[0], "clip")
    table_nme = table_me.reshape(parts, size, -1)
    rows_nbtw = jax.vmap(functools.partial(look_up, mode="fill"))(table_nme, starts_nbt2)
    return rows_nbtw.reshape(*index_bt.shape, width)
