"""The Qwen-VL families on the device: bytes of patches become the vision tower's input."""

import jax
import jax.numpy as jnp

from uirl_jax.families.qwen.images import ImageConfig, level_values


def pixel_values(patches_ipc: jax.Array, image_cfg: ImageConfig) -> jax.Array:
    """The vision tower's input, of patches that were transferred as bytes: an eighth of the floats.

    A lookup in a table equals images.pixel_values bit for bit. Arithmetic would be rounded
    differently in every program that the compiler fuses it into, and gradients of equal screens
    would then differ by 1e-5.

    Args:
      patches_ipc: uint8[I,P,C], see images.cut_image.
    Returns: float32[I,P,F], the still image repeated in time.
    """
    shape_ip = patches_ipc.shape[:2]
    levels_ipcx = patches_ipc.reshape(*shape_ip, 3, -1)
    table_cl = jnp.asarray(level_values(image_cfg))
    values_ipcx = jnp.stack([table_cl[c][levels_ipcx[:, :, c]] for c in range(3)], axis=2)
    values_ipctx = jnp.repeat(values_ipcx[:, :, :, None], image_cfg.temporal_patch_size, axis=3)
    return values_ipctx.reshape(*shape_ip, -1)
