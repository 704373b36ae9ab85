"""config.json of Qwen3-VL (2B, 4B, 8B): reads, checks and writes it.

Source: transformers, models/qwen3_vl/configuration_qwen3_vl.py.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file
from uirl_jax.families.qwen import config as qwen
from uirl_jax.families.qwen.images import ImageConfig

# Of the reference where config.json has none; the published files have 5,000,000.
_TEXT_ROPE_THETA = 500_000.0
# Of a directory that is planned or tested without its preprocessor_config.json: the published one.
_IMAGES = ImageConfig(
    patch_size=16,
    min_pixels=65_536,
    max_pixels=16_777_216,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# How the template of the Thinking models opens a reply, in Jinja and in JSON that quotes Jinja.
_THINKING = re.compile(r"<\|im_start\|>assistant(\\\\n|\\n|\n)<think>")
_MAX_TEMPLATE_BYTES = 16_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int  # of the text tower: the width of a visual token
    # Blocks whose outputs the text tower gets too: k-th of them after its k-th block.
    deepstack_visual_indexes: tuple[int, ...]
    num_position_embeddings: int  # a square grid of learned positions
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Learned positions in a row and in a column of their grid."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_features(self) -> int:
        """F, the floats of one patch: channels x time x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of one visual token side by side."""
        return self.hidden_size * self.spatial_merge_size**2

    def problems(self) -> list[str]:
        """What cannot be computed, in words; of fields that are positive integers."""
        found = []
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            found.append(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads}, expected a "
                "head_dim that is a multiple of 4"
            )
        if self.table_side**2 != self.num_position_embeddings:
            found.append(
                f"num_position_embeddings={self.num_position_embeddings}, expected a square"
            )
        indexes = self.deepstack_visual_indexes
        increasing = all(a < b for a, b in itertools.pairwise(indexes))
        if not increasing or not all(0 <= index < self.depth for index in indexes):
            found.append(
                f"deepstack_visual_indexes={list(indexes)}, expected increasing numbers of its "
                f"{self.depth} blocks, from 0"
            )
        if self.in_channels != 3:
            found.append(f"in_channels={self.in_channels}, expected 3")
        return [f"vision_config: {problem}" for problem in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig:
    """Both towers and the special tokens. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vision: VisionConfig
    head_dim: int = 128  # of its own: heads x head_dim need not be hidden_size
    rms_norm_eps: float = 1e-6
    rope_theta: float = _TEXT_ROPE_THETA
    mrope_section: tuple[int, ...] = (24, 20, 20)
    max_position_embeddings: int = 262_144
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 151643
    eos_token_id: int | None = 151645
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    images: ImageConfig = _IMAGES  # of the directory's processor file

    def __post_init__(self) -> None:
        problems = qwen.section_problems(self.mrope_section)
        indexes = self.vision.deepstack_visual_indexes
        if any(index.__class__ is not int for index in indexes):
            problems.append(f"deepstack_visual_indexes={list(indexes)!r}, expected integers")
        config_file.check(self, self.vision, problems=problems)
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if 2 * sum(self.mrope_section) != self.head_dim:
            problems.append(
                f"mrope_section={list(self.mrope_section)}, expected three numbers that add up to "
                f"half of head_dim={self.head_dim}"
            )
        problems += self.vision.problems()
        if self.vision.out_hidden_size != self.hidden_size:
            problems.append(
                f"vision_config: out_hidden_size={self.vision.out_hidden_size}, expected the text "
                f"tower's {self.hidden_size}"
            )
        if len(self.vision.deepstack_visual_indexes) > self.num_hidden_layers:
            problems.append(
                f"vision_config: {len(self.vision.deepstack_visual_indexes)} "
                f"deepstack_visual_indexes for {self.num_hidden_layers} text blocks"
            )
        config_file.check(problems=problems)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen3VLConfig":
        """Reads a config.json of transformers 4.57 or 5.

        Raises: ModelError: another architecture, missing fields, or a variant that is not computed
          (a mixture of experts, scaled RoPE, axes of M-RoPE in blocks, other activations).
        """
        config_file.check_model_type(config, "qwen3_vl")
        text, vision = (dict(config.get(f"{name}_config") or {}) for name in ("text", "vision"))
        rope = config_file.rope_of(text)
        _check_computed(text, vision, rope)
        found = config_file.fields_given(cls, {**config, **text}, "images", "vision")
        found["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
        if "mrope_section" in rope:
            found["mrope_section"] = tuple(rope["mrope_section"])
        if "num_attention_heads" in found:  # the default is no grouping
            found.setdefault("num_key_value_heads", found["num_attention_heads"])
        # Where both say something the top holds, as in the reference.
        found["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        )
        found = {name: value for name, value in found.items() if value is not None}
        vision = config_file.fields_given(VisionConfig, vision)
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = tuple(vision["deepstack_visual_indexes"])
        config_file.check_complete(vision, dataclasses.fields(VisionConfig), "vision_config.")
        found["vision"] = VisionConfig(**vision)
        config_file.check_complete(found, dataclasses.fields(cls))
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """A config.json in the layout of the published models, for transformers 4.57 and 5."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision = values.pop("vision")
        vision["deepstack_visual_indexes"] = list(vision["deepstack_visual_indexes"])
        section = list(values.pop("mrope_section"))
        top = {
            name: values.pop(name)
            for name in (
                *("image_token_id", "video_token_id"),
                *("vision_start_token_id", "vision_end_token_id"),
            )
        }
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            **top,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": {
                "model_type": "qwen3_vl_text",
                **values,
                "attention_bias": False,
                "hidden_act": "silu",
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": section,
                    "rope_type": "default",
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                **vision,
                "hidden_act": "gelu_pytorch_tanh",
            },
        }


def _check_computed(
    text: Mapping[str, Any], vision: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    """Raises ModelError for values that ask for another computation than this family's."""
    vision_rope = vision.get("rope_parameters") or {}
    config_file.check_computed(
        ("RoPE of type", config_file.rope_type(rope), "default"),
        ("mrope_interleaved", rope.get("mrope_interleaved", True), True),
        ("attention_bias", text.get("attention_bias", False), False),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        (
            "vision_config.hidden_act",
            vision.get("hidden_act", "gelu_pytorch_tanh"),
            "gelu_pytorch_tanh",
        ),
        ("vision_config: RoPE of type", vision_rope.get("rope_type", "axial"), "axial"),
        (
            "vision_config: rope_theta",
            vision_rope.get("rope_theta", qwen.VISION_ROPE_THETA),
            qwen.VISION_ROPE_THETA,
        ),
    )


def read_model_config(model_dir: Path) -> Qwen3VLConfig:
    """Reads <model_dir>/config.json alone, with published image settings. Raises: ModelError."""
    return config_file.read_file(model_dir / "config.json", Qwen3VLConfig.from_dict)


def read_config(model_dir: Path) -> Qwen3VLConfig:
    """Reads config.json and the image settings.

    Raises: ModelError: they cannot be read or contradict each other, or it is a Thinking model.
    """
    _refuse_thinking(model_dir)
    cfg = read_model_config(model_dir)
    return dataclasses.replace(cfg, images=qwen.read_images(model_dir, cfg.vision))


def _refuse_thinking(model_dir: Path) -> None:
    """Raises ModelError for the Thinking models, which only their chat template tells apart.

    That template opens replies with <think> and drops earlier reasoning. Contexts here keep what
    was sampled, and open a reply as the Instruct models do.
    """
    for name in _TEMPLATES:
        path = model_dir / name
        if not path.is_file() or path.stat().st_size > _MAX_TEMPLATE_BYTES:
            continue
        if _THINKING.search(path.read_text(encoding="utf-8", errors="replace")):
            raise ModelError(
                f"{path}: opens replies with <think>: the Thinking models are not supported, whose "
                "template drops earlier reasoning from a context; take the Instruct model"
            )
