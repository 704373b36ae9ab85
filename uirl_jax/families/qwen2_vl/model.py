"""Qwen2-VL in Flax NNX: the vision tower, the text tower, and the border's device side.

A module holds names and parameters; its methods are pure, so that `jax.jit` stays at the edge. The
blocks of a tower are stacked and run by one `lax.scan` under `jax.checkpoint`. Patches and
positions come from `inputs`, names of tensors from `names`. Sampling and losses are elsewhere.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.config import (
    VISION_ROPE_THETA,
    ImageConfig,
    Qwen2VLConfig,
    VisionConfig,
    level_values,
)
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models import kv_cache, layers
from uirl_jax.models.attention import attention, cached_attention
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain

_VISION_NORM_EPS = 1e-6  # not in the config of the reference either


class _Rotary(NamedTuple):
    """cos and sin of every token, float32[B,T,H/2]: computed once, used by every block."""

    cos_bth: jax.Array
    sin_bth: jax.Array


class VisionBlock(nnx.Module):
    """Pre-norm attention over an image's patches, then a two-layer MLP."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim = cfg.embed_dim
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.norm1 = layers.LayerNorm(dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype)
        self.qkv = linear("qkv", dim, 3 * dim)
        self.proj = linear("proj", dim, dim, axes=("wide", None))
        self.norm2 = layers.LayerNorm(dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype)
        self.fc1 = linear("fc1", dim, cfg.mlp_dim)
        self.fc2 = linear("fc2", cfg.mlp_dim, dim, axes=("wide", None))
        self.num_heads = cfg.num_heads

    def __call__(
        self,
        x_ipd: jax.Array,
        rotary: _Rotary,
        segments_ip: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        images, patches, dim = x_ipd.shape
        qkv_key, proj_key, fc1_key, fc2_key = split_key(dropout_key, 4)
        qkv_ipe = self.qkv(self.norm1(x_ipd), adapters=adapters, dropout_key=qkv_key)
        qkv_ip3nh = qkv_ipe.reshape(images, patches, 3, self.num_heads, -1)
        q_ipnh, k_ipnh, v_ipnh = (qkv_ip3nh[:, :, i] for i in range(3))
        q_ipnh, k_ipnh = (layers.rotate(x, *rotary) for x in (q_ipnh, k_ipnh))
        out_ipnh = attention(q_ipnh, k_ipnh, v_ipnh, segments_ip, causal=False)
        out_ipd = out_ipnh.reshape(images, patches, dim)
        x_ipd = x_ipd + self.proj(out_ipd, adapters=adapters, dropout_key=proj_key)
        wide_ipf = self.fc1(self.norm2(x_ipd), adapters=adapters, dropout_key=fc1_key)
        wide_ipf = layers.quick_gelu(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)


class VisionTower(nnx.Module):
    """Patches -> visual tokens of the text tower's width."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        # The reference's Conv3d has its kernel's size as stride: a product with flat patches.
        self.patch_embed = Linear(
            cfg.patch_features,
            cfg.embed_dim,
            axes=(None, None),
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.blocks = stack(
            lambda key: VisionBlock(cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.depth,
            rngs,
        )
        self.merger_norm = layers.LayerNorm(
            cfg.embed_dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype
        )
        merged = cfg.embed_dim * cfg.spatial_merge_size**2
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.merger_fc1 = linear("merger_fc1", merged, merged)
        self.merger_fc2 = linear("merger_fc2", merged, cfg.hidden_size, axes=("wide", None))


class TextBlock(nnx.Module):
    """Pre-norm grouped-query attention, then a gated MLP."""

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim, head_dim = cfg.hidden_size, cfg.head_dim
        kv_dim = cfg.num_key_value_heads * head_dim
        norm = functools.partial(layers.RMSNorm, dim, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        linear = functools.partial(
            adapted_linear, lora=lora, table=WEIGHTS, rngs=rngs, param_dtype=param_dtype
        )
        self.input_norm = norm()
        self.q_proj = linear("q_proj", dim, dim, use_bias=True)
        self.k_proj = linear("k_proj", dim, kv_dim, use_bias=True)
        self.v_proj = linear("v_proj", dim, kv_dim, use_bias=True)
        self.o_proj = linear("o_proj", dim, dim, axes=("wide", None))
        self.post_attention_norm = norm()
        self.gate_proj = linear("gate_proj", dim, cfg.intermediate_size)
        self.up_proj = linear("up_proj", dim, cfg.intermediate_size)
        self.down_proj = linear("down_proj", cfg.intermediate_size, dim, axes=("wide", None))
        self.head_dim = head_dim

    def qkv(
        self,
        x_btd: jax.Array,
        rotary: _Rotary,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B,T,N,H] and keys, and values [B,T,K,H]."""
        h_btd = self.input_norm(x_btd)
        q_key, k_key, v_key = split_key(dropout_key, 3)

        def heads(projection: Linear, key: jax.Array | None) -> jax.Array:
            y = projection(h_btd, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q_btnh = layers.rotate(heads(self.q_proj, q_key), *rotary)
        k_btkh = layers.rotate(heads(self.k_proj, k_key), *rotary)
        return q_btnh, k_btkh, heads(self.v_proj, v_key)

    def finish(
        self,
        x_btd: jax.Array,
        attended_btnh: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Output projection and MLP, each added to the residual stream."""
        o_key, gate_key, up_key, down_key = split_key(dropout_key, 4)
        attended_btd = attended_btnh.reshape(x_btd.shape)
        x_btd = x_btd + self.o_proj(attended_btd, adapters=adapters, dropout_key=o_key)
        h_btd = self.post_attention_norm(x_btd)
        gate_btf = jax.nn.silu(self.gate_proj(h_btd, adapters=adapters, dropout_key=gate_key))
        up_btf = self.up_proj(h_btd, adapters=adapters, dropout_key=up_key)
        x_btd = x_btd + self.down_proj(gate_btf * up_btf, adapters=adapters, dropout_key=down_key)
        return constrain(x_btd, "batch", None, None)


class TextTower(nnx.Module):
    """Token embeddings, decoder blocks, final norm, and the head where it is not the embeddings."""

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        embedding_vd = cfg.initializer_range * jax.random.normal(
            rngs.params(), (cfg.vocab_size, cfg.hidden_size), jnp.float32
        )
        self.embedding = nnx.Param(embedding_vd.astype(param_dtype))
        self.blocks = stack(
            lambda key: TextBlock(cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.num_hidden_layers,
            rngs,
        )
        self.final_norm = layers.RMSNorm(
            cfg.hidden_size, eps=cfg.rms_norm_eps, param_dtype=param_dtype
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


class Qwen2VL(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      lora: which projections carry adapters; None for the base alone.
      rngs: random weights; reading a directory replaces them.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None is param_dtype. Softmax, norms, angles and logprobs are
        float32 in any case.
      remat: what the backward pass keeps of a block.
    """

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
        remat: Remat = "full",
    ) -> None:
        self.cfg = cfg
        self.lora = lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat = remat
        self.visual = VisionTower(cfg.vision, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = TextTower(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: of `inputs.pack_screens`: either patches_ipc, uint8[I,P,C], or pixels_ipf,
            float32[I,P,F], as transformers' processor makes them; and
            patch_positions_ip2: int32[I,P,2], (row, column) within the patch's own image;
            patch_segments_ip: int32[I,P], one number per image, 0 at padding. Patches of one number
            attend to each other; merge_size**2 patches in a row belong to one image.
          adapters, dropout_key: as in `hidden`; they matter where the vision tower has adapters.
        Returns: visual_md, [I * P / merge_size**2, D]; rows of padding are undefined.
        """
        blocks_key, fc1_key, fc2_key = split_key(dropout_key, 3)
        pixels_ipf = vision.get("pixels_ipf")
        if pixels_ipf is None:
            pixels_ipf = pixel_values(vision["patches_ipc"], self.cfg.images)
        x_ipd, _ = _vision_blocks(
            self,
            pixels_ipf,
            vision["patch_positions_ip2"],
            vision["patch_segments_ip"],
            adapters=adapters,
            dropout_key=blocks_key,
            collect=False,
        )
        tower = self.visual
        h_ipd = tower.merger_norm(x_ipd)
        merged = h_ipd.shape[-1] * self.cfg.vision.spatial_merge_size**2
        h_imd = h_ipd.reshape(h_ipd.shape[0], -1, merged)
        h_imd = tower.merger_fc1(h_imd, adapters=adapters, dropout_key=fc1_key)
        h_imd = jax.nn.gelu(h_imd, approximate=False)
        visual_imd = tower.merger_fc2(h_imd, adapters=adapters, dropout_key=fc2_key)
        visual_md = visual_imd.reshape(-1, self.cfg.vision.hidden_size)
        # Any row of text may hold any image: every device holds the whole table.
        return constrain(visual_md, None, None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The text tower over whole rows, causal within a segment and the prefix that it shares.

        Args:
          visual_md: [M,D] of encode_images; None where no row holds an image.
          adapters: False computes the base exactly, without the adapters' matrix products.
          dropout_key: of the adapters' inputs (LoraConfig.dropout) in this one forward pass; None,
            as in all passes that score or sample, drops nothing.
        Returns: x_btd in the compute dtype, after the final norm.
        """
        x_btd, _ = _text_blocks(
            self, rows, visual_md, adapters=adapters, dropout_key=dropout_key, collect=False
        )
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
        blocks: Sequence[TextBlock] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the rows' next tokens into the cache and runs the text tower on them.

        Row b's tokens take the cache positions start_b[b] ... start_b[b] + T - 1 of its slot, each
        attending to the positions up to its own; positions past the end of the cache are dropped.
        Prefill: rows padded on the right; what padding wrote lies behind the row's last token,
        masked until it is overwritten. Decode: T = 1.

        Args:
          slot_b: int32[B], distinct slots of the rows; a row of padding has one past the last, and
            writes nothing. None: row b has slot b.
          span: cache positions of a slot that are read; None: all. No row may reach further.
          blocks: the model's text blocks one by one, in place of the stacked ones.
        Returns: x_btd after the final norm, and the cache (donate the old one).
        """
        span = span or cache.positions
        x_btd = _embed(self, token_ids_bt, visual_md, vision_index_bt)
        rotary = _rotary(self.cfg, positions_abt)

        def body(
            carry: tuple[jax.Array, KVCache, jax.Array | int], block: TextBlock
        ) -> tuple[tuple[jax.Array, KVCache, jax.Array | int], None]:
            # The cache is carried, not scanned over: then a step writes T positions in place, where
            # scanned outputs would copy all of it.
            x_btd, cache, layer = carry
            q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary, adapters=True)
            cache = kv_cache.write(cache, layer, slot_b, start_b, k_btkh, v_btkh)
            k_bksh, v_bksh = kv_cache.read(cache, layer, slot_b, span, q_btnh.dtype)
            attended_btnh = cached_attention(q_btnh, k_btkh, v_btkh, k_bksh, v_bksh, start_b)
            x_btd = block.finish(x_btd, attended_btnh, adapters=True)
            return (x_btd, cache, layer + 1), None

        if blocks is None:
            carry = (x_btd, cache, jnp.int32(0))
            (x_btd, cache, _), _ = jax.lax.scan(body, carry, self.text.blocks)
        else:
            for layer, block in enumerate(blocks):
                (x_btd, cache, _), _ = body((x_btd, cache, layer), block)
        return self.text.final_norm(x_btd), cache

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]. Score whole rows with scoring.token_logprobs, which chunks them."""
        return layers.vocabulary_logits(self.text.embedding, self.text.lm_head, x_btd)


def _vision_blocks(
    model: Qwen2VL,
    pixels_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    vision = model.cfg.vision
    pixels_ipf = constrain(pixels_ipf.astype(model.compute_dtype), "images", None, None)
    x_ipd = model.visual.patch_embed(pixels_ipf)
    rotary = _Rotary(*layers.axial_angles(patch_positions_ip2, vision.head_dim, VISION_ROPE_THETA))

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, rotary, patch_segments_ip, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (model.visual.blocks, layer_keys(dropout_key, vision.depth))
    return jax.lax.scan(checkpointed(body, model.remat), x_ipd, stacked)


def _embed(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
) -> jax.Array:
    """Token embeddings, with visual tokens in their places."""
    embedding_vd = constrain(model.text.embedding[...], "vocab", None)
    x_btd = layers.lookup(embedding_vd, token_ids_bt).astype(model.compute_dtype)
    if visual_md is not None and vision_index_bt is not None:
        visual_btd = layers.lookup(visual_md, jnp.maximum(vision_index_bt, 0))
        x_btd = jnp.where((vision_index_bt >= 0)[..., None], visual_btd.astype(x_btd.dtype), x_btd)
    return constrain(x_btd, "batch", None, None)


def _text_blocks(
    model: Qwen2VL,
    rows: TokenRows,
    visual_md: jax.Array | None,
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    x_btd = _embed(model, rows.token_ids_bt, visual_md, rows.vision_index_bt)
    rotary = _rotary(model.cfg, rows.positions_abt)

    def body(
        x_btd: jax.Array, layer: tuple[TextBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        qkv_key, finish_key = split_key(key, 2)
        q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary, adapters=adapters, dropout_key=qkv_key)
        attended_btnh = attention(
            q_btnh,
            k_btkh,
            v_btkh,
            rows.segment_ids_bt,
            causal=True,
            prefix_segments_bt=rows.prefix_segments_bt,
        )
        x_btd = block.finish(x_btd, attended_btnh, adapters=adapters, dropout_key=finish_key)
        return x_btd, x_btd if collect else None

    stacked = (model.text.blocks, layer_keys(dropout_key, model.cfg.num_hidden_layers))
    return jax.lax.scan(checkpointed(body, model.remat), x_btd, stacked)


def _rotary(cfg: Qwen2VLConfig, positions_3bt: jax.Array) -> _Rotary:
    return _Rotary(
        *layers.mrope_angles(positions_3bt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
    )


def block_outputs(model: Qwen2VL, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D], for comparison."""
    _, x_lbtd = _text_blocks(model, rows, visual_md, adapters=True, dropout_key=None, collect=True)
    return x_lbtd


def vision_block_outputs(
    model: Qwen2VL,
    pixels_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D], for comparison."""
    _, x_lipd = _vision_blocks(
        model,
        pixels_ipf,
        patch_positions_ip2,
        patch_segments_ip,
        adapters=True,
        dropout_key=None,
        collect=True,
    )
    return x_lipd


def pixel_values(patches_ipc: jax.Array, image_cfg: ImageConfig) -> jax.Array:
    """What the vision tower reads of patches that came to the device as bytes.

    An eighth of the floats on the host and on their way. A table, so that they are those of
    vision_inputs.pixel_values bit for bit: arithmetic is rounded in another way in every program
    that the compiler joins it into, and gradients of equal screens then differ by 1e-5.

    Args:
      patches_ipc: uint8[I,P,C], vision_inputs.cut_image.
    Returns: float32[I,P,F], the still image repeated in time.
    """
    shape_ip = patches_ipc.shape[:2]
    levels_ipcx = patches_ipc.reshape(*shape_ip, 3, -1)
    table_cl = jnp.asarray(level_values(image_cfg))
    values_ipcx = jnp.stack([table_cl[c][levels_ipcx[:, :, c]] for c in range(3)], axis=2)
    values_ipctx = jnp.repeat(values_ipcx[:, :, :, None], image_cfg.temporal_patch_size, axis=3)
    return values_ipctx.reshape(*shape_ip, -1)


def init_cache(cfg: Qwen2VLConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: k and v, [L,C,K,S,H] of C slots with S positions; dtype int8 adds scales."""
    return kv_cache.init(
        cfg.num_hidden_layers, slots, positions, cfg.num_key_value_heads, cfg.head_dim, dtype
    )
