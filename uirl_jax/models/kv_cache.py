"""The keys and values of a text tower's layers, in slots, as floats or as int8.

A family's `extend` writes and reads a layer at a time; the engine owns the buffers and decides
which request has which slot.

int8 is a choice for memory: one scale for every token and head, so that a token never changes what
was stored before it. |x - q * scale| is at most scale / 2, half of a 127th of the head's largest
number; logprobs move by that, and the importance weights correct for it like for any distance
between actor and learner.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Keys (rotated) and values of every layer; position s of slot c holds the slot's s-th token.

    A head's positions lie side by side, as the products of attention read them.
    """

    k_lcksh: jax.Array
    v_lcksh: jax.Array
    k_scale_lcks1: jax.Array | None = None  # float32, with int8 alone
    v_scale_lcks1: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.k_lcksh.shape[1]

    @property
    def positions(self) -> int:
        """Of a slot."""
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
    """The cache with row b's k and v from position start_b[b] of its slot on.

    slot_b: None are all slots, in order. What lies past the last slot or position is dropped.
    """
    tokens, heads = k_btkh.shape[1:3]
    slot_b = jnp.arange(len(start_b)) if slot_b is None else slot_b
    # Every head by its own index, so that what is written at once is a row of the array as it lies
    # in memory: for a slice of heads the TPU's compiler turns the whole cache around and back, in
    # every layer (its text: 138 of 205 GB of a prefill).
    at = (
        layer,
        slot_b[:, None, None],
        jnp.arange(heads)[:, None],
        (start_b[:, None] + jnp.arange(tokens))[:, None],
    )

    def put(buffer: jax.Array, values_btkh: jax.Array) -> jax.Array:
        return buffer.at[at].set(values_btkh.swapaxes(1, 2).astype(buffer.dtype), mode="drop")

    if cache.k_scale_lcks1 is None:
        return KVCache(put(cache.k_lcksh, k_btkh), put(cache.v_lcksh, v_btkh))
    (k_q, k_scale), (v_q, v_scale) = _quantize(k_btkh), _quantize(v_btkh)
    return KVCache(
        put(cache.k_lcksh, k_q),
        put(cache.v_lcksh, v_q),
        put(cache.k_scale_lcks1, k_scale),
        put(cache.v_scale_lcks1, v_scale),
    )


def read(
    cache: KVCache, layer: jax.Array, slot_b: jax.Array | None, span: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """k and v [B,K,S,H] of a layer, the first `span` positions of the slots (None: all)."""

    def looked_at(buffer: jax.Array) -> jax.Array:
        of_layer_cksh = buffer[layer, :, :, :span]  # first, or a gather looks through all layers
        return of_layer_cksh if slot_b is None else of_layer_cksh[slot_b]

    if cache.k_scale_lcks1 is None:
        return looked_at(cache.k_lcksh).astype(dtype), looked_at(cache.v_lcksh).astype(dtype)
    return tuple(
        (looked_at(q).astype(jnp.float32) * looked_at(scale)).astype(dtype)
        for q, scale in (
            (cache.k_lcksh, cache.k_scale_lcks1),
            (cache.v_lcksh, cache.v_scale_lcks1),
        )
    )


def _quantize(x_btkh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(numbers -127 ... 127, scale [B,T,K,1]) in float32; a head of zeros has scale 1."""
    x_btkh = x_btkh.astype(jnp.float32)
    largest_btk1 = jnp.abs(x_btkh).max(axis=-1, keepdims=True)
    scale_btk1 = jnp.where(largest_btk1 > 0, largest_btk1 / 127, 1.0)
    return jnp.round(x_btkh / scale_btk1), scale_btk1
