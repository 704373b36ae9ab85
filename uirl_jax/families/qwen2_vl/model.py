"""Qwen2-VL in Flax NNX: its vision tower, before the text tower of `qwen.model`.

Methods are pure; callers jit them. The blocks of a tower are stacked and run by `blocks.through`.
Patches and positions come from `qwen/`, names of tensors from `names`.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.qwen.config import VISION_ROPE_THETA
from uirl_jax.families.qwen.model import QwenVL, image_pixels
from uirl_jax.families.qwen.vision import NORM_EPS, MergingTower, VisionBlock
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.models import layers
from uirl_jax.models.blocks import layer_keys, stack, through
from uirl_jax.models.decoder import DecoderConfig, Rotary
from uirl_jax.models.lora import Linear, LoraConfig, split_key
from uirl_jax.models.sharding import constrain


class VisionTower(MergingTower):
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
            lambda key: VisionBlock(
                cfg.embed_dim,
                cfg.mlp_dim,
                cfg.num_heads,
                layers.quick_gelu,
                table=WEIGHTS,
                lora=lora,
                rngs=nnx.Rngs(key),
                param_dtype=param_dtype,
            ),
            cfg.depth,
            rngs,
        )
        self.merger_norm = layers.LayerNorm(cfg.embed_dim, eps=NORM_EPS, param_dtype=param_dtype)
        self._add_merger(
            cfg.embed_dim * cfg.spatial_merge_size**2,
            cfg.hidden_size,
            table=WEIGHTS,
            lora=lora,
            rngs=rngs,
            param_dtype=param_dtype,
        )


class Qwen2VL(QwenVL):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: Qwen2VLConfig
    visual: VisionTower
    table = WEIGHTS
    decoder_config = staticmethod(lambda cfg: DecoderConfig.from_config(cfg, qkv_bias=True))

    @staticmethod
    def make_visual(cfg: Any, **options: Any) -> VisionTower:
        return VisionTower(cfg.vision, **options)

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
        pixels_ipf = image_pixels(vision, self.cfg.images)
        x_ipd, _ = _vision_blocks(
            self,
            pixels_ipf,
            vision["patch_positions_ip2"],
            vision["patch_segments_ip"],
            adapters=adapters,
            dropout_key=blocks_key,
            collect=False,
        )
        keys = (fc1_key, fc2_key)
        visual_imd = self.visual.merge(x_ipd, adapters=adapters, dropout_keys=keys)
        visual_md = visual_imd.reshape(-1, self.cfg.vision.hidden_size)
        return constrain(visual_md, "visual", None)


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
    return through(body, x_ipd, stacked, model.remat)


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
