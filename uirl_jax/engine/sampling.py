"""The jitted half of the engine: from padded contexts to sampled tokens, in one XLA program.

Vision encode, prefill and every decode step run inside `generate`, so that no token costs a round
trip to the host. Which requests share a batch is decided in `engine.engine`, how they are padded in
`engine.requests`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.models import qwen2_vl


def sampling_logprobs(
    logits_bv: jax.Array, temperature_b: jax.Array, forbidden_v: jax.Array
) -> jax.Array:
    """Log-probabilities of the distribution that tokens are drawn from.

    Args:
      logits_bv: [B,V], any float dtype.
      temperature_b: float32[B], 0 or at least requests.MIN_TEMPERATURE. 0 is greedy: its logprobs
        are those at temperature 1, because the one-point distribution says 0 for every token.
      forbidden_v: bool[V], ids that are never sampled; they leave the softmax altogether.

    Returns:
      float32[B,V], -inf at forbidden ids.
    """
    divisor_b = jnp.where(temperature_b > 0, temperature_b, 1.0).astype(jnp.float32)
    scaled_bv = logits_bv.astype(jnp.float32) / divisor_b[:, None]
    return jax.nn.log_softmax(jnp.where(forbidden_v[None], -jnp.inf, scaled_bv), axis=-1)


def draw(
    logprobs_bv: jax.Array, temperature_b: jax.Array, seeds_b2: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row by the Gumbel trick; greedy rows take the most likely token.

    The noise of a row depends on its own seed and step alone, never on the rows beside it.

    Args:
      logprobs_bv: float32[B,V] of `sampling_logprobs`.
      temperature_b: float32[B].
      seeds_b2: uint32[B,2] of `requests.seed_words`.
      step: int32[], 0 for the first sampled token.

    Returns:
      token_b int32[B] and its logprob float32[B].
    """
    vocab_size = logprobs_bv.shape[-1]

    def noise_v(seed_2: jax.Array) -> jax.Array:
        sample_key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), step)
        return jax.random.gumbel(sample_key, (vocab_size,), jnp.float32)

    noise_bv = jnp.where(temperature_b[:, None] > 0, jax.vmap(noise_v)(seeds_b2), 0.0)
    token_b = jnp.argmax(logprobs_bv + noise_bv, axis=-1).astype(jnp.int32)
    return token_b, jnp.take_along_axis(logprobs_bv, token_b[:, None], axis=-1)[:, 0]


def generate(
    graphdef: nnx.GraphDef,
    frozen: nnx.State,
    lora: nnx.State,
    patches_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
    token_ids_bt: jax.Array,
    vision_index_bt: jax.Array,
    positions_3bt: jax.Array,
    lengths_b: jax.Array,
    max_new_b: jax.Array,
    temperature_b: jax.Array,
    seeds_b2: jax.Array,
    *,
    model_cfg: qwen2_vl.Qwen2VLConfig,
    end_token_ids: tuple[int, ...],
    forbidden_v: np.ndarray,
    max_new_tokens: int,
    cache_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples every row of one batch until all have ended.

    The cache of a row in a context of 6 with 4 real tokens c, 4 spare slots and 3 sampled tokens a,
    b and e, the end token:

        slot           0 1 2 3 4 5 6 7 8 9
        after prefill  c c c c . .          .: padding is written, but no real token attends to it
        after decode   c c c c a b          it is overwritten; e ends the row and is never read

    Args:
      graphdef, frozen, lora: the split model; only lora changes between policy versions.
      patches_ipf, patch_positions_ip2, patch_segments_ip: distinct screenshots, I may be 0.
      token_ids_bt: int32[B,T], right-padded contexts.
      vision_index_bt: int32[B,T], row of the visual table, -1 at ordinary tokens.
      positions_3bt: int32[3,B,T], M-RoPE, 0 at padding.
      lengths_b: int32[B], real tokens of each row, at least 1.
      max_new_b: int32[B], 0 for a padding row.
      temperature_b, seeds_b2: see `draw`.
      max_new_tokens: width of the result and spare slots of the cache.

    Returns:
      token_ids_bs int32[B,S] and logprobs_bs float32[B,S], S = max_new_tokens, 0 after a row's end;
      counts_b int32[B], tokens sampled by each row.
    """
    model = nnx.merge(graphdef, lora, frozen)
    rows, context = token_ids_bt.shape
    row_idx_b = jnp.arange(rows)

    visual_md = None
    if patches_ipf.shape[0]:
        visual_md = qwen2_vl.encode_images(
            model, patches_ipf, patch_positions_ip2, patch_segments_ip
        )

    cache = qwen2_vl.init_cache(model_cfg, rows, context + max_new_tokens, cache_dtype)
    x_btd, cache = qwen2_vl.extend(
        model,
        token_ids_bt,
        visual_md,
        vision_index_bt,
        positions_3bt,
        cache,
        jnp.zeros((rows,), jnp.int32),
    )
    # One position a row meets the vocabulary: logits of the whole prefill would be [B,T,152k].
    last_b1d = x_btd[row_idx_b, lengths_b - 1][:, None]
    next_position_b = positions_3bt[:, row_idx_b, lengths_b - 1].max(axis=0) + 1

    def record(step, x_b1d, ended_b, token_ids_bs, logprobs_bs, counts_b):
        logits_bv = qwen2_vl.logits(model, x_b1d)[:, 0]
        logprobs_bv = sampling_logprobs(logits_bv, temperature_b, forbidden_v)
        token_b, logprob_b = draw(logprobs_bv, temperature_b, seeds_b2, step)
        token_ids_bs = token_ids_bs.at[:, step].set(jnp.where(ended_b, 0, token_b))
        logprobs_bs = logprobs_bs.at[:, step].set(jnp.where(ended_b, 0.0, logprob_b))
        counts_b += ~ended_b
        ended_b |= jnp.isin(token_b, jnp.array(end_token_ids, jnp.int32)) | (counts_b >= max_new_b)
        return token_b, ended_b, token_ids_bs, logprobs_bs, counts_b

    def decode(carry):
        step, token_b, ended_b, token_ids_bs, logprobs_bs, counts_b, cache = carry
        positions_3b1 = jnp.broadcast_to((next_position_b + step)[None, :, None], (3, rows, 1))
        x_b1d, cache = qwen2_vl.extend(
            model,
            token_b[:, None],
            None,
            None,
            positions_3b1,
            cache,
            lengths_b + step,
        )
        step += 1
        token_b, ended_b, token_ids_bs, logprobs_bs, counts_b = record(
            step, x_b1d, ended_b, token_ids_bs, logprobs_bs, counts_b
        )
        return step, token_b, ended_b, token_ids_bs, logprobs_bs, counts_b, cache

    def unfinished(carry):
        return ~carry[2].all()  # every row ends at max_new_b at the latest

    first = record(
        jnp.int32(0),
        last_b1d,
        max_new_b <= 0,
        jnp.zeros((rows, max_new_tokens), jnp.int32),
        jnp.zeros((rows, max_new_tokens), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
    )
    carry = jax.lax.while_loop(unfinished, decode, (jnp.int32(0), *first, cache))
    return carry[3], carry[4], carry[5]
