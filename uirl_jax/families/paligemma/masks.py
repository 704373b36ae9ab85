"""Which tokens see which: a context's see each other, what is sampled sees all before it.

Ten tokens, a context c of five and three sampled s behind it, in a row of the learner (` ` apart):

    turn_ids  0 0 0 0 0 1 1 1
          c   x x x x x . . .
          c   x x x x x . . .
          ...
          s   x x x x x x . .
          s   x x x x x x x .

In the layers with a sliding window what is sampled sees less; a context still sees all of itself.

Source: arXiv:2407.07726, figure 2; transformers, masking_utils.blockwise_overlay, which is put over
the causal mask and over the sliding one alike.
"""

import jax
import jax.numpy as jnp

from uirl_jax.families.border import TokenRows


def row_mask(rows: TokenRows, window: jax.Array | int) -> jax.Array:
    """bool[B,T,T], True where the query (row) sees the key (column).

    What was not sampled is context. Sequences that share a prompt each begin with a copy of its
    last token (types.TrainBatch). The prompt sees one of them, the first, which stands right behind
    it; all copies see the same and hold the same:

        segment  1 1 2 2 3 3
        turn     0 0 0 1 0 2
              1  x x x . . .
              1  x x x . . .
              2  x x x . . .
              2  x x x x . .
              3  x x . . x .
              3  x x . . x x

    Args:
      rows: one turn a segment.
      window: tokens that a sampled token sees, itself included.
    """
    segment_bt = rows.segment_ids_bt
    prefix_bt = segment_bt if rows.prefix_segments_bt is None else rows.prefix_segments_bt
    is_context_bt = jnp.ones(segment_bt.shape, bool)
    if rows.turn_ids_bt is not None:
        is_context_bt = rows.turn_ids_bt == 0
    index_t = jnp.arange(segment_bt.shape[-1])
    position_bt = rows.positions_abt[0]

    def pairs(query_bt: jax.Array, key_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        return query_bt[:, :, None], key_bt[:, None, :]

    query, key = pairs(position_bt, position_bt)
    is_before = (index_t[:, None] >= index_t) & (query - key < window)
    query, key = pairs(is_context_bt, is_context_bt)
    both_context = query & key
    query, key = pairs(segment_bt, segment_bt)
    query_prefix, key_prefix = pairs(prefix_bt, prefix_bt)
    mask_bts = ((query == key) | (query_prefix == key)) & (is_before | both_context)
    before_bt = jnp.pad(segment_bt, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_first_copy_bt = (prefix_bt != segment_bt) & (before_bt == prefix_bt)
    return mask_bts | ((query == key_prefix) & both_context & is_first_copy_bt[:, None, :])


def cache_mask(
    start_b: jax.Array,
    prefix_b: jax.Array | None,
    *,
    tokens: int,
    span: int,
    window: jax.Array | int,
) -> jax.Array:
    """bool[B,T,S] of new tokens at the cache positions start_b[b] ... start_b[b] + T - 1.

    Args:
      prefix_b: as in border.Model.extend; None: no new token is of a context.
      tokens, span: T and S.
      window: as in row_mask.
    """
    position_bt1 = (start_b[:, None] + jnp.arange(tokens))[..., None]
    key_s = jnp.arange(span)
    mask_bts = (key_s <= position_bt1) & (position_bt1 - key_s < window)
    if prefix_b is None:
        return mask_bts
    prefix_b11 = prefix_b[:, None, None]
    return mask_bts | ((position_bt1 < prefix_b11) & (key_s < prefix_b11))
