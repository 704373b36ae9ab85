"""LLaVA-1.5 in Flax NNX: a CLIP as vision tower, a projector, a Llama (`models.decoder`).

The tower is computed up to the feature layer. The blocks after it and the last norm are held as
they were read, so that an export is complete; nothing computes, adapts or decays them. Methods are
pure; callers jit them. Screens and positions come from `inputs`, names of tensors from `names`.

Source: arXiv:2310.03744 and transformers, models/llava/modeling_llava.py, models/clip/.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.llava.config import LlavaConfig, VisionConfig
from uirl_jax.families.llava.images import ImageConfig
from uirl_jax.families.llava.names import WEIGHTS
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.models import decoder, layers
from uirl_jax.models.attention import attention
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.decoder import Decoder, DecoderBlock, DecoderConfig, Rotary
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain


class VisionBlock(nnx.Module):
    """Pre-norm attention over the patches of an image and its class token, then an MLP."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim = cfg.hidden_size
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        norm = functools.partial(
            layers.LayerNorm, dim, eps=cfg.layer_norm_eps, param_dtype=param_dtype
        )
        self.norm1 = norm()
        self.vision_q = linear("vision_q", dim, dim)
        self.vision_k = linear("vision_k", dim, dim)
        self.vision_v = linear("vision_v", dim, dim)
        self.vision_out = linear("vision_out", dim, dim, axes=("wide", None))
        self.norm2 = norm()
        self.fc1 = linear("fc1", dim, cfg.intermediate_size)
        self.fc2 = linear("fc2", cfg.intermediate_size, dim, axes=("wide", None))
        self.num_heads = cfg.num_attention_heads

    def __call__(
        self, x_ipd: jax.Array, *, adapters: bool, dropout_key: jax.Array | None
    ) -> jax.Array:
        q_key, k_key, v_key, out_key, fc1_key, fc2_key = split_key(dropout_key, 6)
        h_ipd = self.norm1(x_ipd)

        def heads(projection: Linear, key: jax.Array | None) -> jax.Array:
            y = projection(h_ipd, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], self.num_heads, -1)

        out_ipnh = attention(
            heads(self.vision_q, q_key),
            heads(self.vision_k, k_key),
            heads(self.vision_v, v_key),
            jnp.ones(x_ipd.shape[:2], jnp.int32),  # a row is one image
            causal=False,
        )
        out_ipd = out_ipnh.reshape(x_ipd.shape)
        x_ipd = x_ipd + self.vision_out(out_ipd, adapters=adapters, dropout_key=out_key)
        wide_ipf = self.fc1(self.norm2(x_ipd), adapters=adapters, dropout_key=fc1_key)
        wide_ipf = layers.quick_gelu(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)


class UnusedLinear(nnx.Module):
    """Tensors of a linear layer in torch's layout. Not a `Linear` with a kernel: these are never
    adapted, quantised or decayed."""

    def __init__(
        self, blocks: int, out_features: int, in_features: int, param_dtype: jnp.dtype
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((blocks, out_features, in_features), param_dtype))
        self.bias = nnx.Param(jnp.zeros((blocks, out_features), param_dtype))


class UnusedNorm(nnx.Module):
    """Tensors of norms."""

    def __init__(self, shape: tuple[int, ...], param_dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros(shape, param_dtype))


class UnusedBlocks(nnx.Module):
    """The tensors of the vision blocks after the feature layer."""

    def __init__(self, cfg: VisionConfig, blocks: int, param_dtype: jnp.dtype) -> None:
        dim, mlp = cfg.hidden_size, cfg.intermediate_size
        self.norm1 = UnusedNorm((blocks, dim), param_dtype)
        self.vision_q = UnusedLinear(blocks, dim, dim, param_dtype)
        self.vision_k = UnusedLinear(blocks, dim, dim, param_dtype)
        self.vision_v = UnusedLinear(blocks, dim, dim, param_dtype)
        self.vision_out = UnusedLinear(blocks, dim, dim, param_dtype)
        self.norm2 = UnusedNorm((blocks, dim), param_dtype)
        self.fc1 = UnusedLinear(blocks, mlp, dim, param_dtype)
        self.fc2 = UnusedLinear(blocks, dim, mlp, param_dtype)


