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
    kernel computes twice the products of `attend`; gradients of the two halves are added.

    Args:
      segment_ids_bt: int32[B,T], segments contiguous.
      prefix_segments_bt: int32[B,T], one for all tokens of a segment: one before it, or itself.
    Returns: [B,T,N,H] in q's dtype.
    Raises: ModelError: rows of more than MAX_SHARED_TOKENS tokens.
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

    def one_row(
        q_nth: jax.Array, k_ksh: jax.Array, v_ksh: jax.Array, ids: Any, columns_t: jax.Array
    ) -> Any:
        return _with_columns(kernel, columns_t)(q_nth, k_ksh, v_ksh, ids)

    k_bksh, v_bksh = (
        jnp.concatenate([_kernel_layout(x_btkh, padding)] * 2, axis=2)
        for x_btkh in (k_btkh, v_btkh)
    )
    out_bnth = jax.vmap(one_row)(
        _kernel_layout(_scaled(q_btnh), padding),
        k_bksh,
        v_bksh,
        pallas.SegmentIds(prefixes_bt, jnp.concatenate([segments_bt, prefixes_bt], axis=1)),
        _columns(segments_bt),
    )
    return out_bnth.transpose(0, 2, 1, 3)[:, :tokens]


# ----------------------------------------------------------------------------------------- the mask


@dataclasses.dataclass(frozen=True)
class _PrefixMask(pallas.Mask):
    """What `attend_with_prefix` draws, without the ids.

    `__getitem__` is asked while tracing, for the tiles that the kernel skips: those after the
    query, in either half. `mask_function` is computed in the kernel, of the columns that
    `_with_columns` puts in the place of q_sequence.
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
        rows, columns = (np.arange(n)[part] for n, part in zip(self.size, idx, strict=True))
        return rows[:, None] >= columns % self.size[0]

    def _attended(self, columns: jax.Array, key: jax.Array) -> jax.Array:
        start = columns & (MAX_SHARED_TOKENS - 1)
        own, width = columns >> _COLUMN_BITS, self.size[0]
        return (key < start) | ((key >= width + start) & (key <= width + own))


def _columns(segments_bt: jax.Array) -> jax.Array:
    """int32[B,T]: the column where a token's segment starts, and its own, in one number."""
    index_bt = jnp.broadcast_to(jnp.arange(segments_bt.shape[1]), segments_bt.shape)
    starts_bt = jnp.diff(segments_bt, axis=1, prepend=segments_bt[:, :1]) != 0
    start_bt = jax.lax.cummax(jnp.where(starts_bt, index_bt, 0), axis=1)
    return (index_bt << _COLUMN_BITS) | start_bt


def _with_columns(kernel: Any, columns_t: jax.Array) -> Any:
    """The kernel for one row: its q_sequence, a constant of the mask, becomes the row's own."""
    infos, options = kernel.tree_flatten()
    return type(kernel)(*(info._replace(q_sequence=columns_t) for info in infos), **options)


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
