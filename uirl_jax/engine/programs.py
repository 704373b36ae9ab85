"""The device's half of the engine: encode screenshots, prefill, copy a prefix, decode.

Four jitted functions on two buffers that live on the device, the cache and the table of visual
tokens; each gives back the buffer that it was given (donated). All shapes are fixed: which requests
share a call is decided in `rounds`, how they are laid out in `jobs` and `requests`.

A context of 6 tokens c with 3 sampled ones, a b and e, the end token: prefill writes all but the
last c, which the first decode step reads. What was sampled last is never written.

    cache position  0 1 2 3 4 5 6 7 8
    after prefill   c c c c c
    after decode    c c c c c c a b
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from uirl_jax.engine import sampling
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.engine.weights import Weights, merge, used_now
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel

# What the dimensions of the buffers mean, for models.sharding: slots over the data axes, heads over
# the model's; any slot may read any visual token.
CACHE_AXES = (None, "batch", "wide", None, None)
TABLE_AXES = (None, None)


# NumPy on the host; traced in a program.
Array = Any


class DecodeRows(NamedTuple):
    """Where every row of a decode call stands; a row of padding has remaining 0."""

    slot_b: Array  # int32; one past the last at padding
    length_b: Array  # int32, cache positions of the slot that are written
    token_b: Array  # int32, the token that is read next
    position_b: Array  # int32, its position, the same on every axis
    step_b: Array  # int32, tokens that the request has sampled so far
    remaining_b: Array  # int32, tokens that it may still sample
    temperature_b: Array  # float32
    top_p_b: Array  # float32
    top_k_b: Array  # int32
    seeds_b2: Array  # uint32


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

    encode(table_md, weights, vision, row_m) -> table_md; row_m int32[M']: the table's row of every
      visual token, one past the last for padding.
    prefill(cache, weights, table_md, slot_b, start_b, token_ids_bt, vision_index_bt,
      positions_abt, prefix_b, *, span) -> cache
    copy(cache, source_n, target_n, count) -> cache; slots, the first `count` of them.
    decode(cache, weights, rows, steps, stop_early, *, span) -> (cache, Decoded);
      at most `steps` tokens a row; with stop_early only until a row has ended.
    """

    encode: Callable[..., jax.Array]
    prefill: Callable[..., Any]
    copy: Callable[..., Any]
    decode: Callable[..., tuple[Any, Decoded]]

    def compile_count(self) -> int:
        return sum(cast(Any, program)._cache_size() for program in self)


def make_programs(
    model: PolicyModel,
    vocabulary: Vocabulary,
    cfg: EngineConfig,
    *,
    cache_sharding: Any = None,
    table_sharding: Any = None,
    compiler_options: Mapping[str, str] | None = None,
) -> Programs:
    """The programs of one model.

    Args:
      cache_sharding, table_sharding: where the buffers lie; left to the compiler they may come back
        placed otherwise, and the next call compiles again.
      compiler_options: XLA's, of the programs that read weights.
    """
    options = dict(compiler_options or {})
    return Programs(
        _make_encode(model, table_sharding, options),
        _make_prefill(model, cache_sharding, options),
        _make_copy(cache_sharding),
        _make_decode(model, vocabulary, cfg, cache_sharding, options),
    )


def _make_encode(
    model: PolicyModel, table_sharding: Any, options: dict[str, str]
) -> Callable[..., jax.Array]:
    @functools.partial(
        jax.jit, donate_argnums=0, out_shardings=table_sharding, compiler_options=options
    )
    def encode(
        table_md: jax.Array, weights: Weights, vision: dict[str, jax.Array], row_m: jax.Array
    ) -> jax.Array:
        module, _ = merge(model, weights)
        visual_md = module.encode_images(vision)
        return table_md.at[row_m].set(visual_md.astype(table_md.dtype), mode="drop")

    return encode


