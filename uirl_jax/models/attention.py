"""Softmax attention with grouped heads: over whole rows, over a KV cache, or under any mask.

`attention` serves learner and vision tower, on rows of packed segments; `cached_attention` serves
the engine. Both use the kernel of the platform that the program is compiled for.
`window_attention`, for many short segments, is plain XLA. `masked_attention`, too, is their
fallback and their oracle. Queries and keys are rotated
by the caller; positions play no role here.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from uirl_jax.errors import ModelError
from uirl_jax.models.sharding import AXIS_RULES, partition_spec, platform

# auto: splash on a TPU, cudnn on an NVIDIA GPU, each if it accepts the arrays. Otherwise xla, also
# on several devices without `jax.set_mesh`.
Implementation = Literal["auto", "splash", "cudnn", "xla"]

# masked_attention works on chunks of queries if all scores would exceed this. 512 MiB are 16 heads
# of 2,900 x 2,900 in float32.
_MAX_SCORES_BYTES = 512 * 2**20

# Queries of a block; keys after the block are left out. Time on a CPU for 1,024 tokens, forward and
# backward, relative to a single block: 0.60 with blocks of 512, 0.46 with 256, 0.58 with 128.
_CAUSAL_BLOCK = 256
_MAX_CAUSAL_BLOCKS = 16  # each adds to the compiled program

# Rows of up to so many tokens with shared prompts are plain XLA on a TPU: its scores stay in fast
# memory, and splash computes whole tiles. By the planner, v5e, 2B, a group of 8 behind 1,000
# visual tokens: rows of 1,664 tokens 141 ms against 150 ms; of 30,400 tokens 7.1 s against 3.9 s.
_PLAIN_SHARED_TOKENS = 2048

# Fewer new tokens do not fill a tile of the TPU kernel.
_SPLASH_TOKENS = 128

# (q, k, v, segments, prefix segments or None) -> [B,T,N,H]
_Kernel = Callable[..., jax.Array]


def attention(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    *,
    causal: bool,
    prefix_segments_bt: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Attention within the segments of whole rows; query head n reads kv head n // (N / K).

    The mask is segment_mask; splash never builds it, cudnn builds one for each row.

    Args:
      segment_ids_bt: int32[B,T], at least 0; 0 at padding. A segment is contiguous.
      prefix_segments_bt: int32[B,T], an earlier segment of the row that the token attends to
        besides its own, or its own. None: no token shares a prefix.
      implementation: other than auto for tests. splash is interpreted on other platforms.
    Returns: [B,T,N,H] in q's dtype; scores and softmax in float32.
    Raises: ModelError: cudnn was requested and cannot compute this here.
    """
    if implementation == "auto":
        implementation = _for_platform(q_btnh, prefix_segments_bt)
    if implementation == "xla":
        # Built in every layer: XLA fuses it into the softmax, which was measured to cost no more
        # than reading a mask that was built once.
        mask_bts = segment_mask(segment_ids_bt, prefix_segments_bt, causal=causal)
        k_bkth, v_bkth = (x_btkh.swapaxes(1, 2) for x_btkh in (k_btkh, v_btkh))
        plain = _causal_blocks if causal else masked_attention
        return plain(q_btnh, k_bkth, v_bkth, mask_bts)
    if implementation == "splash":
        if prefix_segments_bt is not None and not causal:
            raise ModelError("attention by splash: shared prompts need causal=True")
        kernel = functools.partial(_splash, causal=causal, interpret=platform() != "tpu")
    else:
        if reason := _why_not_cudnn(q_btnh):
            raise ModelError(f"attention by cudnn: {reason}; use implementation='auto'")
        kernel = functools.partial(_cudnn, causal=causal)
    return _on_every_device(kernel, q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt)