class VisionTower(nnx.Module):
    """Patches -> visual tokens of the text tower's width, by CLIP and the projector."""

    def __init__(
        self,
        cfg: LlavaConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        vision = cfg.vision
        dim, eps = vision.hidden_size, vision.layer_norm_eps
        # The reference's Conv2d with stride = kernel size is a matrix product on flat patches.
        self.patch_embed = Linear(
            vision.patch_features, dim, axes=(None, None), rngs=rngs, param_dtype=param_dtype
        )
        # Of the reference's scale: class_embedding dim ** -0.5, positions 0.02.
        embeddings = jax.random.normal(rngs.params(), (2 + vision.patches, dim), jnp.float32)
        self.class_embedding = nnx.Param((embeddings[0] * dim**-0.5).astype(param_dtype))
        self.position_table = nnx.Param((embeddings[1:] * 0.02).astype(param_dtype))
        self.pre_norm = layers.LayerNorm(dim, eps=eps, param_dtype=param_dtype)
        self.blocks = stack(
            lambda key: VisionBlock(vision, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.vision_blocks,
            rngs,
        )
        unused = cfg.unused_vision_blocks
        self.unused_blocks = UnusedBlocks(vision, unused, param_dtype) if unused else None
        self.unused_norm = UnusedNorm((dim,), param_dtype)
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.merger_fc1 = linear("merger_fc1", dim, cfg.hidden_size)
        self.merger_fc2 = linear(
            "merger_fc2", cfg.hidden_size, cfg.hidden_size, axes=("wide", None)
        )


class Llava(nnx.Module):
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
        cfg: LlavaConfig,
        *,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
        remat: Remat = "full",
    ) -> None:
        self.cfg, self.lora = cfg, lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat: Remat = remat
        self.visual = VisionTower(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)
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
          vision: of `LlavaInputs.pack_screens` or `LlavaInputs.from_processor`:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F]; a row is one image.
          adapters, dropout_key: see border.Model; for adapters of the vision tower.
        Returns: visual_md, [I * P, D]; rows without an image are undefined.
        """
        blocks_key, fc1_key, fc2_key = split_key(dropout_key, 3)
        x_ipd, _ = _vision_blocks(
            self, vision, adapters=adapters, dropout_key=blocks_key, collect=False
        )
        tower = self.visual
        h_ipd = tower.merger_fc1(x_ipd[:, 1:], adapters=adapters, dropout_key=fc1_key)
        h_ipd = jax.nn.gelu(h_ipd, approximate=False)
        visual_ipd = tower.merger_fc2(h_ipd, adapters=adapters, dropout_key=fc2_key)
        return constrain(visual_ipd.reshape(-1, self.cfg.hidden_size), "visual", None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """See border.Model.hidden."""
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
        return self.text.extend(
            self.text.embed(token_ids_bt, visual_md, vision_index_bt),
            _rotary(self.cfg, positions_abt),
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
        )

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        return self.text.logits(x_btd)


def _rotary(cfg: LlavaConfig, positions_1bt: jax.Array) -> Rotary:
    sections = (cfg.head_dim // 2,)  # one axis of positions
    return Rotary(*layers.mrope_angles(positions_1bt, cfg.head_dim, cfg.rope_theta, sections))


def _text_rows(
    model: Llava, rows: TokenRows, visual_md: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    return model.text.rows(
        model.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True),
        _rotary(model.cfg, rows.positions_abt),
        rows.segment_ids_bt,
        rows.prefix_segments_bt,
        **options,
    )


def _vision_blocks(
    model: Llava,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the feature layer, [I,1+P,D], the class token first; with `collect`, [L,I,1+P,D]
    behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = vision.get("pixels_ipf")
    if pixels_ipf is None:
        pixels_ipf = pixel_values(vision["patches_ipc"], model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(dtype), "images", None, None)
    patches_ipd = tower.patch_embed(pixels_ipf)
    class_i1d = jnp.broadcast_to(
        tower.class_embedding[...].astype(dtype), (len(pixels_ipf), 1, patches_ipd.shape[-1])
    )
    x_ipd = jnp.concatenate([class_i1d, patches_ipd], axis=1)
    x_ipd = tower.pre_norm(x_ipd + tower.position_table[...].astype(dtype))
    x_ipd = constrain(x_ipd, "images", None, None)

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (tower.blocks, layer_keys(dropout_key, model.cfg.vision_blocks))
    return jax.lax.scan(checkpointed(body, model.remat), x_ipd, stacked)


def pixel_values(patches_ipc: jax.Array, images: ImageConfig) -> jax.Array:
    """float32[I,P,F] of uint8[I,P,C]: the processor's values bit for bit."""
    return layers.level_lookup(patches_ipc, level_values(images))


def vision_block_outputs(model: Llava, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block that is computed, [L,I,1+P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, adapters=True, dropout_key=None, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd


def block_outputs(model: Llava, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D]; for tests."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def decoder_config(cfg: LlavaConfig) -> DecoderConfig:
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
    )


def init_cache(cfg: LlavaConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)
