"""The decoder that most families share: pre-norm grouped-query attention, a gated MLP, RMSNorm.

Llama, Mistral, Qwen's and Gemma's text towers differ from it only in sizes, biases, norms, the
gate's activation and rotary angles. A family passes the angles of its positions; visual tokens
replace embeddings, and may have vectors for the residual stream after the first blocks besides
(DeepStack, arXiv:2406.04334). Attention is causal unless the family brings its own (`Attend`).
Blocks are stacked and run by `blocks.through`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models import kv_cache, layers
from uirl_jax.models.attention import attention, cached_attention
from uirl_jax.models.blocks import Remat, layer_keys, stack, through
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain, platform, visual_parts
from uirl_jax.models.token_rows import TrainedRows
from uirl_jax.models.weight_table import WeightTable

# (q_btnh, k_bksh, v_bksh, layer) -> attended [B,T,N,H]; a family's own mask and scores.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | int], jax.Array]
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": layers.gelu_tanh}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, named as in Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every head's queries and keys, before they are rotated
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate
    norms_from_one: bool = False  # norms multiply by 1 + scale (Gemma)
    output_norms: bool = False  # what attention and MLP add is normed, too (Gemma 2)
    embedding_scale: float = 1.0  # of token embeddings; visual tokens are not scaled

    @classmethod
    def from_config(cls, cfg: Any, **features: Any) -> "DecoderConfig":
        """The sizes of a family's config, which names them alike, with these features."""
        sizes = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
            *("rms_norm_eps", "initializer_range", "tie_word_embeddings"),
        )
        return cls(**{name: getattr(cfg, name) for name in sizes}, **features)


class Rotary(NamedTuple):
    """cos and sin of every token, float32[B,T,H/2]: computed once, used by every block."""

    cos_bth: jax.Array
    sin_bth: jax.Array


class VisualLevels(NamedTuple):
    """Vectors that visual tokens add to the residual stream after blocks 0, 1, ...

    A row of the table is what stands in place of the token's embedding, then a vector for each of
    the first blocks, K in all: [embedding | after block 0 | after block 1 | ...].
    """

    visual_me: jax.Array  # [M,E], E = (1 + K) D
    vision_index_bt: jax.Array  # int32, -1 at ordinary tokens

    def added(
        self, x_btd: jax.Array, layer: jax.Array | int, *, in_parts: bool = False
    ) -> jax.Array:
        """x_btd with the vectors for `layer`, which belong after its block.

        They are looked up when they are added: looked up before the blocks, those of 8,192 tokens
        of 4,096 bfloat16 would take 201 MB until the backward pass ends.

        Args: in_parts: these are whole rows, see border.Model.hidden.
        """
        dim = x_btd.shape[-1]
        levels = self.visual_me.shape[-1] // dim - 1
        if levels == 0:
            return x_btd

        def add(x_btd: jax.Array) -> jax.Array:
            parts = visual_parts(len(x_btd), len(self.visual_me)) if in_parts else 1
            level_btd = layers.lookup_columns(
                self.visual_me, self.vision_index_bt, (1 + layer) * dim, dim, parts=parts
            )
            is_visual_bt1 = (self.vision_index_bt >= 0)[..., None]
            summed_btd = jnp.where(is_visual_bt1, x_btd + level_btd.astype(x_btd.dtype), x_btd)
            return constrain(summed_btd, "batch", None, None)

        if isinstance(layer, int):
            return add(x_btd) if layer < levels else x_btd
        # A branch, and not a sum with zeros: later blocks neither read the table nor write x again.
        return jax.lax.cond(layer < levels, add, lambda x_btd: x_btd, x_btd)


