"""config.json of Idefics2: reads, checks and writes it.

Source: arXiv:2405.02246 and transformers, models/idefics2/configuration_idefics2.py, with that of
models/mistral/.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.families import config_file, processor_file
from uirl_jax.families.idefics2.images import ImageConfig
from uirl_jax.families.vision_config import VisionConfig, tower_problems

# What the reference takes where config.json has no text_config.
_TEXT: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerceiverConfig:
    """The resampler: latents that read an image. Defaults are the reference's; its width is that of
    the text tower."""

    resampler_n_latents: int = 64
    resampler_depth: int = 3
    resampler_n_heads: int = 16
    resampler_head_dim: int = 96
    num_key_value_heads: int = 4
    rms_norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idefics2Config:
    """Both towers, the resampler and the special tokens. Names are those of config.json.

    Defaults are those of the reference's MistralConfig, which the published model relies on.
    """

    vision: VisionConfig
    perceiver: PerceiverConfig
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096  # no context is longer: see max_positions
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    image_token_id: int = 32001
    images: ImageConfig  # of the directory's processor file

    def __post_init__(self) -> None:
        config_file.check(self, self.vision, self.perceiver)
        problems, perceiver = tower_problems(self, self.vision), self.perceiver
        if perceiver.resampler_n_heads % perceiver.num_key_value_heads:
            problems.append(
                f"perceiver_config: {perceiver.resampler_n_heads} heads are not a multiple of "
                f"num_key_value_heads={perceiver.num_key_value_heads}"
            )
        window = self.sliding_window
        if window is not None and window < 1:
            problems.append(f"sliding_window={window!r}, expected a positive integer or null")
        config_file.check(problems=problems)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Idefics2Config":
        """Reads a config.json.

        Raises: ModelError: another architecture, or a variant that is not computed (another text
          tower, scaled RoPE, no resampler, other activations).
        """
        config_file.check_model_type(config, "idefics2")
        given_text = config.get("text_config")
        text = dict(_TEXT if given_text is None else given_text)
        vision = dict(config.get("vision_config") or {})
        perceiver = dict(config.get("perceiver_config") or {})
        rope = config_file.rope_of(text)
        _check_computed(config, text, vision, perceiver, rope)
        found = config_file.fields_given(cls, text, "images", "vision", "perceiver")
        found["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
        found["image_token_id"] = config.get("image_token_id")
        # As in the reference, unlike LLaVA's: what text_config says of it is not read.
        found["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
        found = {name: value for name, value in found.items() if value is not None}
        if "sliding_window" in text:
            found["sliding_window"] = text["sliding_window"]  # null: none
        width, heads, eps = (
            found.get(name, cls.__dataclass_fields__[name].default)
            for name in ("hidden_size", "num_attention_heads", "rms_norm_eps")
        )
        if "head_dim" not in found:
            found["head_dim"] = config_file.head_dim(width, heads)
        # As in the reference: a resampler of another width has the text tower's width and epsilon.
        if perceiver.get("hidden_size", 4096) != width:
            perceiver["rms_norm_eps"] = eps
        vision_config = VisionConfig.from_dict(vision)
        return cls(
            vision=vision_config,
            perceiver=PerceiverConfig(**config_file.fields_given(PerceiverConfig, perceiver)),
            images=ImageConfig(patch_size=vision_config.patch_size),
            **found,
        )

    def to_dict(self) -> dict[str, Any]:
        """A config.json in the layout of the published model."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision, perceiver = values.pop("vision"), values.pop("perceiver")
        return {
            "architectures": ["Idefics2ForConditionalGeneration"],
            "model_type": "idefics2",
            "image_token_id": values.pop("image_token_id"),
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": {"model_type": "mistral", **values, "hidden_act": "silu"},
            "vision_config": {
                "model_type": "idefics2_vision",
                **vision,
                "hidden_act": "gelu_pytorch_tanh",
                "num_channels": 3,
            },
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "hidden_size": self.hidden_size,
                **perceiver,
                "hidden_act": "silu",
            },
        }


def _check_computed(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    perceiver: Mapping[str, Any],
    rope: Mapping[str, Any],
) -> None:
    """Raises ModelError for values that ask for another computation than this family's."""
    config_file.check_computed(
        ("use_resampler", config.get("use_resampler", True), True),
        ("text_config.model_type", text.get("model_type", "mistral"), "mistral"),
        ("text_config: RoPE of type", config_file.rope_type(rope), "default"),
        ("text_config.hidden_act", text.get("hidden_act", "silu"), "silu"),
        (
            "vision_config.hidden_act",
            vision.get("hidden_act", "gelu_pytorch_tanh"),
            "gelu_pytorch_tanh",
        ),
        ("vision_config.num_channels", vision.get("num_channels", 3), 3),
        # Of the original code, which the published model does not use either.
        (
            "perceiver_config.qk_layer_norms_perceiver",
            perceiver.get("qk_layer_norms_perceiver", False),
            False,
        ),
        ("perceiver_config.hidden_act", perceiver.get("hidden_act", "silu"), "silu"),
    )


def read_model_config(model_dir: Path) -> Idefics2Config:
    """Reads <model_dir>/config.json alone, with published image settings.

    Raises: ModelError.
    """
    return config_file.read_file(model_dir / "config.json", Idefics2Config.from_dict)


def read_config(model_dir: Path) -> Idefics2Config:
    """Reads config.json and the image settings.

    Raises: ModelError: they cannot be read or contradict each other.
    """
    cfg = read_model_config(model_dir)
    patch_size = cfg.vision.patch_size
    images, _ = processor_file.read(model_dir, lambda c: ImageConfig.from_dict(c, patch_size))
    return dataclasses.replace(cfg, images=images)


def max_positions(cfg: Idefics2Config) -> int:
    """Within the window of the text tower's attention every token sees all before it, as here."""
    window = cfg.sliding_window or cfg.max_position_embeddings
    return min(window, cfg.max_position_embeddings)


def processor_json(cfg: Idefics2Config) -> dict[str, Any]:
    """preprocessor_config.json of an export: without splitting, as it was trained here."""
    return cfg.images.to_dict()
