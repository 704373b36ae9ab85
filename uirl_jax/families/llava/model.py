"""LLaVA-1.5 in Flax NNX: a CLIP as vision tower, a projector, a Llama (`models.decoder`).

The tower is computed up to the feature layer. The blocks after it and the last norm are held as
they were read, so that an export is complete; nothing computes, adapts or decays them. Screens and
positions come from `inputs`, names of tensors from `names`, the text tower from `two_towers`.

Source: arXiv:2310.03744 and transformers, models/llava/modeling_llava.py, models/clip/.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.llava.config import LlavaConfig, VisionConfig
from uirl_jax.families.llava.names import WEIGHTS
from uirl_jax.families.two_towers import TwoTowers, image_pixels
from uirl_jax.models import layers
from uirl_jax.models.decoder import DecoderConfig
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.vision_block import make_blocks, run_blocks


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
        self.blocks = make_blocks(
            vision,
            cfg.vision_blocks,
            layers.quick_gelu,
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
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


class Llava(TwoTowers):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: LlavaConfig
    visual: VisionTower
    table = WEIGHTS
    make_visual = VisionTower
    decoder_config = staticmethod(DecoderConfig.from_config)

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
        x_ipd, _ = _vision_blocks(self, vision, adapters=adapters, dropout_key=blocks_key)
        tower = self.visual
        h_ipd = tower.merger_fc1(x_ipd[:, 1:], adapters=adapters, dropout_key=fc1_key)
        h_ipd = jax.nn.gelu(h_ipd, approximate=False)
        visual_ipd = tower.merger_fc2(h_ipd, adapters=adapters, dropout_key=fc2_key)
        return constrain(visual_ipd.reshape(-1, self.cfg.hidden_size), "visual", None)


def _vision_blocks(
    model: Llava, vision: Mapping[str, jax.Array], **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the feature layer, [I,1+P,D], the class token first; with `collect`, [L,I,1+P,D]
    behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = image_pixels(vision, model.cfg.images).astype(dtype)
    pixels_ipf = constrain(pixels_ipf, "images", None, None)
    patches_ipd = tower.patch_embed(pixels_ipf)
    class_i1d = jnp.broadcast_to(
        tower.class_embedding[...].astype(dtype), (len(pixels_ipf), 1, patches_ipd.shape[-1])
    )
    x_ipd = jnp.concatenate([class_i1d, patches_ipd], axis=1)
    x_ipd = tower.pre_norm(x_ipd + tower.position_table[...].astype(dtype))
    x_ipd = constrain(x_ipd, "images", None, None)
    return run_blocks(
        tower.blocks, x_ipd, None, depth=model.cfg.vision_blocks, remat=model.remat, **options
    )


def vision_block_outputs(model: Llava, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block that is computed, [L,I,1+P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd
