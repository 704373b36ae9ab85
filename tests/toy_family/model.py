"""The toy in NNX: a linear layer over patches, and a decoder of the package's shared pieces."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.toy_family.config import ToyConfig
from tests.toy_family.inputs import PATCH_PX
from tests.toy_family.names import WEIGHTS
from uirl_jax.families.border import TokenRows
from uirl_jax.models import kv_cache, layers
from uirl_jax.models.attention import attention, cached_attention
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import LoraConfig, adapted_linear, split_key

_Angles = tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """Pre-norm attention, then an MLP."""

    def __init__(self, cfg: ToyConfig, linear: Any, norm: Any) -> None:
        wide = cfg.num_attention_heads * cfg.head_dim
        self.norm1, self.norm2, self.head_dim = norm(), norm(), cfg.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            linear(name, cfg.hidden_size, wide) for name in ("q_proj", "k_proj", "v_proj")
        )
        self.o_proj = linear("o_proj", wide, cfg.hidden_size, axes=("wide", None))
        self.up_proj = linear("up_proj", cfg.hidden_size, cfg.intermediate_size)
        self.down_proj = linear(
            "down_proj", cfg.intermediate_size, cfg.hidden_size, axes=("wide", None)
        )

    def qkv(self, x_btd: jax.Array, angles: _Angles, **options: Any) -> tuple[jax.Array, ...]:
        h_btd = self.norm1(x_btd)
        q, k, v = (
            projection(h_btd, **options).reshape(*x_btd.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return layers.rotate(q, *angles), layers.rotate(k, *angles), v

    def finish(self, x_btd: jax.Array, attended_btnh: jax.Array, **options: Any) -> jax.Array:
        x_btd = x_btd + self.o_proj(attended_btnh.reshape(*x_btd.shape[:2], -1), **options)
        wide_btf = jax.nn.gelu(self.up_proj(self.norm2(x_btd), **options))
        return x_btd + self.down_proj(wide_btf, **options)


class Part(nnx.Module):
    """A named part of the model."""


class Toy(nnx.Module):
    """See border.Model."""

    def __init__(
        self,
        cfg: ToyConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        remat: Remat = "none",
    ) -> None:
        self.cfg, self.lora, self.remat = cfg, lora, remat
        linear = functools.partial(
            adapted_linear, lora=lora, table=WEIGHTS, rngs=rngs, param_dtype=param_dtype
        )
        norm = functools.partial(
            layers.RMSNorm, cfg.hidden_size, eps=1e-6, param_dtype=param_dtype
        )
        self.visual, self.text = Part(), Part()
        self.visual.patches = linear("patches", 3 * PATCH_PX**2, cfg.hidden_size)
        embedding_vd = jax.random.normal(rngs.params(), (cfg.vocab_size, cfg.hidden_size))
        self.text.embedding = nnx.Param(0.2 * embedding_vd.astype(param_dtype))
        self.text.final_norm = norm()
        self.text.blocks = stack(
            lambda key: Block(cfg, functools.partial(linear, rngs=nnx.Rngs(key)), norm),
            cfg.num_hidden_layers,
            rngs,
        )

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        pixels_ipc = vision["patches_ipc"].astype(self.text.embedding.dtype) / 127.5 - 1
        x_ipd = self.visual.patches(pixels_ipc, adapters=adapters, dropout_key=dropout_key)
        return x_ipd.reshape(-1, self.cfg.hidden_size)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        x_btd = self._embed(rows.token_ids_bt, visual_md, rows.vision_index_bt)
        angles = self._angles(rows.positions_abt)

        def body(x_btd: jax.Array, layer: tuple[Block, Any]) -> tuple[jax.Array, None]:
            block, key = layer
            first, second = split_key(key, 2)
            q, k, v = block.qkv(x_btd, angles, adapters=adapters, dropout_key=first)
            attended = attention(
                *(q, k, v, rows.segment_ids_bt),
                causal=True,
                prefix_segments_bt=rows.prefix_segments_bt,
            )
            return block.finish(x_btd, attended, adapters=adapters, dropout_key=second), None

        stacked = (self.text.blocks, layer_keys(dropout_key, self.cfg.num_hidden_layers))
        x_btd, _ = jax.lax.scan(checkpointed(body, self.remat), x_btd, stacked)
        return self.text.final_norm(x_btd)

    def extend(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        positions_abt: jax.Array,
        cache: KVCache,
        start_b: jax.Array,
        *,
        slot_b: jax.Array | None = None,
        span: int | None = None,
        blocks: Sequence[Block] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        x_btd = self._embed(token_ids_bt, visual_md, vision_index_bt)
        angles = self._angles(positions_abt)

        def body(carry: Any, block: Block) -> tuple[Any, None]:
            x_btd, cache, layer = carry
            q, k, v = block.qkv(x_btd, angles)
            cache = kv_cache.write(cache, layer, slot_b, start_b, k, v)
            keys, values = kv_cache.read(cache, layer, slot_b, span or cache.positions, q.dtype)
            attended = cached_attention(q, k, v, keys, values, start_b)
            return (block.finish(x_btd, attended), cache, layer + 1), None

        carry = (x_btd, cache, jnp.int32(0))
        if blocks is None:
            carry, _ = jax.lax.scan(body, carry, self.text.blocks)
        for block in blocks or ():
            carry, _ = body(carry, block)
        return self.text.final_norm(carry[0]), carry[1]

    def logits(self, x_btd: jax.Array) -> jax.Array:
        return layers.vocabulary_logits(self.text.embedding, None, x_btd)

    def _embed(
        self, ids_bt: jax.Array, visual_md: jax.Array | None, index_bt: jax.Array | None
    ) -> jax.Array:
        x_btd = layers.lookup(self.text.embedding[...], ids_bt)
        if visual_md is None or index_bt is None:
            return x_btd
        visual_btd = layers.lookup(visual_md, jnp.maximum(index_bt, 0))
        return jnp.where((index_bt >= 0)[..., None], visual_btd.astype(x_btd.dtype), x_btd)

    def _angles(self, positions_abt: jax.Array) -> _Angles:
        dim = self.cfg.head_dim
        return layers.mrope_angles(positions_abt, dim, 10_000.0, sections=(dim // 2,))


def init_cache(cfg: ToyConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return kv_cache.init(
        cfg.num_hidden_layers, slots, positions, cfg.num_attention_heads, cfg.head_dim, dtype
    )