class DecoderBlock(nnx.Module):
    """Pre-norm grouped-query attention, then a gated MLP."""

    def __init__(
        self,
        cfg: DecoderConfig,
        *,
        lora: LoraConfig | None,
        table: WeightTable,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim, q_dim = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
        kv_dim, bias = cfg.num_key_value_heads * cfg.head_dim, cfg.qkv_bias
        norm = functools.partial(
            layers.RMSNorm,
            dim,
            eps=cfg.rms_norm_eps,
            param_dtype=param_dtype,
            from_one=cfg.norms_from_one,
        )
        linear = functools.partial(
            adapted_linear, lora=lora, table=table, rngs=rngs, param_dtype=param_dtype
        )
        self.input_norm = norm()
        self.q_proj = linear("q_proj", dim, q_dim, use_bias=bias)
        self.k_proj = linear("k_proj", dim, kv_dim, use_bias=bias)
        self.v_proj = linear("v_proj", dim, kv_dim, use_bias=bias)
        self.o_proj = linear("o_proj", q_dim, dim, axes=("wide", None))
        # Before the MLP; with output norms of what attention adds, as Gemma 2 names its norms.
        self.post_attention_norm = norm()
        self.mlp_norm = norm() if cfg.output_norms else None
        self.post_mlp_norm = norm() if cfg.output_norms else None
        self.gate_proj = linear("gate_proj", dim, cfg.intermediate_size)
        self.up_proj = linear("up_proj", dim, cfg.intermediate_size)
        self.down_proj = linear("down_proj", cfg.intermediate_size, dim, axes=("wide", None))
        self.head_dim, self.activation = cfg.head_dim, cfg.activation
        head_norm = functools.partial(
            layers.RMSNorm, cfg.head_dim, eps=cfg.rms_norm_eps, param_dtype=param_dtype
        )
        self.q_norm = head_norm() if cfg.qk_norm else None
        self.k_norm = head_norm() if cfg.qk_norm else None

    def qkv(
        self,
        x_btd: jax.Array,
        rotary: Rotary,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B,T,N,H] and keys, and values [B,T,K,H]."""
        h_btd = self.input_norm(x_btd)
        q_key, k_key, v_key = split_key(dropout_key, 3)

        def heads(projection: Linear, key: jax.Array | None) -> jax.Array:
            y = projection(h_btd, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q_btnh, k_btkh = heads(self.q_proj, q_key), heads(self.k_proj, k_key)
        if self.q_norm is not None and self.k_norm is not None:
            q_btnh, k_btkh = self.q_norm(q_btnh), self.k_norm(k_btkh)
        q_btnh, k_btkh = layers.rotate(q_btnh, *rotary), layers.rotate(k_btkh, *rotary)
        return q_btnh, k_btkh, heads(self.v_proj, v_key)

    def finish(
        self,
        x_btd: jax.Array,
        attended_btnh: jax.Array,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Output projection and MLP, each added to the residual stream."""
        o_key, gate_key, up_key, down_key = split_key(dropout_key, 4)
        attended_bte = attended_btnh.reshape(*x_btd.shape[:2], -1)
        added_btd = self.o_proj(attended_bte, adapters=adapters, dropout_key=o_key)
        if self.mlp_norm is None:
            x_btd = x_btd + added_btd
            h_btd = self.post_attention_norm(x_btd)
        else:
            x_btd = x_btd + self.post_attention_norm(added_btd)
            h_btd = self.mlp_norm(x_btd)
        gate_btf = self.gate_proj(h_btd, adapters=adapters, dropout_key=gate_key)
        gate_btf = _ACTIVATIONS[self.activation](gate_btf)
        up_btf = self.up_proj(h_btd, adapters=adapters, dropout_key=up_key)
        added_btd = self.down_proj(gate_btf * up_btf, adapters=adapters, dropout_key=down_key)
        if self.post_mlp_norm is not None:
            added_btd = self.post_mlp_norm(added_btd)
        x_btd = x_btd + added_btd
        return constrain(x_btd, "batch", None, None)


class Decoder(nnx.Module):
    """Token embeddings, blocks, final norm, and a head unless it is tied to the embeddings.

    The adapters may include rows of the embeddings and of the head (`token_rows`).

    Args:
      table: of the family; maps the targets of `lora` to projections.
      compute_dtype: of activations.
      remat: what the backward pass keeps of a block.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        *,
        lora: LoraConfig | None,
        table: WeightTable,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        compute_dtype: jnp.dtype,
        remat: Remat,
    ) -> None:
        self.compute_dtype, self.depth = compute_dtype, cfg.num_hidden_layers
        self.remat: Remat = remat
        self.embedding_scale = cfg.embedding_scale
        embedding_vd = cfg.initializer_range * jax.random.normal(
            rngs.params(), (cfg.vocab_size, cfg.hidden_size), jnp.float32
        )
        self.embedding = nnx.Param(embedding_vd.astype(param_dtype))
        self.blocks = stack(
            lambda key: DecoderBlock(
                cfg, lora=lora, table=table, rngs=nnx.Rngs(key), param_dtype=param_dtype
            ),
            cfg.num_hidden_layers,
            rngs,
        )
        self.final_norm = layers.RMSNorm(
            cfg.hidden_size,
            eps=cfg.rms_norm_eps,
            param_dtype=param_dtype,
            from_one=cfg.norms_from_one,
        )
        self.lm_head = (
            None
            if cfg.tie_word_embeddings
            else Linear(
                cfg.hidden_size,
                cfg.vocab_size,
                axes=(None, "vocab"),
                rngs=rngs,
                param_dtype=param_dtype,
            )
        )
        ids = () if lora is None else lora.token_ids
        self.embedding_rows = TrainedRows(ids, self.embedding[...]) if ids else None
        self.head_rows = (
            TrainedRows(ids, self.lm_head.kernel[...].T)
            if ids and self.lm_head is not None
            else None
        )

    def embed(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        *,
        in_parts: bool = False,
        adapters: bool = True,
    ) -> jax.Array:
        """x_btd: token embeddings, with rows of visual_md where vision_index is not -1.

        Of wider rows (`VisualLevels`) the first D columns.

        Args:
          in_parts: these are whole rows, see border.Model.hidden.
          adapters: False takes the base's rows of all tokens.
        """
        embedding_vd = constrain(self.embedding[...], "vocab", None)
        x_btd = layers.lookup(embedding_vd, token_ids_bt).astype(self.compute_dtype)
        if adapters and self.embedding_rows is not None:
            x_btd = self.embedding_rows.embedded(x_btd, token_ids_bt)
        if self.embedding_scale != 1:
            x_btd = x_btd * jnp.asarray(self.embedding_scale, x_btd.dtype)
        if visual_md is not None and vision_index_bt is not None:
            parts = visual_parts(len(vision_index_bt), len(visual_md)) if in_parts else 1
            visual_btd = layers.lookup_columns(
                visual_md, vision_index_bt, 0, x_btd.shape[-1], parts=parts
            )
            is_visual_bt1 = (vision_index_bt >= 0)[..., None]
            x_btd = jnp.where(is_visual_bt1, visual_btd.astype(x_btd.dtype), x_btd)
        return constrain(x_btd, "batch", None, None)

    def rows(
        self,
        x_btd: jax.Array,
        rotary: Rotary,
        segment_ids_bt: jax.Array,
        prefix_segments_bt: jax.Array | None = None,
        visual: VisualLevels | None = None,
        *,
        attend: Attend | None = None,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Whole rows through the blocks, causal within a segment and the prefix that it shares.

        Args:
          visual: what visual tokens add after the first blocks; None: nothing.
          attend: attention, in place of that; the segments are then not read.
        Returns: x_btd before the final norm and, with `collect`, [L,B,T,D] after every block.
        """

        def body(
            x_btd: jax.Array, at: tuple[DecoderBlock, jax.Array | None, jax.Array]
        ) -> tuple[jax.Array, jax.Array | None]:
            block, key, layer = at
            qkv_key, finish_key = split_key(key, 2)
            q_btnh, k_btkh, v_btkh = block.qkv(
                x_btd, rotary, adapters=adapters, dropout_key=qkv_key
            )
            if attend is not None:
                k_bkth, v_bkth = k_btkh.swapaxes(1, 2), v_btkh.swapaxes(1, 2)
                attended_btnh = attend(q_btnh, k_bkth, v_bkth, layer)
            else:
                attended_btnh = attention(
                    q_btnh,
                    k_btkh,
                    v_btkh,
                    segment_ids_bt,
                    causal=True,
                    prefix_segments_bt=prefix_segments_bt,
                )
            x_btd = block.finish(x_btd, attended_btnh, adapters=adapters, dropout_key=finish_key)
            x_btd = x_btd if visual is None else visual.added(x_btd, layer, in_parts=True)
            return x_btd, x_btd if collect else None

        stacked = (self.blocks, layer_keys(dropout_key, self.depth), jnp.arange(self.depth))
        return through(body, x_btd, stacked, self.remat)

    def extend(
        self,
        x_btd: jax.Array,
        rotary: Rotary,
        cache: KVCache,
        start_b: jax.Array,
        *,
        slot_b: jax.Array | None,
        span: int | None,
        blocks: Sequence[DecoderBlock] | None,
        visual: VisualLevels | None = None,
        attend: Attend | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the rows' next tokens into the cache and runs the blocks on them.

        Row b's tokens take the cache positions start_b[b] ... start_b[b] + T - 1 of its slot, each
        attending to the positions up to its own. Prefill: rows are padded on the right; what
        padding writes lies after the row's last token and is masked until overwritten. Decode:
        T = 1.

        Args: as in families.border.Model.extend, and `visual` and `attend` as in `rows`; S are
          the span's positions.
        Returns: x_btd after the final norm, and the cache (donate the old one).
        """
        span = span or cache.positions

        def body(
            carry: tuple[jax.Array, KVCache, jax.Array | int], block: DecoderBlock
        ) -> tuple[tuple[jax.Array, KVCache, Any], None]:
            # The cache is carried, not scanned over: a step then writes T positions in place. As an
            # output of the scan it would be copied whole.
            x_btd, cache, layer = carry
            q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary)
            cache = kv_cache.write(cache, layer, slot_b, start_b, k_btkh, v_btkh)
            k_bksh, v_bksh = kv_cache.read(cache, layer, slot_b, span, q_btnh.dtype)
            if attend is not None:
                attended_btnh = attend(q_btnh, k_bksh, v_bksh, layer)
            else:
                attended_btnh = cached_attention(q_btnh, k_btkh, v_btkh, k_bksh, v_bksh, start_b)
            x_btd = block.finish(x_btd, attended_btnh)
            x_btd = x_btd if visual is None else visual.added(x_btd, layer)
            return (x_btd, cache, layer + 1), None

        if blocks is None:
            carry = (x_btd, cache, jnp.int32(0))
            (x_btd, cache, _), _ = jax.lax.scan(body, carry, cast(Any, self.blocks))
        else:
            for layer, block in enumerate(blocks):
                (x_btd, cache, _), _ = body((x_btd, cache, layer), block)
        return self.final_norm(x_btd), cache

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array:
        """float32[B,T,V]. Score whole rows with scoring.token_logprobs, which chunks them.

        Args: adapters: False takes the base's rows of all tokens.
        """
        if x_btd.shape[:2] == (1, 1) and x_btd.dtype == jnp.bfloat16 and platform() == "cpu":
            # XLA multiplies a single row by converting the whole table to float32: 891 MiB and
            # 260 ms for 151,936 x 1,536 on two cores; two rows take 1 MiB and 32 ms.
            return self.logits(jnp.repeat(x_btd, 2, axis=0), adapters=adapters)[:1]
        if self.lm_head is not None:
            kernel_dv = constrain(self.lm_head.kernel[...].astype(x_btd.dtype), None, "vocab")
            logits_btv = jnp.einsum(
                "btd,dv->btv", x_btd, kernel_dv, preferred_element_type=jnp.float32
            )
        else:
            embedding_vd = constrain(self.embedding[...].astype(x_btd.dtype), "vocab", None)
            logits_btv = jnp.einsum(
                "btd,vd->btv", x_btd, embedding_vd, preferred_element_type=jnp.float32
            )
        logits_btv = constrain(logits_btv, "batch", None, "vocab")
        rows = self.embedding_rows if self.lm_head is None else self.head_rows
        return rows.scored(logits_btv, x_btd) if adapters and rows is not None else logits_btv


def init_cache(cfg: DecoderConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: k and v, [L,C,K,S,H] of C slots with S positions; dtype int8 adds scales."""
    return kv_cache.init(
        cfg.num_hidden_layers, slots, positions, cfg.num_key_value_heads, cfg.head_dim, dtype
    )
