"""Logprobs and entropies of tokens from the last hidden states, without a [B,T,V] array.

Logits are computed at sampled positions only, a chunk at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from uirl_jax.models.lora import AdaptedModel
from uirl_jax.models.sharding import on_a_device

MAX_LOGITS_BYTES = 256 * 2**20  # of float32 logits on a device at a time


def token_logprobs(
    model: AdaptedModel,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
    adapters: bool = True,
) -> jax.Array:
    """float32[B,T]: [:,t] is the logprob of token_ids[:,t] given x[:,t-1]; [:,0] is 0.

    Values at padding and at the first token of a packed segment are finite but meaningless.

    Args:
      sampled_index_bs: int32[B,S], the positions to score, -1 at unused entries; all other
        positions get 0. A row has far fewer sampled tokens than tokens: those of a screenshot are
        never sampled. None scores all positions.
      chunk: positions of a row that are scored at once; float32[B,chunk,V] is the largest array.
        None: as many as fit into MAX_LOGITS_BYTES.
      temperature: of the distribution that was sampled from, as is forbidden_v, so that the result
        is comparable with the logprobs that the engine recorded.
      forbidden_v: bool[V], tokens that were excluded from sampling.
      adapters: False takes the base's logits.
    """
    logprobs_bt, _ = token_logprobs_and_entropies(
        model,
        x_btd,
        token_ids_bt,
        sampled_index_bs,
        chunk=chunk,
        temperature=temperature,
        forbidden_v=forbidden_v,
        adapters=adapters,
        entropies=False,
    )
    return logprobs_bt


def token_logprobs_and_entropies(
    model: AdaptedModel,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
    adapters: bool = True,
    entropies: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """token_logprobs, and the entropy in nats of the distribution of each token.

    Args: as in token_logprobs.
    Returns: two float32[B,T]; the second is None without `entropies`.
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
        logits_bcv = model.logits(x_bcd, adapters=adapters) / temperature
        if forbidden_v is not None:
            logits_bcv = jnp.where(forbidden_v, jnp.finfo(jnp.float32).min, logits_bcv)
        # A comparison instead of a gather: its gradient is elementwise, that of a gather is a
        # scatter over the vocabulary.
        is_target_bcv = target_ids_bc[..., None] == jnp.arange(logits_bcv.shape[-1])
        target_bc = jnp.sum(jnp.where(is_target_bcv, logits_bcv, 0.0), axis=-1)
        total_bc = jax.nn.logsumexp(logits_bcv, axis=-1)
        if not entropies:
            return target_bc - total_bc, None
        mean_bc = jnp.sum(jax.nn.softmax(logits_bcv, axis=-1) * logits_bcv, axis=-1)
        return target_bc - total_bc, total_bc - mean_bc

    scores_bs, entropies_bs = _in_chunks(score, x_bsd, target_ids_bs, chunk)
    # Unused entries point past the end of the row, where writes are dropped.
    index_bs = jnp.where(sampled_index_bs < 0, token_ids_bt.shape[1], sampled_index_bs)

    @jax.vmap  # a row at a time: the compiler gathers all rows for a scatter that names them
    def spread_row(index_s: jax.Array, values_s: jax.Array) -> jax.Array:
        return jnp.zeros(token_ids_bt.shape[1]).at[index_s].add(values_s, mode="drop")

    def spread(values_bs: jax.Array) -> jax.Array:
        return spread_row(index_bs, values_bs)

    return spread(scores_bs), None if entropies_bs is None else spread(entropies_bs)


def _in_chunks(
    score: Callable[..., Any], x_bsd: jax.Array, target_ids_bs: jax.Array, chunk: int
) -> Any:
    """Calls score() on `chunk` positions of all rows at a time; its results are [B,S]."""
    # Recomputed in the backward pass: the saved logits of all chunks would be a [B,S,V] array.
    score = jax.checkpoint(score)
    batch, count = target_ids_bs.shape
    if count <= chunk:
        return score(x_bsd, target_ids_bs)
    chunks = -(-count // chunk)
    chunk = -(-count // chunks)  # chunks of equal size need the least padding
    padding = chunks * chunk - count
    x_kbcd = jnp.moveaxis(
        jnp.pad(x_bsd, ((0, 0), (0, padding), (0, 0))).reshape(batch, chunks, chunk, -1), 1, 0
    )
    target_ids_kbc = jnp.moveaxis(
        jnp.pad(target_ids_bs, ((0, 0), (0, padding))).reshape(batch, chunks, chunk), 1, 0
    )
    results = jax.lax.map(lambda part: score(*part), (x_kbcd, target_ids_kbc))
    return jax.tree.map(
        lambda result_kbc: jnp.moveaxis(result_kbc, 0, 1).reshape(batch, -1)[:, :count], results
    )
