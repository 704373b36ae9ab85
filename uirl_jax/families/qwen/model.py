"""What the Qwen-VL families share on the device: M-RoPE, and bytes of patches as floats.

Source: transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from uirl_jax.families.pixel_levels import level_values
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.two_towers import TwoTowers
from uirl_jax.models import layers
from uirl_jax.models.decoder import Rotary


class QwenVL(TwoTowers):
    """The text tower has M-RoPE; the rest is `TwoTowers`."""

    def rotary(self, positions_abt: jax.Array) -> Rotary:
        """The angles of positions: by sections of a head, as of Qwen2-VL."""
        cfg = self.cfg
        return Rotary(
            *layers.mrope_angles(positions_abt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
        )


def image_pixels(vision: Mapping[str, jax.Array], images: ImageConfig) -> jax.Array:
    """float32[I,P,F]: pixels_ipf where they were given, else of the bytes patches_ipc."""
    pixels_ipf = vision.get("pixels_ipf")
    return pixel_values(vision["patches_ipc"], images) if pixels_ipf is None else pixels_ipf


def pixel_values(patches_ipc: jax.Array, images: ImageConfig) -> jax.Array:
    """The vision tower's input, of patches that were transferred as bytes: an eighth of the floats.

    Equals images.pixel_values bit for bit; computed another way, gradients of equal screens would
    differ by 1e-5.

    Args:
      patches_ipc: uint8[I,P,C], see images.cut_image.
    Returns: float32[I,P,F], the still image repeated in time.
    """
    values_ipc = layers.level_lookup(patches_ipc, level_values(images))
    values_ipc1x = values_ipc.reshape(*patches_ipc.shape[:2], 3, 1, -1)
    values_ipctx = jnp.repeat(values_ipc1x, images.temporal_patch_size, axis=3)
    return values_ipctx.reshape(*patches_ipc.shape[:2], -1)
