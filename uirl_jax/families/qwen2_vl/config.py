"""config.json of Qwen2-VL: reads, checks and writes it.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/configuration_qwen2_vl.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.families import config_file
from uirl_jax.families.qwen import config as qwen


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower. Defaults are those of the published models."""

    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: float = 4
    hidden_size: int = 1536  # of the text tower: the width of a visual token
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def patch_levels(self) -> int:
        """C, the values of one patch of a still image, before it is repeated in time."""
        return self.in_channels * self.patch_size**2

    @property
    def patch_features(self) -> int:
        return self.patch_levels * self.temporal_patch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(qwen.QwenConfig):
    """Both towers and the special tokens."""

    vision: VisionConfig

    def __post_init__(self) -> None:
        vision = self.vision
        config_file.check(self, vision)
        problems = self.text_problems()
        if vision.embed_dim % vision.num_heads or vision.head_dim % 4:
            problems.append(
                f"vision_config: embed_dim={vision.embed_dim} over num_heads={vision.num_heads}, "
                "expected a head_dim that is a multiple of 4"
            )
        if vision.in_channels != 3:
            problems.append(f"vision_config: in_channels={vision.in_channels}, expected 3")
        if vision.hidden_size != self.hidden_size:
            problems.append(
                f"vision_config: hidden_size={vision.hidden_size}, expected the text tower's "
                f"{self.hidden_size}"
            )
        config_file.check(problems=problems)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen2VLConfig":
        """Reads a config.json, with text fields at the top (transformers 4) or in text_config (5).

        Raises: ModelError: another architecture, missing fields, or a variant that is not computed
          (sliding windows, scaled RoPE, other activations).
        """
        vision = dict(config.get("vision_config") or {})
        found = qwen.read_text(config, "qwen2_vl", "quick_gelu")
        # The published files name it in_chans, the reference reads only in_channels; both are 3.
        vision = {"hidden_size": found.get("hidden_size"), **vision}
        names = {field.name for field in dataclasses.fields(VisionConfig)}
        found["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
        config_file.check_complete(found, dataclasses.fields(cls))
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """A config.json for transformers 4 and 5, in the flat layout of the published models."""
        vision = dataclasses.asdict(self.vision)
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **self.text_to_dict(),
            "vision_config": {
                "model_type": "qwen2_vl",
                **vision,
                "in_chans": vision["in_channels"],
                "hidden_act": "quick_gelu",
            },
        }


def read_model_config(model_dir: Path) -> Qwen2VLConfig:
    """Reads <model_dir>/config.json alone, with default image settings. Raises: ModelError."""
    return config_file.read_file(model_dir / "config.json", Qwen2VLConfig.from_dict)


def read_config(model_dir: Path) -> Qwen2VLConfig:
    """Reads config.json and the image settings. Raises: ModelError."""
    cfg = read_model_config(model_dir)
    return dataclasses.replace(cfg, images=qwen.read_images(model_dir, cfg.vision))