def cached_attention(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    start_b: jax.Array,
    *,
    implementation: Literal["auto", "splash", "xla"] = "auto",
) -> jax.Array:
    """Causal attention of new tokens to the cache before them and to each other.

    Row b's tokens have the cache positions start_b[b] ... start_b[b] + T - 1. auto is splash on a
    TPU if the tokens fill a tile (prefill): XLA would write all T x S scores to HBM and read them
    again. With one token a row (decode) the cache is read once in any case.

    Args:
      k_btkh, v_btkh: of the new tokens.
      k_bksh, v_bksh: of the first S cache positions, [B,K,S,H], new tokens included.
      start_b: int32[B], first cache position of the new tokens; S or more in rows of padding.
    Returns: [B,T,N,H] in q's dtype; scores and softmax in float32. Padding is meaningless.
    """
    tokens, positions = q_btnh.shape[1], k_bksh.shape[2]
    if implementation == "auto":
        fits = tokens >= _SPLASH_TOKENS and _for_platform(q_btnh, None) == "splash"
        implementation = "splash" if fits else "xla"
    if implementation == "xla":
        position_bt = start_b[:, None] + jnp.arange(tokens)
        mask_bts = jnp.arange(positions) <= position_bt[..., None]
        return masked_attention(q_btnh, k_bksh, v_bksh, mask_bts)
    # Keys in two parts, so that the mask does not depend on start_b: the cache, where segment ids
    # hide positions from start_b on, then the new tokens, causal.
    k_bskh, v_bskh = (
        jnp.concatenate([cached.swapaxes(1, 2), new], axis=1)
        for cached, new in ((k_bksh, k_btkh), (v_bksh, v_btkh))
    )
    q_ids_bt = jnp.ones((len(start_b), tokens), jnp.int32)
    before_bs = (jnp.arange(positions) < start_b[:, None]).astype(jnp.int32)
    from uirl_jax.models import splash  # local: see _splash

    kernel = functools.partial(splash.attend, first=positions, interpret=platform() != "tpu")
    kv_ids_bs = jnp.concatenate([before_bs, q_ids_bt], axis=1)
    return _on_every_device(kernel, q_btnh, k_bskh, v_bskh, q_ids_bt, kv_ids_bs)


