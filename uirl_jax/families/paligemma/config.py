"""config.json of PaliGemma and PaliGemma 2 (3B): reads, checks and writes it.

Source: arXiv:2407.07726, arXiv:2412.03555 and transformers,
models/paligemma/configuration_paligemma.py, with those of models/siglip/, gemma/ and gemma2/.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file, processor_file, vision_config
from uirl_jax.families.paligemma.images import ImageConfig
from uirl_jax.families.square_screens import check_side

# What the reference takes where config.json has no vision_config or text_config.
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
_TEXT: Mapping[str, Any] = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}
# The sizes that the reference's Gemma2Config has otherwise than its GemmaConfig.
_GEMMA2: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA2_ONLY = tuple(_GEMMA2)[5:]
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu")  # the second in old files: the reference reads the first
_IMAGES = ImageConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(vision_config.VisionConfig):
    """The vision tower, a SigLIP without its head."""

    patch_size: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaliGemmaConfig:
    """Both towers and the special tokens. Names are those of Hugging Face's config.json.

    Defaults are those of the reference's GemmaConfig.
    """

    vision: VisionConfig
    text_model_type: str = "gemma"  # or gemma2
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | None = 1
    pad_token_id: int | None = 0
    # Of Gemma 2. The window is of every other layer, the first included; None: none.
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    image_token_id: int = 256000
    images: ImageConfig = _IMAGES  # of the directory's processor file

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}, expected a positive number"
            for name in _GEMMA2_ONLY
            if (value := getattr(self, name)) is not None
            and (type(value) not in (int, float) or not 0 < value < float("inf"))
        ]
        config_file.check(self, self.vision, problems=problems)
        problems += vision_config.tower_problems(self, self.vision)
        config_file.check(problems=problems)

    @property
    def is_gemma2(self) -> bool:
        return self.text_model_type == "gemma2"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "PaliGemmaConfig":
        """Reads a config.json.

        Raises: ModelError: another architecture, or a variant that is not computed (another text or
          vision tower, a pooling head, scaled RoPE, biases, other activations or windows).
        """
        config_file.check_model_type(config, "paligemma")
        given = config.get("text_config")
        text = dict(_TEXT if given is None else given)
        given = config.get("vision_config")
        vision = dict(_VISION if given is None else given)
        rope = config_file.rope_of(text)
        _check_computed(config, text, vision, rope)
        text_model_type = text.get("model_type", "gemma")
        defaults = _GEMMA2 if text_model_type == "gemma2" else {}
        others = () if text_model_type == "gemma2" else _GEMMA2_ONLY
        own = config_file.fields_given(cls, text, "images", "vision", "text_model_type", *others)
        found: dict[str, Any] = {**defaults, **own}
        found |= {name: None for name in _NULLABLE if name in text and text[name] is None}
        found["image_token_id"] = config.get("image_token_index", config.get("image_token_id"))
        found["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
        # As in the reference: what text_config says of it is not read.
        found["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
        found = {n: value for n, value in found.items() if value is not None or n in _NULLABLE}
        cfg = cls(
            vision=VisionConfig.from_dict(vision),
            text_model_type=text_model_type,
            **found,
        )
        # The reference gives the projector this width, whatever vision_config says.
        if (width := config.get("projection_dim", 2048)) != cfg.hidden_size:
            raise ModelError(
                f"config.json: projection_dim={width}, expected the text tower's hidden_size="
                f"{cfg.hidden_size}"
            )
        return cfg

    def to_dict(self) -> dict[str, Any]:
        """A config.json in the layout of the published models, for transformers 4 and 5."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision, model_type = values.pop("vision"), values.pop("text_model_type")
        tokens = self.vision.patches
        if not self.is_gemma2:
            for name in _GEMMA2_ONLY:
                del values[name]
        return {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "image_token_index": values.pop("image_token_id"),
            "hidden_size": self.hidden_size,
            "projection_dim": self.hidden_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": values.pop("tie_word_embeddings"),
            **{name: values[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            "text_config": {
                "model_type": model_type,
                **values,
                "num_image_tokens": tokens,
                "attention_bias": False,
                "hidden_act": _GELU_TANH[0],
                "hidden_activation": _GELU_TANH[0],
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                **vision,
                "projection_dim": self.hidden_size,
                "num_image_tokens": tokens,
                "hidden_act": _GELU_TANH[0],
                "num_channels": 3,
                "vision_use_head": False,
            },
        }


def _check_computed(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    rope: Mapping[str, Any],
) -> None:
    """Raises ModelError for values that ask for another computation than this family's."""
    windows: list[tuple[Any, ...]] = []
    if text.get("model_type") == "gemma2":
        given = text.get("layer_types")
        layers = len(given) if isinstance(given, list) else 0
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
        windows = [("text_config.layer_types", given, None, kinds)]
        most = text.get("num_hidden_layers", _GEMMA2["num_hidden_layers"])
        if isinstance(given, list):
            windows.append(("the number of text_config.layer_types", layers, most))
    config_file.check_computed(
        ("text_config.model_type", text.get("model_type", "gemma"), "gemma", "gemma2"),
        ("text_config: RoPE of type", config_file.rope_type(rope), "default"),
        ("text_config.attention_bias", text.get("attention_bias", False), False),
        ("text_config.hidden_act", text.get("hidden_act"), None, *_GELU_TANH),
        ("text_config.hidden_activation", text.get("hidden_activation"), None, *_GELU_TANH),
        # Of contexts; what is sampled is causal in any case.
        (
            "text_config.use_bidirectional_attention",
            text.get("use_bidirectional_attention"),
            None,
            True,
        ),
        (
            "vision_config.model_type",
            vision.get("model_type", "siglip_vision_model"),
            "siglip_vision_model",
        ),
        ("vision_config.hidden_act", vision.get("hidden_act", _GELU_TANH[0]), _GELU_TANH[0]),
        ("vision_config.num_channels", vision.get("num_channels", 3), 3),
        # A pooling head, whose weights nothing would read. The reference's default has one.
        ("vision_config.vision_use_head", vision.get("vision_use_head", True), False),
        ("tie_word_embeddings", config.get("tie_word_embeddings", True), True, False),
        *windows,
    )


def read_model_config(model_dir: Path) -> PaliGemmaConfig:
    """Reads <model_dir>/config.json alone, with published image settings of its size.

    Raises: ModelError.
    """
    cfg = config_file.read_file(model_dir / "config.json", PaliGemmaConfig.from_dict)
    images = dataclasses.replace(cfg.images, side_px=cfg.vision.image_size)
    return dataclasses.replace(cfg, images=images)


def read_config(model_dir: Path) -> PaliGemmaConfig:
    """Reads config.json and the image settings.

    Raises: ModelError: they cannot be read or contradict each other.
    """
    cfg = read_model_config(model_dir)
    images, where = processor_file.read(model_dir, ImageConfig.from_dict)
    check_side(where, images, cfg.vision.image_size)
    return dataclasses.replace(cfg, images=images)


def max_positions(cfg: PaliGemmaConfig) -> int:
    return cfg.max_position_embeddings
