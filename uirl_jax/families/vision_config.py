"""vision_config of a CLIP or SigLIP, which several families have, and checks of both towers' sizes.

Source: transformers, models/clip/configuration_clip.py, models/siglip/configuration_siglip.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from uirl_jax.families import config_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Names and defaults are the reference's; a family has others where its reference does."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 32
    layer_norm_eps: float = 1e-6

    @property
    def grid_side(self) -> int:
        """Patches along a side of a square image, and of the table of positions."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Of a square image."""
        return self.grid_side**2

    @property
    def patch_features(self) -> int:
        """F, the floats of one patch: channels x height x width."""
        return 3 * self.patch_size**2

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The fields of this class; others, and null, are passed over."""
        return cls(**config_file.fields_given(cls, content))


def tower_problems(cfg: Any, vision: VisionConfig) -> list[str]:
    """Sizes that contradict each other, in words.

    Args: cfg: of the text tower, with the names of config.json.
    """
    problems = []
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        problems.append(
            f"num_attention_heads={cfg.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={cfg.num_key_value_heads}"
        )
    if cfg.head_dim % 2:
        problems.append(f"head_dim={cfg.head_dim}, expected a multiple of 2")
    if vision.hidden_size % vision.num_attention_heads:
        problems.append(
            f"vision_config: hidden_size={vision.hidden_size} is not a multiple of "
            f"num_attention_heads={vision.num_attention_heads}"
        )
    if vision.image_size % vision.patch_size:
        problems.append(
            f"vision_config: image_size={vision.image_size} is not a multiple of "
            f"patch_size={vision.patch_size}"
        )
    return problems
