"""A Qwen2-VL of some config as the package hands it about, and screens of given grids."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.families import qwen2_vl
from uirl_jax.families.border import Screen
from uirl_jax.families.loading import PolicyModel
from uirl_jax.families.qwen.images import num_visual_tokens
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.models.lora import LoraConfig, LoRAParam


def random_policy(cfg: Qwen2VLConfig, lora: LoraConfig, seed: int = 0) -> PolicyModel:
    """A model of random weights; its directory does not exist."""
    model = qwen2_vl.FAMILY.make_model(
        cfg, lora=lora, rngs=nnx.Rngs(seed), param_dtype=jnp.float32, remat="full"
    )
    return policy_of(model)


def policy_of(model: nnx.Module, path: Path = Path("nowhere")) -> PolicyModel:
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    family = qwen2_vl.FAMILY
    inputs = family.make_inputs(model.cfg)
    return PolicyModel(path, family, graphdef, lora, frozen, model.cfg, inputs, base_hash="base")


def screen_of(
    key: str, grid: tuple[int, int, int], patches_pc: np.ndarray | None = None, patch_size: int = 14
) -> Screen:
    """A screen of merge size 2."""
    size_px = (grid[2] * patch_size, grid[1] * patch_size)
    return Screen(
        key=key,
        size_px=size_px,
        seen_px=size_px,
        tokens=num_visual_tokens(grid, 2),
        patches=int(np.prod(grid)),
        layout=grid,
        arrays=None if patches_pc is None else {"patches_pc": patches_pc},
    )
