"""Attention by JAX's flash attention for TPUs ("splash"): within segments, and with shared prompts.

Called by `attention`, on one device's rows and heads. Imports Pallas, which takes about as long as
importing JAX, so `attention` imports this file only where a kernel is wanted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas

from uirl_jax.errors import ModelError

# At most this many tokens in a tile of the kernel: its float32 scores then take 1 MiB of the
# 16 MiB of VMEM that a kernel may use.
_BLOCK = 512
_LANES = 128  # tiles are multiples of it

_COLUMN_BITS = 15  # of one of the two columns that are in one int32: see _columns
MAX_SHARED_TOKENS = 2**_COLUMN_BITS  # of a row with shared prompts, padding included


def attend(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    q_ids_bt: jax.Array,
    kv_ids_bs: jax.Array,
    *,
    first: int | None,
    interpret: bool,
) -> jax.Array:
    """Attention of queries to keys of the same id; memory linear in T and S, forward and backward.

    Args:
      first: query t attends to keys 0 ... first + t; None: to all keys.
    Returns: [B,T,N,H] in q's dtype.

    Source: jax.experimental.pallas.ops.tpu.splash_attention.
    """
    tokens, heads = q_btnh.shape[1:3]
    (q_padding, q_block), (kv_padding, kv_block) = (
        _padding_and_block(x.shape[1]) for x in (q_btnh, k_bskh)
    )
    shape = (tokens + q_padding, k_bskh.shape[1] + kv_padding)
    mask = pallas.FullMask(shape) if first is None else pallas.CausalMask(shape, offset=first)
    kernel = _make_kernel(mask, heads, q_block, kv_block, interpret)
    out_bnth: Any = jax.vmap(kernel)(
        _kernel_layout(_scaled(q_btnh), q_padding),
        _kernel_layout(k_bskh, kv_padding),
        _kernel_layout(v_bskh, kv_padding),
        pallas.SegmentIds(_pad_ids(q_ids_bt, q_padding), _pad_ids(kv_ids_bs, kv_padding)),
    )
    return out_bnth.transpose(0, 2, 1, 3)[:, :tokens]


def attend_with_prefix(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    prefix_segments_bt: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """Causal attention to the own segment and to the prefix segment, in one softmax.

    The kernel compares one id of a query with one id of a key, so the keys are given twice: first
    under their segment, then under their prefix segment. The query's id is its prefix segment. It
    finds the prefix in the first half, and in the second half its own segment, among others with
    the same prefix. The columns where a query's own segment starts and where it stands then decide.
    Of a prompt and two sequences after it, the last query (id 1, segment from column 4, column 5):

        column                0 1 2 3 4 5   0 1 2 3 4 5
        segment               1 1 2 2 3 3
        prefix                1 1 1 1 1 1
        id of the key         1 1 2 2 3 3   1 1 1 1 1 1
        column of the prefix  x x x x . .   . . . . . .     before its own segment
        column of its own     . . . . . .   . . . . x x     from its start to itself
        attended to           x x . . . .   . . . . x x

    A segment that is its own prefix finds nothing in the first half, so no key counts twice. The
    kernel skips tiles that hold nothing to attend to, so a row costs what its prompts and sequences
    cost, not what all of its tokens would against each other. Gradients of the halves are added.

    Args:
      segment_ids_bt: int32[B,T], segments contiguous.
      prefix_segments_bt: int32[B,T], one for all tokens of a segment: one before it, or itself.
    Returns: [B,T,N,H] in q's dtype.
    Raises: ModelError: rows of more than MAX_SHARED_TOKENS tokens.

    Source: as `attend`; MaskInfo in splash_attention_mask_info.py, of jax 0.10.2.
    """
    tokens, heads = q_btnh.shape[1:3]
    padding, block = _padding_and_block(tokens)
    width = tokens + padding
    if width > MAX_SHARED_TOKENS:
        raise ModelError(
            f"attention by splash: rows of {tokens} tokens with shared prompts, expected at most "
            f"{MAX_SHARED_TOKENS}; use implementation='auto'"
        )
    segments_bt, prefixes_bt = (_pad_ids(x, padding) for x in (segment_ids_bt, prefix_segments_bt))
    kernel = _make_kernel(_PrefixMask((width, 2 * width)), heads, block, block, interpret)
    start_bt = _starts(segments_bt)
    columns_bt = (jnp.arange(width) << _COLUMN_BITS) | start_bt
    needed_bqk = _needed_tiles(segments_bt, prefixes_bt, start_bt, block)

    def one_row(row: tuple[jax.Array, jax.Array, Any]) -> Any:
        columns_t, needed_qk, arguments = row
        return _for_row(kernel, columns_t, needed_qk)(*arguments)

    k_bksh, v_bksh = (
        jnp.concatenate([_kernel_layout(x_btkh, padding)] * 2, axis=2)
        for x_btkh in (k_btkh, v_btkh)
    )
    ids = pallas.SegmentIds(prefixes_bt, jnp.concatenate([segments_bt, prefixes_bt], axis=1))
    arguments = (_kernel_layout(_scaled(q_btnh), padding), k_bksh, v_bksh, ids)
    # A loop, and not vmap: the tiles to skip are not the same in all rows.
    out_bnth = jax.lax.map(one_row, (columns_bt, needed_bqk, arguments))
    return out_bnth.transpose(0, 2, 1, 3)[:, :tokens]


# ----------------------------------------------------------------------------------------- the mask


@dataclasses.dataclass(frozen=True)
class _PrefixMask(pallas.Mask):
    """What `attend_with_prefix` draws, without the ids.

    It is computed in the kernel, of the columns that `_for_row` puts in the place of q_sequence.
    Which tiles are skipped is said there too: to the kernel's maker every one is needed.
    """

    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.size[0], dtype=np.int32)

    @property
    def mask_function(self) -> Any:
        return self._attended

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (range(n)[part] for n, part in zip(self.size, idx, strict=True))
        return np.broadcast_to(True, (len(rows), len(columns)))

    def _attended(self, columns: jax.Array, key: jax.Array) -> jax.Array:
        start = columns & (MAX_SHARED_TOKENS - 1)
        own, width = columns >> _COLUMN_BITS, self.size[0]
        return (key < start) | ((key >= width + start) & (key <= width + own))


def _starts(segments_bt: jax.Array) -> jax.Array:
    """int32[B,T]: the column where the token's segment starts."""
    index_t = jnp.arange(segments_bt.shape[1])
    is_first_bt = jnp.diff(segments_bt, axis=1, prepend=segments_bt[:, :1]) != 0
    return jax.lax.cummax(jnp.where(is_first_bt, index_t, 0), axis=1)


