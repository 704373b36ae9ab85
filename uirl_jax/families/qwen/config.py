"""The part of config.json that Qwen2-VL and Qwen2.5-VL share: text tower and special tokens.

Also which preprocessor_config.json belongs to a vision tower; Qwen3-VL asks the same of its own.

Source: transformers, models/qwen2_vl/configuration_qwen2_vl.py and models/qwen2_5_vl/.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file, processor_file
from uirl_jax.families.qwen.images import ImageConfig

VISION_ROPE_THETA = 10_000.0
_RMS_NORM_EPS = 1e-5  # of the reference where config.json has none; the published files have 1e-6
_IMAGES = ImageConfig()  # of a directory that is read without its preprocessor_config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig:
    """The text tower, the special tokens and the image settings; a family adds its vision tower.

    Names are those of Hugging Face's config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
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
    images: ImageConfig = _IMAGES  # of the directory's processor file

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def text_problems(self) -> list[str]:
        """What cannot be computed, in words; of fields that are positive integers."""
        if problems := section_problems(self.mrope_section):
            return problems
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
        return problems

    def text_to_dict(self) -> dict[str, Any]:
        """The flat fields of a config.json, in the layout of the published models."""
        fields = (f.name for f in dataclasses.fields(QwenConfig) if f.name != "images")
        values = {name: getattr(self, name) for name in fields}
        section = list(values.pop("mrope_section"))
        return {
            **values,
            "hidden_act": "silu",
            "rope_scaling": {"type": "mrope", "mrope_section": section},
            "use_sliding_window": False,
        }


def section_problems(section: Any) -> list[str]:
    """What of an mrope_section is no size, in words."""
    sizes = section if isinstance(section, tuple) else (section,)
    if len(sizes) == 3 and all(type(size) is int and size > 0 for size in sizes):
        return []
    shown = list(section) if isinstance(section, tuple) else section
    return [f"mrope_section={shown!r}, expected three positive integers"]


def read_text(config: Mapping[str, Any], model_type: str, vision_activation: str) -> dict[str, Any]:
    """The fields of QwenConfig, from the top (transformers 4) or from text_config (5).

    Args:
      vision_activation: that of the vision tower's MLPs.

    Raises: ModelError: another architecture, or a variant that is not computed (sliding windows,
      scaled RoPE, other activations).
    """
    config_file.check_model_type(config, model_type)
    text = {**config, **(config.get("text_config") or {})}
    vision = dict(config.get("vision_config") or {})
    rope, vision_rope = config_file.rope_of(text), vision.get("rope_parameters") or {}
    config_file.check_computed(
        ("RoPE of type", config_file.rope_type(rope), "default", "mrope"),
        ("use_sliding_window", bool(text.get("use_sliding_window")), False),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        (
            "vision_config.hidden_act",
            vision.get("hidden_act", vision_activation),
            vision_activation,
        ),
        (
            "vision_config: rope_theta",
            vision_rope.get("rope_theta", VISION_ROPE_THETA),
            VISION_ROPE_THETA,
        ),
    )
    found = config_file.fields_given(QwenConfig, text, "images")
    found.setdefault("rms_norm_eps", _RMS_NORM_EPS)
    if "num_attention_heads" in found:  # the default is no grouping
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    if "mrope_section" in rope:
        found["mrope_section"] = tuple(rope["mrope_section"])
    # transformers 5 may have `false` at the top and `true` in text_config; the latter holds.
    found["tie_word_embeddings"] = bool(
        config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    )
    return found


class PatchSizes(Protocol):
    """What vision tower and image processor must agree on."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...


def read_images(model_dir: Path, vision: PatchSizes) -> ImageConfig:
    """Reads the image settings of a directory.

    Raises: ModelError: it cannot be read, or cuts other patches than the vision tower takes.
    """
    images, where = processor_file.read(model_dir, ImageConfig.from_dict)
    problems = [
        f"{name}={cut!r}, config.json has {taken}"
        for name, cut, taken in (
            ("patch_size", images.patch_size, vision.patch_size),
            ("temporal_patch_size", images.temporal_patch_size, vision.temporal_patch_size),
            ("merge_size", images.merge_size, vision.spatial_merge_size),
        )
        if cut != taken
    ]
    if problems:
        raise ModelError(
            f"{where}: {'; '.join(problems)}: it belongs to another "
            "model; take the file of this model's directory"
        )
    return images