def _make_prefill(
    model: PolicyModel, cache_sharding: Any, options: dict[str, str]
) -> Callable[..., Any]:
    @functools.partial(
        jax.jit,
        donate_argnums=0,
        static_argnames="span",
        out_shardings=cache_sharding,
        compiler_options=options,
    )
    def prefill(
        cache: Any,
        weights: Weights,
        table_md: jax.Array,
        slot_b: jax.Array,
        start_b: jax.Array,
        token_ids_bt: jax.Array,
        vision_index_bt: jax.Array,
        positions_abt: jax.Array,
        prefix_b: jax.Array,
        *,
        span: int,
    ) -> Any:
        module, blocks = merge(model, weights)
        prefix = {"prefix_b": prefix_b} if model.family.prefix_lm else {}
        _, cache = module.extend(
            token_ids_bt,
            table_md,
            vision_index_bt,
            positions_abt,
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
            **prefix,
        )
        return cache

    return prefill


def _make_copy(cache_sharding: Any) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=cache_sharding)
    def copy(cache: Any, source_n: jax.Array, target_n: jax.Array, count: jax.Array) -> Any:
        def copy_slot(n: jax.Array, cache: Any) -> Any:
            return jax.tree.map(lambda x: x.at[:, target_n[n]].set(x[:, source_n[n]]), cache)

        return jax.lax.fori_loop(0, count, copy_slot, cache)  # one slot each: it may be gigabytes

    return copy


def _make_decode(
    model: PolicyModel,
    vocabulary: Vocabulary,
    cfg: EngineConfig,
    cache_sharding: Any,
    options: dict[str, str],
) -> Callable[..., tuple[Any, Decoded]]:
    end_ids = np.array(vocabulary.end_token_ids, np.int32)
    forbidden_v: Any = np.isin(np.arange(model.cfg.vocab_size), vocabulary.forbidden_ids)
    axes = model.inputs.position_axes

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        static_argnames="span",
        out_shardings=(cache_sharding, None),
        compiler_options=options,
    )
    def decode(
        cache: Any,
        weights: Weights,
        rows: DecodeRows,
        steps: jax.Array,
        stop_early: jax.Array,
        *,
        span: int,
    ) -> tuple[Any, Decoded]:
        batch = rows.slot_b.shape[0]
        # All slots, in order: then nothing has to be gathered from the cache.
        slot_b = None if batch == cfg.num_slots else rows.slot_b

        def unfinished(carry: Any) -> jax.Array:
            step, _, out, _ = carry
            live_b = ~out.ended_b & (out.count_b < rows.remaining_b)
            over = stop_early & (live_b != (rows.remaining_b > 0)).any()
            return (step < steps) & live_b.any() & ~over

        def sample_token(carry: Any) -> Any:
            step, token_b, out, cache = carry
            held, token_b = used_now(weights, token_b)
            module, blocks = merge(model, held)
            live_b = ~out.ended_b & (out.count_b < rows.remaining_b)
            # The first token that is read is the context's last.
            is_first_b = rows.step_b + out.count_b == 0
            context_b = jnp.where(is_first_b, rows.length_b + 1, 0)
            prefix = {"prefix_b": context_b} if model.family.prefix_lm else {}
            x_b1d, cache = module.extend(
                token_b[:, None],
                None,
                None,
                jnp.broadcast_to((rows.position_b + step)[None, :, None], (axes, batch, 1)),
                cache,
                # A row that has ended writes nothing: its slot keeps what the episode continues.
                jnp.where(live_b, rows.length_b + step, cfg.slot_positions),
                slot_b=slot_b,
                span=span,
                blocks=blocks,
                **prefix,
            )
            logits_bv = module.logits(x_b1d)[:, 0]
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
                out.ended_b | (live_b & jnp.isin(token_b, end_ids)),
            )
            return step + 1, token_b, out, cache

        zeros_bs = jnp.zeros((batch, cfg.decode_steps), jnp.float32)
        out = Decoded(
            zeros_bs.astype(jnp.int32),
            zeros_bs,
            zeros_bs,
            jnp.zeros((batch,), jnp.int32),
            jnp.zeros((batch,), bool),
        )
        carry = (jnp.int32(0), rows.token_b, out, cache)
        _, _, out, cache = jax.lax.while_loop(unfinished, sample_token, carry)
        return cache, out

    return decode