def _needed_tiles(
    segments_bt: jax.Array, prefixes_bt: jax.Array, start_bt: jax.Array, block: int
) -> jax.Array:
    """bool[B,Q,2Q]: the tiles of queries and keys, given twice, that hold a pair to attend to.

    Some more may be named: of the first half all whose segments lie around a query's prefix.
    """
    batch, tokens = segments_bt.shape
    tiles_bqt = segments_bt.reshape(batch, tokens // block, block)
    first_k = jnp.arange(0, tokens, block)
    lowest_b1k, highest_b1k = tiles_bqt.min(axis=2)[:, None], tiles_bqt.max(axis=2)[:, None]
    prefix_bt1, start_bt1 = prefixes_bt[..., None], start_bt[..., None]
    prefix_btk = (lowest_b1k <= prefix_bt1) & (prefix_bt1 <= highest_b1k)
    prefix_btk &= (first_k < start_bt1) & (prefix_bt1 != segments_bt[..., None])
    prefix_bqk = prefix_btk.reshape(batch, tokens // block, block, -1).any(axis=2)
    # A tile's queries attend within their segments to all from the first one's start to the last.
    own_bqk = (first_k + block > start_bt[:, ::block, None]) & (first_k <= first_k[:, None])
    return jnp.concatenate([prefix_bqk, own_bqk], axis=2)


def _for_row(kernel: Any, columns_t: jax.Array, needed_qk: jax.Array) -> Any:
    """The kernel with the mask of one row in the place of the one that it was made with.

    data_next is the tile of keys (backward for keys: of queries) that is in fast memory while a
    tile is computed or skipped: of a skipped one the last that was needed, which moves nothing.
    """
    infos, options = kernel.tree_flatten()
    forward, dq, dkv = (
        info._replace(
            data_next=_last_needed(needed_qk, axis)[None],
            block_mask=needed_qk.astype(jnp.int8)[None],
            q_sequence=columns_t,
        )
        for info, axis in zip(infos, (1, 1, 0), strict=True)
    )
    return type(kernel)(forward, dq, dkv, **options)


def _last_needed(needed_qk: jax.Array, axis: int) -> jax.Array:
    index_qk = jax.lax.broadcasted_iota(jnp.int32, needed_qk.shape, axis)
    # At most 128 tiles: MAX_SHARED_TOKENS twice, in tiles of 512.
    return jax.lax.cummax(jnp.where(needed_qk, index_qk, 0), axis=axis).astype(jnp.int8)


# --------------------------------------------------------------------------------------- the kernel


def _make_kernel(
    mask: pallas.Mask, heads: int, q_block: int, kv_block: int, interpret: bool
) -> Any:
    return pallas.make_splash_mha(
        pallas.MultiHeadMask([mask] * heads),
        block_sizes=pallas.BlockSizes(
            block_q=q_block,
            block_kv=kv_block,
            block_q_dkv=q_block,
            block_kv_dkv=kv_block,
            block_q_dq=q_block,
            block_kv_dq=kv_block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _padding_and_block(tokens: int) -> tuple[int, int]:
    """Blocks of equal size need the least padding: 1,100 tokens are 3 blocks of 384."""
    blocks = -(-tokens // _BLOCK)
    block = -(-tokens // (blocks * _LANES)) * _LANES
    return blocks * block - tokens, block


def _pad_ids(ids_bt: jax.Array, padding: int) -> jax.Array:
    """A segment of its own: the caller's padding must not attend to the padding added here."""
    return jnp.pad(ids_bt, ((0, 0), (0, padding)), constant_values=-1)


def _kernel_layout(x_btnh: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x_btnh, ((0, 0), (0, padding), (0, 0), (0, 0))).transpose(0, 2, 1, 3)


def _scaled(q_btnh: jax.Array) -> jax.Array:
    return q_btnh * q_btnh.shape[-1] ** -0.5  # the kernel does not scale
