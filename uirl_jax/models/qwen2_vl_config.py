"""The dimensions of a Qwen2-VL: a directory's config.json, read, checked and written.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/configuration_qwen2_vl.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from uirl_jax.errors import ModelError

VISION_ROPE_THETA = 10_000.0


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
        """Of one patch of a still image, before it is repeated in time."""
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
                f"hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
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
        """Reads a config.json, text fields at the top (transformers 4) or in text_config (5).

        Raises: ModelError for another architecture, missing fields, or a variant that this
        implementation does not compute (sliding windows, scaled RoPE, other activations).
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

        found = {f.name: text.get(f.name) for f in dataclasses.fields(cls)}
        if found["num_key_value_heads"] is None:  # no grouping
            found["num_key_value_heads"] = found["num_attention_heads"]
        if "rope_theta" in rope:
            found["rope_theta"] = rope["rope_theta"]
        if "mrope_section" in rope:
            found["mrope_section"] = tuple(rope["mrope_section"])
        # transformers 5 keeps the special tokens at the top, and `false` at the top gives way to
        # the text tower's `true`.
        found["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        )
        if isinstance(found["eos_token_id"], list):
            found["eos_token_id"] = found["eos_token_id"][0]
        found = {name: value for name, value in found.items() if value is not None}
        # in_chans is what the published files call it; the reference reads in_channels alone, and
        # both are always 3.
        vision = {"hidden_size": found.get("hidden_size"), **vision}
        names = {field.name for field in dataclasses.fields(VisionConfig)}
        found["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = sorted(set(required) - set(found))
        if missing:
            raise ModelError(f"config.json: missing {', '.join(missing)}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """config.json that transformers 4 and 5 read: the flat layout of the published models."""
        values = dataclasses.asdict(self)
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
