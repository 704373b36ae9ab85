"""config.json of Qwen2-VL: reads, checks and writes it.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/configuration_qwen2_vl.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.models.directory import read_json

VISION_ROPE_THETA = 10_000.0
_IMAGES = ImageConfig()  # of a directory that is read without its preprocessor_config.json


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


@dataclasses.dataclass(frozen=True)
class Qwen2VLConfig:
    """Both towers and the special tokens. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vision: VisionConfig
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    mrope_section: tuple[int, ...] = (16, 24, 24)
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 151643
    eos_token_id: int | None = 151645
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    images: ImageConfig = _IMAGES  # of preprocessor_config.json

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}={value!r}, expected a positive integer"
            for config in (self, self.vision)
            for field in dataclasses.fields(config)
            if field.type is int
            and not ((value := getattr(config, field.name)).__class__ is int and value > 0)
        ]
        if problems:
            raise ModelError("config.json: " + "; ".join(problems))
        if self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if 2 * sum(self.mrope_section) != self.head_dim:
            problems.append(
                f"mrope_section={self.mrope_section} adds up to {sum(self.mrope_section)}, "
                f"expected half of head_dim={self.head_dim}"
            )
        vision = self.vision
        if vision.embed_dim % vision.num_heads or vision.head_dim % 4:
            problems.append(
                f"vision_config: embed_dim={vision.embed_dim} over num_heads={vision.num_heads}, "
                "expected a head_dim that is a multiple of 4"
            )
        if vision.hidden_size != self.hidden_size:
            problems.append(
                f"vision_config: hidden_size={vision.hidden_size}, expected the text tower's "
                f"{self.hidden_size}"
            )
        if problems:
            raise ModelError("config.json: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen2VLConfig":
        """Reads a config.json, with text fields at the top (transformers 4) or in text_config (5).

        Raises: ModelError: another architecture, missing fields, or a variant that is not supported
          (sliding windows, scaled RoPE, other activations).
        """
        if config.get("model_type") != "qwen2_vl":
            raise ModelError(
                f"config.json: model_type={config.get('model_type')!r}, expected 'qwen2_vl'"
            )
        text = {**config, **(config.get("text_config") or {})}
        vision = dict(config.get("vision_config") or {})
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        problems = []
        if rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope"):
            problems.append(f"RoPE of type {rope.get('rope_type', rope.get('type'))!r}")
        if text.get("use_sliding_window"):
            problems.append("use_sliding_window=true")
        if text.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act={text['hidden_act']!r}")
        vision_theta = (vision.get("rope_parameters") or {}).get("rope_theta", VISION_ROPE_THETA)
        if vision_theta != VISION_ROPE_THETA:
            problems.append(f"vision_config.rope_parameters.rope_theta={vision_theta}")
        if vision.get("hidden_act", "quick_gelu") != "quick_gelu":
            problems.append(f"vision_config.hidden_act={vision['hidden_act']!r}")
        if problems:
            raise ModelError(f"config.json: not supported: {', '.join(problems)}")

        found = {f.name: text.get(f.name) for f in dataclasses.fields(cls) if f.name != "images"}
        if found["num_key_value_heads"] is None:  # no grouping
            found["num_key_value_heads"] = found["num_attention_heads"]
        if "rope_theta" in rope:
            found["rope_theta"] = rope["rope_theta"]
        if "mrope_section" in rope:
            found["mrope_section"] = tuple(rope["mrope_section"])
        # transformers 5 may have `false` at the top and `true` in text_config; the latter holds.
        found["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        )
        if isinstance(found["eos_token_id"], list):
            found["eos_token_id"] = found["eos_token_id"][0]
        found = {name: value for name, value in found.items() if value is not None}
        # The published files name it in_chans, the reference reads only in_channels; both are 3.
        vision = {"hidden_size": found.get("hidden_size"), **vision}
        names = {field.name for field in dataclasses.fields(VisionConfig)}
        found["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = sorted(set(required) - set(found))
        if missing:
            raise ModelError(f"config.json: missing {', '.join(missing)}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """A config.json for transformers 4 and 5, in the flat layout of the published models."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision = values.pop("vision")
        section = list(values.pop("mrope_section"))
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **values,
            "hidden_act": "silu",
            "rope_scaling": {"type": "mrope", "mrope_section": section},
            "use_sliding_window": False,
            "vision_config": {
                "model_type": "qwen2_vl",
                **vision,
                "in_chans": vision["in_channels"],
                "hidden_act": "quick_gelu",
            },
        }


def read_model_config(model_dir: Path) -> Qwen2VLConfig:
    """Reads <model_dir>/config.json alone, with default image settings. Raises: ModelError."""
    path = model_dir / "config.json"
    try:
        return Qwen2VLConfig.from_dict(read_json(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: a value of the wrong type ({error})") from error


def read_config(model_dir: Path) -> Qwen2VLConfig:
    """Reads config.json and preprocessor_config.json. Raises: ModelError."""
    cfg = read_model_config(model_dir)
    return dataclasses.replace(cfg, images=ImageConfig.load(model_dir))
