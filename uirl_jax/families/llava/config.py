"""config.json of LLaVA-1.5 (7B, 13B): reads, checks and writes it.

Source: arXiv:2310.03744 and transformers, models/llava/configuration_llava.py, with those of
models/clip/ and models/llama/.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file, processor_file, vision_config
from uirl_jax.families.llava.images import ImageConfig
from uirl_jax.families.square_screens import check_side

# What the reference takes where config.json has no vision_config.
_VISION: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_IMAGES = ImageConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(vision_config.VisionConfig):
    """The vision tower, a CLIP."""

    projection_dim: int = 512  # nothing here reads it; kept for exports
    layer_norm_eps: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaConfig:
    """Both towers and the special tokens. Names are those of Hugging Face's config.json.

    Defaults are those of the reference's LlamaConfig: the published 7B leaves most of them out.
    """

    vision: VisionConfig
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    image_token_id: int = 32000
    vision_feature_layer: int = -2
    images: ImageConfig = _IMAGES  # of the directory's processor file

    def __post_init__(self) -> None:
        config_file.check(self, self.vision, signed=("vision_feature_layer",))
        problems = vision_config.tower_problems(self, self.vision)
        layers = self.vision.num_hidden_layers
        if not 1 <= self.vision_blocks <= layers:
            problems.append(
                f"vision_feature_layer={self.vision_feature_layer}, expected the output of one of "
                f"the {layers} vision blocks"
            )
        config_file.check(problems=problems)

    @property
    def vision_blocks(self) -> int:
        """Vision blocks up to the feature layer: those that are computed."""
        layer = self.vision_feature_layer
        return layer if layer >= 0 else self.vision.num_hidden_layers + 1 + layer

    @property
    def unused_vision_blocks(self) -> int:
        """Vision blocks after the feature layer."""
        return self.vision.num_hidden_layers - self.vision_blocks

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlavaConfig":
        """Reads a config.json.

        Raises: ModelError: another architecture, or a variant that is not computed (another text or
          vision tower, several feature layers, scaled RoPE, biases, other activations).
        """
        config_file.check_model_type(config, "llava")
        text = dict(config.get("text_config") or {})
        vision = dict(config.get("vision_config") or _VISION)
        rope = config_file.rope_of(text)
        _check_computed(config, text, vision, rope)
        found = config_file.fields_given(cls, text, "images", "vision")
        found["image_token_id"] = config.get("image_token_index", config.get("image_token_id"))
        found["vision_feature_layer"] = config.get("vision_feature_layer")
        found["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
        # As in the reference: tied where either says so.
        found["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        )
        found = {name: value for name, value in found.items() if value is not None}
        width, heads = (
            found.get(name, cls.__dataclass_fields__[name].default)
            for name in ("hidden_size", "num_attention_heads")
        )
        found.setdefault("num_key_value_heads", heads)  # no grouping
        if "head_dim" not in found:
            found["head_dim"] = config_file.head_dim(width, heads)
        cfg = cls(vision=VisionConfig.from_dict(vision), **found)
        tokens = config.get("image_seq_length", cfg.vision.patches)
        if tokens != cfg.vision.patches:
            raise ModelError(
                f"config.json: image_seq_length={tokens}, expected the {cfg.vision.patches} "
                "patches of an image"
            )
        return cfg

    def to_dict(self) -> dict[str, Any]:
        """A config.json in the layout of the published models, for transformers 4 and 5."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision = values.pop("vision")
        top = {
            "image_token_index": values.pop("image_token_id"),
            "vision_feature_layer": values.pop("vision_feature_layer"),
        }
        return {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            **top,
            "image_seq_length": self.vision.patches,
            "vision_feature_select_strategy": "default",
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": {
                "model_type": "llama",
                **values,
                "attention_bias": False,
                "mlp_bias": False,
                "hidden_act": "silu",
            },
            "vision_config": {
                "model_type": "clip_vision_model",
                **vision,
                "hidden_act": "quick_gelu",
                "num_channels": 3,
            },
        }


def _check_computed(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    rope: Mapping[str, Any],
) -> None:
    """Raises ModelError for values that ask for another computation than this family's."""
    layer = config.get("vision_feature_layer")
    several = [f"vision_feature_layer {layer} (computed is one)"] if type(layer) is list else []
    config_file.check_computed(
        (
            "vision_feature_select_strategy",
            config.get("vision_feature_select_strategy", "default"),
            "default",
        ),
        ("projector_hidden_act", config.get("projector_hidden_act", "gelu"), "gelu"),
        ("multimodal_projector_bias", config.get("multimodal_projector_bias", True), True),
        # LLaVA-NeXT's tiles, in a directory that says to be a LLaVA.
        ("image_grid_pinpoints", config.get("image_grid_pinpoints"), None),
        ("text_config.model_type", text.get("model_type", "llama"), "llama"),
        ("text_config: RoPE of type", config_file.rope_type(rope), "default"),
        ("text_config.sliding_window", text.get("sliding_window"), None),
        ("text_config.attention_bias", text.get("attention_bias", False), False),
        ("text_config.mlp_bias", text.get("mlp_bias", False), False),
        ("text_config.hidden_act", text.get("hidden_act", "silu"), "silu"),
        (
            "vision_config.model_type",
            vision.get("model_type", "clip_vision_model"),
            "clip_vision_model",
        ),
        ("vision_config.hidden_act", vision.get("hidden_act", "quick_gelu"), "quick_gelu"),
        ("vision_config.num_channels", vision.get("num_channels", 3), 3),
        problems=several,
    )


def read_model_config(model_dir: Path) -> LlavaConfig:
    """Reads <model_dir>/config.json alone, with published image settings of its size.

    Raises: ModelError.
    """
    cfg = config_file.read_file(model_dir / "config.json", LlavaConfig.from_dict)
    images = dataclasses.replace(cfg.images, side_px=cfg.vision.image_size)
    return dataclasses.replace(cfg, images=images)


def read_config(model_dir: Path) -> LlavaConfig:
    """Reads config.json and the image settings.

    Raises: ModelError: they cannot be read or contradict each other.
    """
    cfg = read_model_config(model_dir)
    images, where = processor_file.read(model_dir, ImageConfig.from_dict)
    check_side(where, images, cfg.vision.image_size)
    return dataclasses.replace(cfg, images=images)


def max_positions(cfg: LlavaConfig) -> int:
    return cfg.max_position_embeddings


def processor_json(cfg: LlavaConfig) -> dict[str, Any]:
    """preprocessor_config.json of an export: with the padding, which the published one lacks."""
    return cfg.images.to_dict()
