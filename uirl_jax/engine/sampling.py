"""Which token comes next: the distribution that a row is drawn from, and the draw.

The inside of a decode step (`engine.programs`): logits in, one token a row out, nothing kept. A
row's token depends on its own logits, settings and seed alone, never on the rows beside it.
"""

import jax
import jax.numpy as jnp


def sampling_logprobs(
    logits_bv: jax.Array, temperature_b: jax.Array, forbidden_v: jax.Array
) -> jax.Array:
    """Log-probabilities at a temperature, of all tokens that may be sampled.

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


def truncated(logprobs_bv: jax.Array, top_p_b: jax.Array, top_k_b: jax.Array) -> jax.Array:
    """The distribution without its tail, as transformers cuts it: the k likeliest tokens, then of
    these the likeliest that together have at least probability p.

    Tokens as likely as the last one that stays stay too. Sorting the vocabulary is work for rows
    that ask for it: without any, nothing is sorted.

    Args:
      logprobs_bv: float32[B,V] of `sampling_logprobs`.
      top_p_b: float32[B] in (0, 1]; 1 cuts nothing.
      top_k_b: int32[B]; 0 cuts nothing.
    Returns: float32[B,V], what is left adds up to 1, -inf elsewhere.
    """

    def cut(logprobs_bv: jax.Array) -> jax.Array:
        vocab_size = logprobs_bv.shape[-1]
        descending_bv = -jnp.sort(-logprobs_bv, axis=-1)
        k_b = jnp.where(top_k_b > 0, jnp.minimum(top_k_b, vocab_size), vocab_size)
        in_k_bv = jnp.arange(vocab_size) < k_b[:, None]
        chance_bv = jax.nn.softmax(jnp.where(in_k_bv, descending_bv, -jnp.inf), axis=-1)
        before_bv = jnp.cumsum(chance_bv, axis=-1) - chance_bv
        kept_bv = in_k_bv & ((before_bv < top_p_b[:, None]) | (top_p_b[:, None] >= 1.0))
        last_b1 = kept_bv.sum(axis=-1, keepdims=True) - 1  # sorted: what stays comes first
        least_b1 = jnp.take_along_axis(descending_bv, last_b1, axis=-1)
        kept_bv = logprobs_bv >= least_b1
        return jax.nn.log_softmax(jnp.where(kept_bv, logprobs_bv, -jnp.inf), axis=-1)

    asked = (top_p_b < 1.0).any() | (top_k_b > 0).any()
    return jax.lax.cond(asked, cut, lambda logprobs_bv: logprobs_bv, logprobs_bv)


def draw(
    logprobs_bv: jax.Array, temperature_b: jax.Array, seeds_b2: jax.Array, step_b: jax.Array
) -> jax.Array:
    """Draws one token a row by the Gumbel trick; greedy rows take the most likely token.

    Args:
      logprobs_bv: float32[B,V].
      temperature_b: float32[B].
      seeds_b2: uint32[B,2] of `requests.seed_words`.
      step_b: int32[B], 0 for a request's first sampled token.
    Returns: int32[B].
    """
    vocab_size = logprobs_bv.shape[-1]

    def noise_v(seed_2: jax.Array, step: jax.Array) -> jax.Array:
        sample_key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), step)
        return jax.random.gumbel(sample_key, (vocab_size,), jnp.float32)

    noise_bv = jnp.where(temperature_b[:, None] > 0, jax.vmap(noise_v)(seeds_b2, step_b), 0.0)
    return jnp.argmax(logprobs_bv + noise_bv, axis=-1).astype(jnp.int32)
