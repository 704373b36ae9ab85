"""Logprobs of tokens, and entropies, from the text tower's output: never a [B,T,V] array.

The vocabulary is met at sampled positions alone, a few of them at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models.sharding import on_a_device

MAX_LOGITS_BYTES = 256 * 2**20  # of a device's float32 logits at once


def token_logprobs(
    model: nnx.Module,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
) -> jax.Array:
    """float32[B,T]: [:,t] is the logprob of token_ids[:,t] given x[:,t-1]; [:,0] is 0.

    Values at padding and at the first token of a packed segment are finite and mean nothing.

    Args:
      sampled_index_bs: int32[B,S], the only positions that are scored, -1 at places that are not
        used; 0 stands everywhere else. A screenshot's tokens are never sampled, so that a row has
        far fewer positions to score than it has tokens. None scores all of them.
      chunk: tokens of a row that are scored at once; float32[B,chunk,V] is the largest array. None:
        as many as make it 256 MiB on a device.
      temperature, forbidden_v: bool[V]; of the distribution that was sampled from, so that what the
        engine recorded and what is computed here are the same number.
    """
    logprobs_bt, _ = token_logprobs_and_entropies(
        model,
        x_btd,
        token_ids_bt,
        sampled_index_bs,
        chunk=chunk,
        temperature=temperature,
        forbidden_v=forbidden_v,
        entropies=False,
    )
    return logprobs_bt


def token_logprobs_and_entropies(
    model: nnx.Module,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
    entropies: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """token_logprobs, and beside it the entropy of the distribution that each token is of, in nats.

    Args: see token_logprobs; without `entropies` they are None.
    """
    if sampled_index_bs is None:
        sampled_index_bs = jnp.broadcast_to(
            jnp.arange(1, token_ids_bt.shape[1]), (len(token_ids_bt), token_ids_bt.shape[1] - 1)
        )
    before_bs = jnp.maximum(sampled_index_bs - 1, 0)
    x_bsd = jnp.take_along_axis(x_btd, before_bs[..., None], axis=1)
    target_ids_bs = jnp.take_along_axis(token_ids_bt, jnp.maximum(sampled_index_bs, 0), axis=1)
    if chunk is None:
        token_bytes = 4 * on_a_device((len(x_btd), model.cfg.vocab_size), "batch", "vocab")
        chunk = max(MAX_LOGITS_BYTES // token_bytes, 1)

    def score(x_bcd: jax.Array, target_ids_bc: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits_bcv = model.logits(x_bcd) / temperature
        if forbidden_v is not None:
            logits_bcv = jnp.where(forbidden_v, jnp.finfo(jnp.float32).min, logits_bcv)
        # A comparison with the targets instead of a gather: its gradient is elementwise, where the
        # gather's would be a scatter over the vocabulary.
        is_target_bcv = target_ids_bc[..., None] == jnp.arange(logits_bcv.shape[-1])
        target_bc = jnp.sum(jnp.where(is_target_bcv, logits_bcv, 0.0), axis=-1)
        total_bc = jax.nn.logsumexp(logits_bcv, axis=-1)
        if not entropies:
            return target_bc - total_bc, None
        mean_bc = jnp.sum(jax.nn.softmax(logits_bcv, axis=-1) * logits_bcv, axis=-1)
        return target_bc - total_bc, total_bc - mean_bc

    scores_bs, entropies_bs = _in_chunks(score, x_bsd, target_ids_bs, chunk)
    # Past the end of the row, where nothing is written.
    at_bs = jnp.where(sampled_index_bs < 0, token_ids_bt.shape[1], sampled_index_bs)
    row_b1 = jnp.arange(len(token_ids_bt))[:, None]

    def spread(values_bs: jax.Array) -> jax.Array:
        return jnp.zeros(token_ids_bt.shape).at[row_b1, at_bs].set(values_bs, mode="drop")

    return spread(scores_bs), None if entropies_bs is None else spread(entropies_bs)


def _in_chunks(
    score: Callable[..., Any], x_bsd: jax.Array, target_ids_bs: jax.Array, chunk: int
) -> Any:
    """score() of a few positions of all rows at a time; its results are [B,S]."""
    # Recomputed in the backward pass: saved logits of every chunk would be the [B,T,V] array again.
    score = jax.checkpoint(score)
    batch, places = target_ids_bs.shape
    if places <= chunk:
        return score(x_bsd, target_ids_bs)
    chunks = -(-places // chunk)
    chunk = -(-places // chunks)  # equal parts waste the least padding
    padding = chunks * chunk - places
    x_kbcd = jnp.moveaxis(
        jnp.pad(x_bsd, ((0, 0), (0, padding), (0, 0))).reshape(batch, chunks, chunk, -1), 1, 0
    )
    target_ids_kbc = jnp.moveaxis(
        jnp.pad(target_ids_bs, ((0, 0), (0, padding))).reshape(batch, chunks, chunk), 1, 0
    )
    results = jax.lax.map(lambda part: score(*part), (x_kbcd, target_ids_kbc))
    return jax.tree.map(
        lambda of_kbc: jnp.moveaxis(of_kbc, 0, 1).reshape(batch, -1)[:, :places], results
    )