def window_attention(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    *,
    longest: int,
) -> jax.Array:
    """attention(causal=False) where no segment is longer than `longest`; time linear in T.

    A segment that has a token in one of the row's blocks of `longest` tokens ends within the next
    block and starts within the one before. A block's queries see these three blocks:

        segment 1 1 2 2 2 3 0 0     blocks of 3    1 1 2   queries see        1 1 2 2 2 3
                                                   2 2 3               1 1 2  2 2 3  0 0 .
                                                   0 0 .                             2 2 3 0 0 .

    Args:
      segment_ids_bt: int32[B,T], at least 0; 0 at padding. A segment is contiguous, and at most
        `longest` tokens long; padding may be longer.
    Returns: [B,T,N,H] in q's dtype; scores and softmax in float32.
    """
    batch, tokens = segment_ids_bt.shape
    if tokens <= longest:
        return attention(q_btnh, k_btkh, v_btkh, segment_ids_bt, causal=False, implementation="xla")
    blocks = -(-tokens // longest)
    padding = blocks * longest - tokens

    def padded(x: jax.Array, before: int, after: int, value: int = 0) -> jax.Array:
        widths = ((0, 0), (before, padding + after), *[(0, 0)] * (x.ndim - 2))
        return jnp.pad(x, widths, constant_values=value)

    def neighbours(x: jax.Array, value: int = 0) -> jax.Array:
        """[B * blocks, 3 * longest, ...]: every block behind its left and before its right one."""
        x = padded(x, longest, longest, value)
        x = x.reshape(batch, blocks + 2, longest, *x.shape[2:])
        x = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
        return x.reshape(batch * blocks, 3 * longest, *x.shape[3:])

    q_xtnh = padded(q_btnh, 0, 0).reshape(batch * blocks, longest, *q_btnh.shape[2:])
    q_ids_xt = padded(segment_ids_bt, 0, 0).reshape(batch * blocks, longest)
    # -1 outside the row: padding attends to padding of the row alone, as in segment_mask.
    mask_xts = q_ids_xt[:, :, None] == neighbours(segment_ids_bt, -1)[:, None, :]
    k_xksh, v_xksh = (neighbours(x).swapaxes(1, 2) for x in (k_btkh, v_btkh))
    # The row's last block may be padding of this function: those queries see nothing but their own.
    out_xtnh = masked_attention(q_xtnh, k_xksh, v_xksh, mask_xts)
    return out_xtnh.reshape(batch, blocks * longest, *q_btnh.shape[2:])[:, :tokens]


def segment_mask(
    segment_ids_bt: jax.Array, prefix_segments_bt: jax.Array | None = None, *, causal: bool
) -> jax.Array:
    """bool[B,T,T], True where the query (row) attends to the key (column).

    Padding is segment 0 and attends to padding: every query has a key, so that no softmax is 0 / 0,
    and padding never reaches a token. Two packed sequences and padding, causal:

        segment 1 1 2 2 0
              1 x . . . .
              1 x x . . .
              2 . . x . .
              2 . . x x .
              0 . . . . x

    The same with 1 as the prefix of 2 and 3, [1 1 2 2 3]: a prompt, and two sequences after it.

              1 x . . . .
              1 x x . . .
              2 x x x . .
              2 x x x x .
              3 x x . . x
    """
    mask_bts = segment_ids_bt[:, :, None] == segment_ids_bt[:, None, :]
    if prefix_segments_bt is not None:
        mask_bts |= prefix_segments_bt[:, :, None] == segment_ids_bt[:, None, :]
    if causal:
        index_t = jnp.arange(segment_ids_bt.shape[-1])
        mask_bts &= index_t[:, None] >= index_t
    return mask_bts


# ----------------------------------------------------------------------------------- the platform


def _for_platform(q_btnh: jax.Array, prefix_segments_bt: jax.Array | None) -> Implementation:
    # Chosen while tracing: `jax.lax.platform_dependent` traces every branch (cudnn's needs cuDNN),
    # and the backward pass then saves the residuals of all of them.
    if jax.sharding.get_abstract_mesh().empty and jax.device_count() > 1:
        return "xla"  # a kernel needs the sharding of its arrays, which is unknown without a mesh
    if platform() == "tpu" and q_btnh.dtype in (jnp.bfloat16, jnp.float32):
        from uirl_jax.models import splash  # local: see _splash

        longest = splash.MAX_SHARED_TOKENS
        if prefix_segments_bt is None or _PLAIN_SHARED_TOKENS < q_btnh.shape[1] <= longest:
            return "splash"
        return "xla"
    if platform() == "gpu" and not _why_not_cudnn(q_btnh):
        return "cudnn"
    return "xla"


def _why_not_cudnn(q_btnh: jax.Array) -> str:
    """Why cuDNN's flash attention cannot take these arrays; empty if it can.

    Source: jax/_src/cudnn/fused_attention_stablehlo.py, check_layout and check_is_flash_attention.
    """
    tokens, _, head_dim = q_btnh.shape[1:]
    if platform() != "gpu":
        return f"the platform is {platform()}, expected an NVIDIA GPU"
    if q_btnh.dtype not in (jnp.bfloat16, jnp.float16):
        return f"arrays of {q_btnh.dtype}, expected bfloat16 or float16"
    if head_dim % 8 or head_dim > 128:
        return f"head_dim={head_dim}, expected a multiple of 8 up to 128"
    if tokens % 2:
        return f"rows of {tokens} tokens, expected an even number"
    capability = jax.local_devices(backend="gpu")[0].compute_capability  # AMD's are names: gfx942
    if not capability[0].isdigit() or float(capability) < 8:
        return f"the GPU's compute capability is {capability}, expected NVIDIA's, at least 8.0"
    return ""


def _on_every_device(
    kernel: _Kernel,
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    prefix_segments_bt: jax.Array | None,
) -> jax.Array:
    """Runs the kernel on each device's rows and heads: the compiler cannot partition a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt)
    sizes = dict(mesh.shape)
    heads, kv_heads = q_btnh.shape[2], k_btkh.shape[2]
    parts = math.prod(sizes[name] for name in AXIS_RULES["wide"])
    if heads % parts == 0:
        # E.g. 12 heads with 2 kv heads on 4 devices: every kv head is needed on two of them.
        repeats = math.lcm(kv_heads, parts) // kv_heads
        k_btkh, v_btkh = (jnp.repeat(x, repeats, axis=2) for x in (k_btkh, v_btkh))

    def spec(x: jax.Array, *axes: str | None) -> PartitionSpec:
        return partition_spec(axes, x.shape, sizes)

    q_spec, k_spec, v_spec = (
        spec(x, "batch", None, "wide", None) for x in (q_btnh, k_btkh, v_btkh)
    )
    ids_spec = spec(
        segment_ids_bt, "batch", None
    )  # and of prefix segments or key ids: only the batch is sharded
    # Pallas does not report along which mesh axes a kernel's result varies: no check_vma.
    return jax.shard_map(
        kernel,
        in_specs=(q_spec, k_spec, v_spec, ids_spec, ids_spec),
        out_specs=q_spec,
        check_vma=False,
    )(q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt)


# ------------------------------------------------------------------------------ the implementations


def _splash(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    prefix_segments_bt: jax.Array | None,
    *,
    causal: bool,
    interpret: bool,
) -> jax.Array:
    """attention() by JAX's flash attention for TPUs."""
    from uirl_jax.models import splash  # local: it imports Pallas, which only a TPU needs

    if prefix_segments_bt is not None:
        return splash.attend_with_prefix(
            q_btnh, k_btkh, v_btkh, segment_ids_bt, prefix_segments_bt, interpret=interpret
        )
    first = 0 if causal else None
    ids_bt = segment_ids_bt
    return splash.attend(q_btnh, k_btkh, v_btkh, ids_bt, ids_bt, first=first, interpret=interpret)


def _cudnn(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_ids_bt: jax.Array,
    prefix_segments_bt: jax.Array | None,
    *,
    causal: bool,
) -> jax.Array:
    """attention() by cuDNN's flash attention.

    cuDNN's packed layout needs the number of segments at compile time, so segments are passed as a
    mask: JAX turns it into a bias of q's dtype, shared by the heads, and always computes its
    gradient. That is 4 bytes per query and key: 268 MB for a row of 8,192 tokens, where the scores
    of 12 heads would take 3.2 GB. With is_causal cuDNN skips the upper half.
    """
    mask_b1ts = segment_mask(segment_ids_bt, prefix_segments_bt, causal=False)[:, None]
    return jax.nn.dot_product_attention(
        q_btnh, k_btkh, v_btkh, mask=mask_b1ts, is_causal=causal, implementation="cudnn"
    )


def _causal_blocks(
    q_btnh: jax.Array, k_bkth: jax.Array, v_bkth: jax.Array, mask_btt: jax.Array
) -> jax.Array:
    """masked_attention() with a causal mask: up to half of the scores are never computed."""
    batch, tokens, heads, _ = q_btnh.shape
    block = max(_CAUSAL_BLOCK, -(-tokens // _MAX_CAUSAL_BLOCKS))
    # Above the limit masked_attention works in chunks, which blocks would circumvent: a backward
    # pass holds the scores of all blocks.
    if tokens <= block or 4 * batch * heads * tokens * tokens > _MAX_SCORES_BYTES:
        return masked_attention(q_btnh, k_bkth, v_bkth, mask_btt)
    ends = [min(first + block, tokens) for first in range(0, tokens, block)]
    out = [
        masked_attention(
            q_btnh[:, first:end],
            k_bkth[:, :, :end],
            v_bkth[:, :, :end],
            mask_btt[:, first:end, :end],
        )
        for first, end in zip(range(0, tokens, block), ends, strict=True)
    ]
    return jnp.concatenate(out, axis=1)


def masked_attention(
    q_btnh: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bts: jax.Array,
    *,
    softcap: float | None = None,
) -> jax.Array:
    """Attention under any mask, in plain XLA; query head n reads kv head n // (N / K).

    Args:
      k_bksh, v_bksh: [B,K,S,H].
      mask_bts: bool[B,T,S], True where a query attends to a key; every query needs at least one.
      softcap: scores become softcap * tanh(scores / softcap); None: they stay.
    Returns: [B,T,N,H] in q's dtype; scores and softmax in float32.
    """
    batch, tokens, heads, _ = q_btnh.shape
    keys = k_bksh.shape[2]
    chunks = -(-4 * batch * heads * tokens * keys // _MAX_SCORES_BYTES)
    if chunks > 1 and tokens > 1:
        return _attend_in_chunks(q_btnh, k_bksh, v_bksh, mask_bts, softcap, min(chunks, tokens))
    return _attend(q_btnh, k_bksh, v_bksh, mask_bts, softcap)


def _attend(
    q_btnh: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bts: jax.Array,
    softcap: float | None,
) -> jax.Array:
    """masked_attention() with all scores at once."""
    batch, tokens, heads, head_dim = q_btnh.shape
    kv_heads, keys = k_bksh.shape[1:3]
    # The heads of a group are stacked along the queries: one matrix product per kv head, and no key
    # is repeated.
    group = heads // kv_heads
    q_bkgth = q_btnh.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q_bkmh = (q_bkgth * head_dim**-0.5).reshape(batch, kv_heads, group * tokens, head_dim)
    scores_bkms = jnp.einsum("bkmh,bksh->bkms", q_bkmh, k_bksh, preferred_element_type=jnp.float32)
    scores_bkgts = scores_bkms.reshape(batch, kv_heads, group, tokens, keys)
    if softcap is not None:
        scores_bkgts = softcap * jnp.tanh(scores_bkgts / softcap)
    scores_bkgts = jnp.where(mask_bts[:, None, None], scores_bkgts, jnp.finfo(jnp.float32).min)
    weights_bkgts = jax.nn.softmax(scores_bkgts, axis=-1).astype(v_bksh.dtype)
    weights_bkms = weights_bkgts.reshape(batch, kv_heads, group * tokens, keys)
    out_bkmh = jnp.einsum("bkms,bksh->bkmh", weights_bkms, v_bksh)
    out_bkgth = out_bkmh.reshape(batch, kv_heads, group, tokens, head_dim)
    return out_bkgth.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, head_dim)


def _attend_in_chunks(
    q_btnh: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bts: jax.Array,
    softcap: float | None,
    chunks: int,
) -> jax.Array:
    """masked_attention() in chunks of queries, each recomputed in the backward pass."""
    tokens = q_btnh.shape[1]
    size = -(-tokens // chunks)
    padding = chunks * size - tokens
    q_btnh = jnp.pad(q_btnh, ((0, 0), (0, padding), (0, 0), (0, 0)))
    # Padded queries attend to all keys: their result is dropped but must not be 0 / 0.
    mask_bts = jnp.pad(mask_bts, ((0, 0), (0, padding), (0, 0)), constant_values=True)

    def split(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array.reshape(array.shape[0], chunks, size, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend(chunk[0], k_bksh, v_bksh, chunk[1], softcap)

    out_cbtnh = jax.lax.map(attend, (split(q_btnh), split(mask_bts)))
    out_btnh = jnp.moveaxis(out_cbtnh, 0, 1).reshape(q_btnh.shape)
    return out_btnh[:, :tokens]
