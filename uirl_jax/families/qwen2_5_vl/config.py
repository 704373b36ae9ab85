"""config.json of Qwen2.5-VL and of UI-TARS-1.5: reads, checks and writes it.

Source: arXiv:2502.13923 and transformers, models/qwen2_5_vl/configuration_qwen2_5_vl.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.families import config_file
from uirl_jax.families.qwen import config as qwen
from uirl_jax.families.qwen.images import ImageConfig

_MODEL_TYPE = "qwen2_5_vl"
# Of a directory that is planned or tested without its preprocessor_config.json: the published one.
_IMAGES = ImageConfig(max_pixels=12_845_056)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower. Defaults are those of the published models.

    hidden_size has none: the reference's (3584) fits no published model.
    """

    hidden_size: int
    out_hidden_size: int  # of the text tower: the width of a visual token
    depth: int = 32
    intermediate_size: int = 3420
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int = 112  # pixels in a row and a column of an attention window
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)  # blocks without windows

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_features(self) -> int:
        """F, the floats of one patch: channels x time x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of one visual token side by side."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def window_tokens(self) -> int:
        """Visual tokens in a row and a column of a window."""
        return self.window_size // (self.patch_size * self.spatial_merge_size)

    @property
    def window_patches(self) -> int:
        """Patches of a whole window; those at the right and lower edge of a screen have fewer."""
        return (self.window_tokens * self.spatial_merge_size) ** 2

    def problems(self) -> list[str]:
        """What cannot be computed, in words; of fields that are positive integers."""
        found = []
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            found.append(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads}, expected a "
                "head_dim that is a multiple of 4"
            )
        token_px = self.patch_size * self.spatial_merge_size
        if self.window_size % token_px:
            found.append(
                f"window_size={self.window_size}, expected a multiple of the {token_px} pixels of "
                "a visual token"
            )
        full = self.fullatt_block_indexes
        if not all(block.__class__ is int and 0 <= block < self.depth for block in full):
            found.append(
                f"fullatt_block_indexes={list(full)}, expected numbers of its {self.depth} blocks, "
                "from 0"
            )
        if self.in_channels != 3:
            found.append(f"in_channels={self.in_channels}, expected 3")
        return [f"vision_config: {problem}" for problem in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(qwen.QwenConfig):
    """Both towers and the special tokens."""

    vision: VisionConfig
    images: ImageConfig = _IMAGES

    def __post_init__(self) -> None:
        config_file.check(self, self.vision)
        problems = self.text_problems() + self.vision.problems()
        if self.vision.out_hidden_size != self.hidden_size:
            problems.append(
                f"vision_config: out_hidden_size={self.vision.out_hidden_size}, expected the text "
                f"tower's {self.hidden_size}"
            )
        config_file.check(problems=problems)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen25VLConfig":
        """Reads a config.json, with text fields at the top (transformers 4) or in text_config (5).

        Raises: ModelError: another architecture, missing fields, or a variant that is not computed
          (sliding windows in the text tower, scaled RoPE, other activations).
        """
        vision = dict(config.get("vision_config") or {})
        found = qwen.read_text(config, _MODEL_TYPE, "silu")
        # tokens_per_second is about videos, which are refused where they come in.
        fields = dataclasses.fields(VisionConfig)
        names = {field.name for field in fields}
        vision = {name: value for name, value in vision.items() if name in names}
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = tuple(vision["fullatt_block_indexes"])
        config_file.check_complete(vision, fields, "vision_config.")
        found["vision"] = VisionConfig(**vision)
        config_file.check_complete(found, dataclasses.fields(cls))
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """A config.json for transformers 4 and 5, in the flat layout of the published models."""
        vision = dataclasses.asdict(self.vision)
        vision["fullatt_block_indexes"] = list(self.vision.fullatt_block_indexes)
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": _MODEL_TYPE,
            **self.text_to_dict(),
            "vision_config": {
                "model_type": _MODEL_TYPE,
                **vision,
                "in_chans": self.vision.in_channels,
                "hidden_act": "silu",
            },
        }


def read_model_config(model_dir: Path) -> Qwen25VLConfig:
    """Reads <model_dir>/config.json alone, with published image settings. Raises: ModelError."""
    return config_file.read_file(model_dir / "config.json", Qwen25VLConfig.from_dict)


def read_config(model_dir: Path) -> Qwen25VLConfig:
    """Reads config.json and the image settings. Raises: ModelError."""
    cfg = read_model_config(model_dir)
    return dataclasses.replace(cfg, images=qwen.read_images(model_dir, cfg.vision))
