"""The device's half of the engine: encode screenshots, prefill, copy a prefix, decode.

Four jitted functions on two buffers that live on the device, the cache and the table of visual
tokens; each gives back the buffer that it was given (donated). All shapes are fixed: which requests
share a call is decided in `rounds`, how they are laid out in `jobs` and `requests`.

A context of 6 tokens c with 3 sampled ones, a b and e, the end token: prefill writes all but the
last c, which the first decode step reads. What was sampled last is never written.

    place           0 1 2 3 4 5 6 7 8
    after prefill   c c c c c
    after decode    c c c c c c a b
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.engine import sampling
from uirl_jax.engine.weights import Weights, merge
from uirl_jax.models import qwen2_vl
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.vision_inputs import ImageConfig

# What the dimensions of the buffers mean, for models.sharding: slots over the data axes, heads over
# the model's; any slot may read any visual token.
CACHE_AXES = (None, "batch", "wide", None, None)
TABLE_AXES = (None, None)


class DecodeRows(NamedTuple):
    """Where every row of a decode call stands; a row of padding has remaining 0."""

    slot_b: np.ndarray  # int32; one past the last at padding
    length_b: np.ndarray  # int32, places of the slot that are written
    token_b: np.ndarray  # int32, the token that is read next
    position_b: np.ndarray  # int32, its M-RoPE position, the same in all three directions
    step_b: np.ndarray  # int32, tokens that the request has sampled so far
    remaining_b: np.ndarray  # int32, tokens that it may still sample
    temperature_b: np.ndarray  # float32
    top_p_b: np.ndarray  # float32
    top_k_b: np.ndarray  # int32
    seeds_b2: np.ndarray  # uint32


def no_rows(size: int, slots: int) -> DecodeRows:
    """A decode call of padding alone."""
    zeros_b = np.zeros(size, np.int32)
    return DecodeRows(
        slot_b=np.full(size, slots, np.int32),
        length_b=zeros_b.copy(),
        token_b=zeros_b.copy(),
        position_b=zeros_b.copy(),
        step_b=zeros_b.copy(),
        remaining_b=zeros_b.copy(),
        temperature_b=np.zeros(size, np.float32),
        top_p_b=np.ones(size, np.float32),
        top_k_b=zeros_b.copy(),
        seeds_b2=np.zeros((size, 2), np.uint32),
    )


class Decoded(NamedTuple):
    """What a decode call sampled, S = its steps; 0 after the count_b tokens of a row."""

    token_ids_bs: jax.Array  # int32
    logprobs_bs: jax.Array  # float32, of the distribution that was drawn from
    full_logprobs_bs: jax.Array  # float32, before top-p and top-k
    count_b: jax.Array  # int32
    ended_b: jax.Array  # bool, by an end token


class Programs(NamedTuple):
    """Jitted; the first argument of each, a buffer, is donated.

    encode(table_md, weights, patches_ipc, patch_positions_ip2, patch_segments_ip, row_m)
      -> table_md; row_m int32[M']: the table's row of every visual token, one past the last: none.
    prefill(cache, weights, table_md, slot_b, start_b, token_ids_bt, vision_index_bt,
      positions_3bt, *, places) -> cache
    copy(cache, source_n, target_n, count) -> cache; slots, the first `count` of them.
    decode(cache, weights, rows, steps, stop_early, *, places) -> (cache, Decoded);
      at most `steps` tokens a row; with stop_early only until a row has ended.
    """

    encode: Callable[..., jax.Array]
    prefill: Callable[..., KVCache]
    copy: Callable[..., KVCache]
    decode: Callable[..., tuple[KVCache, Decoded]]

    def compile_count(self) -> int:
        return sum(program._cache_size() for program in self)


def make_programs(
    graphdef: nnx.GraphDef,
    *,
    end_token_ids: Sequence[int],
    forbidden_v: np.ndarray,
    decode_steps: int,
    image_cfg: ImageConfig,
    cache_sharding: Any = None,
    table_sharding: Any = None,
) -> Programs:
    """The programs of one model.

    Args:
      end_token_ids: sampling any of them ends a row.
      forbidden_v: bool[V], never sampled.
      decode_steps: the most that a call may be asked for.
      image_cfg: what the levels of a screenshot mean to the model.
      cache_sharding, table_sharding: where the buffers lie; left to the compiler they may come back
        placed otherwise, and the next call compiles again.
    """
    ends = np.array(tuple(end_token_ids), np.int32)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=table_sharding)
    def encode(
        table_md: jax.Array,
        weights: Weights,
        patches_ipc: jax.Array,
        patch_positions_ip2: jax.Array,
        patch_segments_ip: jax.Array,
        row_m: jax.Array,
    ) -> jax.Array:
        model, _ = merge(graphdef, weights)
        patches_ipf = qwen2_vl.pixel_values(patches_ipc, image_cfg)
        visual_md = qwen2_vl.encode_images(
            model, patches_ipf, patch_positions_ip2, patch_segments_ip
        )
        return table_md.at[row_m].set(visual_md.astype(table_md.dtype), mode="drop")

    @functools.partial(
        jax.jit, donate_argnums=0, static_argnames="places", out_shardings=cache_sharding
    )
    def prefill(
        cache: KVCache,
        weights: Weights,
        table_md: jax.Array,
        slot_b: jax.Array,
        start_b: jax.Array,
        token_ids_bt: jax.Array,
        vision_index_bt: jax.Array,
        positions_3bt: jax.Array,
        *,
        places: int,
    ) -> KVCache:
        model, blocks = merge(graphdef, weights)
        _, cache = qwen2_vl.extend(
            model,
            token_ids_bt,
            table_md,
            vision_index_bt,
            positions_3bt,
            cache,
            start_b,
            slot_b=slot_b,
            places=places,
            blocks=blocks,
        )
        return cache

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=cache_sharding)
    def copy(cache: KVCache, source_n: jax.Array, target_n: jax.Array, count: jax.Array) -> KVCache:
        def one(n: jax.Array, cache: KVCache) -> KVCache:
            return jax.tree.map(lambda x: x.at[:, target_n[n]].set(x[:, source_n[n]]), cache)

        return jax.lax.fori_loop(0, count, one, cache)  # a slot at a time: it may be gigabytes

    @functools.partial(
        jax.jit, donate_argnums=0, static_argnames="places", out_shardings=(cache_sharding, None)
    )
    def decode(
        cache: KVCache,
        weights: Weights,
        rows: DecodeRows,
        steps: jax.Array,
        stop_early: jax.Array,
        *,
        places: int,
    ) -> tuple[KVCache, Decoded]:
        model, blocks = merge(graphdef, weights)
        batch = rows.slot_b.shape[0]
        # All slots, in order: then nothing has to be gathered from the cache.
        slot_b = None if batch == cache.slots else rows.slot_b

        def unfinished(carry: Any) -> jax.Array:
            step, _, out, _ = carry
            live_b = ~out.ended_b & (out.count_b < rows.remaining_b)
            over = stop_early & (live_b != (rows.remaining_b > 0)).any()
            return (step < steps) & live_b.any() & ~over

        def one(carry: Any) -> Any:
            step, token_b, out, cache = carry
            live_b = ~out.ended_b & (out.count_b < rows.remaining_b)
            x_b1d, cache = qwen2_vl.extend(
                model,
                token_b[:, None],
                None,
                None,
                jnp.broadcast_to((rows.position_b + step)[None, :, None], (3, batch, 1)),
                cache,
                # A row that has ended writes nothing: its slot keeps what the episode goes on from.
                jnp.where(live_b, rows.length_b + step, cache.places),
                slot_b=slot_b,
                places=places,
                blocks=blocks,
            )
            logits_bv = qwen2_vl.logits(model, x_b1d)[:, 0]
            full_bv = sampling.sampling_logprobs(logits_bv, rows.temperature_b, forbidden_v)
            drawn_bv = sampling.truncated(full_bv, rows.top_p_b, rows.top_k_b)
            token_b = sampling.draw(
                drawn_bv, rows.temperature_b, rows.seeds_b2, rows.step_b + out.count_b
            )

            def at_step(array_bs: jax.Array, value_b: jax.Array) -> jax.Array:
                return array_bs.at[:, step].set(jnp.where(live_b, value_b, 0))

            def of_token(logprobs_bv: jax.Array) -> jax.Array:
                return jnp.take_along_axis(logprobs_bv, token_b[:, None], axis=-1)[:, 0]

            out = Decoded(
                at_step(out.token_ids_bs, token_b),
                at_step(out.logprobs_bs, of_token(drawn_bv)),
                at_step(out.full_logprobs_bs, of_token(full_bv)),
                out.count_b + live_b,
                out.ended_b | (live_b & jnp.isin(token_b, ends)),
            )
            return step + 1, token_b, out, cache

        nothing_bs = jnp.zeros((batch, decode_steps), jnp.float32)
        out = Decoded(
            nothing_bs.astype(jnp.int32),
            nothing_bs,
            nothing_bs,
            jnp.zeros((batch,), jnp.int32),
            jnp.zeros((batch,), bool),
        )
        carry = jax.lax.while_loop(unfinished, one, (jnp.int32(0), rows.token_b, out, cache))
        return carry[3], carry[2]

    return Programs(encode, prefill, copy, decode)
