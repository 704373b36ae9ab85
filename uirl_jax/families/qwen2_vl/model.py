"""Qwen2-VL in Flax NNX: its vision tower, and a `models.decoder` with M-RoPE as text tower.

Methods are pure; callers jit them. The blocks of a tower are stacked and run by one `lax.scan`
under `jax.checkpoint`. Patches and positions come from `qwen/`, names of tensors from `names`.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen.model import pixel_values
from uirl_jax.families.qwen2_vl.config import VISION_ROPE_THETA, Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models import decoder, layers
from uirl_jax.models.attention import attention
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.decoder import Decoder, DecoderBlock, DecoderConfig, Rotary
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain

_VISION_NORM_EPS = 1e-6  # a constant in the reference, too


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
        rotary: Rotary,
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
        # The reference's Conv3d with stride = kernel size is a matrix product on flat patches.
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


class Qwen2VL(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      lora: targets of the adapters; None: no adapters.
      rngs: of the random initial weights.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None: param_dtype. Softmax, norms, angles and logprobs are
        always float32.
      remat: what the backward pass recomputes of a block.
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
        self.remat: Remat = remat
        self.visual = VisionTower(cfg.vision, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = Decoder(
            decoder_config(cfg),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: arrays of `QwenInputs.pack_screens` or `QwenInputs.from_processor`:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F];
            patch_positions_ip2: int32[I,P,2], (row, column) of the patch within its image;
            patch_segments_ip: int32[I,P], one number per image, 0 at padding. Patches attend to
            those of the same number; merge_size**2 consecutive patches belong to one image.
          adapters, dropout_key: see `hidden`; for adapters of the vision tower.
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
        # Replicated: any row of text may hold any image.
        return constrain(visual_md, None, None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The text tower over whole rows, causal within a segment and its shared prefix.

        Args:
          visual_md: [M,D] of encode_images; None: no row holds an image.
          adapters: False computes the base exactly, without the adapters' matrix products.
          dropout_key: for the adapters' inputs (LoraConfig.dropout) in this forward pass; None, as
            for scoring and sampling, drops nothing.
        Returns: x_btd in the compute dtype, after the final norm.
        """
        x_btd, _ = _text_rows(self, rows, visual_md, adapters=adapters, dropout_key=dropout_key)
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
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See border.Model.extend."""
        x_btd = self.text.embed(token_ids_bt, visual_md, vision_index_bt)
        rotary = _rotary(self.cfg, positions_abt)
        return self.text.extend(
            x_btd, rotary, cache, start_b, slot_b=slot_b, span=span, blocks=blocks
        )

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        return self.text.logits(x_btd)


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
    rotary = Rotary(*layers.axial_angles(patch_positions_ip2, vision.head_dim, VISION_ROPE_THETA))

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, rotary, patch_segments_ip, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (model.visual.blocks, layer_keys(dropout_key, vision.depth))
    return jax.lax.scan(checkpointed(body, model.remat), x_ipd, stacked)


def _text_rows(
    model: Qwen2VL, rows: TokenRows, visual_md: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    x_btd = model.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt)
    rotary = _rotary(model.cfg, rows.positions_abt)
    return model.text.rows(x_btd, rotary, rows.segment_ids_bt, rows.prefix_segments_bt, **options)


def _rotary(cfg: Qwen2VLConfig, positions_3bt: jax.Array) -> Rotary:
    return Rotary(
        *layers.mrope_angles(positions_3bt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
    )


def block_outputs(model: Qwen2VL, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D]; for tests."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def vision_block_outputs(
    model: Qwen2VL,
    pixels_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    _, x_lipd = _vision_blocks(
        model,
        pixels_ipf,
        patch_positions_ip2,
        patch_segments_ip,
        adapters=True,
        dropout_key=None,
        collect=True,
    )
    assert x_lipd is not None  # collect=True
    return x_lipd


def decoder_config(cfg: Qwen2VLConfig) -> DecoderConfig:
    """The sizes of the text tower."""
    return DecoderConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        initializer_range=cfg.initializer_range,
        tie_word_embeddings=cfg.tie_word_embeddings,
        qkv_bias=True,
    )


def init_cache(cfg: Qwen2VLConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)
