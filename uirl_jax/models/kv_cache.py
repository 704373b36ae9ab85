"""The KV cache of a decoder: a fixed number of slots, in floats or in int8.

`decoder.extend` writes and reads one layer at a time. The engine owns the buffers and assigns slots
to requests.

int8 saves memory. Each token and head has its own scale, so that writing a token never changes an
earlier one. |x - q * scale| is at most scale / 2, where scale is the head's largest |x| / 127. The
error moves the actor's logprobs; importance weights correct for it as for any other difference
between actor and learner.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Rotated keys, and values, of every layer; position s of slot c holds the slot's s-th token.

    A head's positions are contiguous in memory, in the order in which attention reads them.
    """

    k_lcksh: jax.Array
    v_lcksh: jax.Array
    k_scale_lcks1: jax.Array | None = None  # float32; only with int8
    v_scale_lcks1: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.k_lcksh.shape[1]

    @property
    def positions(self) -> int:
        """Cache positions of a slot."""
        return self.k_lcksh.shape[3]


def init(
    layers: int, slots: int, positions: int, heads: int, dim: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache."""
    shape = (layers, slots, heads, positions, dim)

    def empty() -> jax.Array:
        return jnp.zeros(shape, dtype)

    if dtype != jnp.int8:
        return KVCache(empty(), empty())
    return KVCache(empty(), empty(), *(jnp.zeros((*shape[:-1], 1), jnp.float32) for _ in range(2)))


def write(
    cache: KVCache,
    layer: jax.Array | int,
    slot_b: jax.Array | None,
    start_b: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
) -> KVCache:
    """Writes row b's k and v at cache positions start_b[b], start_b[b] + 1, ... of its slot.

    Args:
      slot_b: int32[B]; None: row b has slot b.
    Returns: the new cache. Writes past the last slot or position are dropped.
    """
    tokens, heads = k_btkh.shape[1:3]
    slot_b = jnp.arange(len(start_b)) if slot_b is None else slot_b
    # An index per head: each write is then one contiguous row. For a slice of heads the TPU's
    # compiler transposes the whole cache and back in every layer (138 of the 205 GB that a compiled
    # prefill moves).
    at = (
        layer,
        slot_b[:, None, None],
        jnp.arange(heads)[:, None],
        (start_b[:, None] + jnp.arange(tokens))[:, None],
    )

    def put(buffer: jax.Array, values_btkh: jax.Array) -> jax.Array:
        return buffer.at[at].set(values_btkh.swapaxes(1, 2).astype(buffer.dtype), mode="drop")

    if cache.k_scale_lcks1 is None or cache.v_scale_lcks1 is None:
        return KVCache(put(cache.k_lcksh, k_btkh), put(cache.v_lcksh, v_btkh))
    (k_q, k_scale), (v_q, v_scale) = _quantize(k_btkh), _quantize(v_btkh)
    return KVCache(
        put(cache.k_lcksh, k_q),
        put(cache.v_lcksh, v_q),
        put(cache.k_scale_lcks1, k_scale),
        put(cache.v_scale_lcks1, v_scale),
    )


def read(
    cache: KVCache,
    layer: jax.Array | int,
    slot_b: jax.Array | None,
    span: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """k and v of one layer, [B,K,S,H] in `dtype`: the first S = `span` positions of each slot.

    slot_b: int32[B]; None: all slots in order.
    """

    def select(buffer: jax.Array) -> jax.Array:
        layer_cksh = buffer[layer, :, :, :span]  # first, or the gather reads all layers
        return layer_cksh if slot_b is None else layer_cksh[slot_b]

    if cache.k_scale_lcks1 is None or cache.v_scale_lcks1 is None:
        return select(cache.k_lcksh).astype(dtype), select(cache.v_lcksh).astype(dtype)

    def dequantized(q: jax.Array, scale: jax.Array) -> jax.Array:
        return (select(q).astype(jnp.float32) * select(scale)).astype(dtype)

    return (
        dequantized(cache.k_lcksh, cache.k_scale_lcks1),
        dequantized(cache.v_lcksh, cache.v_scale_lcks1),
    )


def _quantize(x_btkh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(values in -127 ... 127, scale [B,T,K,1]), both float32; a head of zeros has scale 1."""
    x_btkh = x_btkh.astype(jnp.float32)
    largest_btk1 = jnp.abs(x_btkh).max(axis=-1, keepdims=True)
    scale_btk1 = jnp.where(largest_btk1 > 0, largest_btk1 / 127, 1.0)
    return jnp.round(x_btkh / scale_btk1), scale_btk1
