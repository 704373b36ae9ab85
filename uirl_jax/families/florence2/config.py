"""config.json of Florence-2 in transformers' own layout: reads, checks and writes it.

Source: arXiv:2311.06242 and transformers, models/florence2/configuration_florence2.py, with that of
models/bart/.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file, processor_file
from uirl_jax.families.florence2.images import ImageConfig

STAGES = 4  # of the vision tower
_PER_STAGE = (
    *("depths", "embed_dim", "num_heads", "num_groups"),
    *("patch_size", "patch_stride", "patch_padding", "patch_prenorm"),
)
_IMAGES = ImageConfig()
_REMOTE_CODE = (
    "the layout of Microsoft's own code; take a conversion such as "
    "florence-community/Florence-2-large"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower, a DaViT of four stages. Names and defaults are the reference's."""

    depths: tuple[int, ...] = (1, 1, 9, 1)  # blocks
    embed_dim: tuple[int, ...] = (128, 256, 512, 1024)
    num_heads: tuple[int, ...] = (4, 8, 16, 32)  # of attention within windows
    num_groups: tuple[int, ...] = (4, 8, 16, 32)  # of attention between channels
    patch_size: tuple[int, ...] = (7, 3, 3, 3)  # of the convolution before a stage
    patch_stride: tuple[int, ...] = (4, 2, 2, 2)
    patch_padding: tuple[int, ...] = (3, 1, 1, 1)
    patch_prenorm: tuple[bool, ...] = (False, True, True, True)  # its norm stands before it
    window_size: int = 12
    mlp_ratio: float = 4.0
    max_position_embeddings: int = 50  # rows, and columns, of the last stage
    max_temporal_embeddings: int = 100

    @property
    def patch_px(self) -> int:
        """Side of what becomes one place of the last stage."""
        return math.prod(self.patch_stride)

    def mlp_width(self, stage: int) -> int:
        return int(self.embed_dim[stage] * self.mlp_ratio)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "VisionConfig":
        """The fields of this class; others are passed over."""
        found = config_file.fields_given(cls, content)
        per_stage = {name: tuple(found[name]) for name in _PER_STAGE if name in found}
        return cls(**{**found, **per_stage})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Florence2Config:
    """Vision tower, encoder, decoder and the special tokens.

    Names are those of BART's config.json but for hidden_size, its d_model; defaults are the
    reference's BartConfig's.
    """

    vision: VisionConfig
    vocab_size: int = 50265
    hidden_size: int = 1024
    encoder_layers: int = 12
    encoder_ffn_dim: int = 4096
    encoder_attention_heads: int = 16
    decoder_layers: int = 12
    decoder_ffn_dim: int = 4096
    decoder_attention_heads: int = 16
    max_position_embeddings: int = 1024  # of either tower
    scale_embedding: bool = False  # embeddings of words are multiplied by the root of hidden_size
    init_std: float = 0.02  # of the embeddings; projections scale with their width
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2
    image_token_id: int = 51289
    images: ImageConfig = _IMAGES  # of the directory's processor file

    def __post_init__(self) -> None:
        config_file.check(
            self,
            self.vision,
            problems=_vision_problems(self.vision),
            signed=("bos_token_id", "pad_token_id"),
        )
        heads = [
            f"{name}={count} does not divide d_model={self.hidden_size}"
            for name in ("encoder_attention_heads", "decoder_attention_heads")
            if self.hidden_size % (count := getattr(self, name))
        ]
        config_file.check(problems=heads)

    @property
    def grid_side(self) -> int:
        """Places of the last stage along a side of a screen."""
        return self.images.side_px // self.vision.patch_px

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Florence2Config":
        """Reads a config.json.

        Raises: ModelError: another architecture, or a variant that is not computed.
        """
        config_file.check_model_type(config, "florence2")
        text = dict(config.get("text_config") or {})
        vision = dict(config.get("vision_config") or {})
        if text.get("model_type", "bart") == "florence2_language":
            raise ModelError(
                "config.json: text_config.model_type 'florence2_language' is not supported: "
                f"{_REMOTE_CODE}"
            )
        _check_computed(config, text, vision)
        found = config_file.fields_given(cls, text, "images", "vision", "hidden_size")
        if isinstance(text.get("eos_token_id"), list):  # one token begins and ends its decoder
            found["eos_token_id"] = text["eos_token_id"]
        found["hidden_size"] = text.get("d_model", cls.hidden_size)
        if config.get("image_token_id") is not None:
            found["image_token_id"] = config["image_token_id"]
        cfg = cls(vision=VisionConfig.from_dict(vision), **found)
        if (width := vision.get("projection_dim", 1024)) != cfg.hidden_size:
            raise ModelError(
                f"config.json: vision_config.projection_dim={width}, expected d_model="
                f"{cfg.hidden_size}"
            )
        start = text.get("decoder_start_token_id", 2)
        if start != cfg.eos_token_id:
            raise ModelError(
                f"config.json: text_config.decoder_start_token_id={start}, expected eos_token_id="
                f"{cfg.eos_token_id}: other decoders begin with another token"
            )
        return cfg

    def to_dict(self) -> dict[str, Any]:
        """A config.json in transformers' own layout."""
        values = dataclasses.asdict(self)
        del values["images"]
        vision = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.pop("vision").items()
        }
        ids = {name: values[name] for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
        return {
            "architectures": ["Florence2ForConditionalGeneration"],
            "model_type": "florence2",
            "is_encoder_decoder": True,
            "image_token_id": values.pop("image_token_id"),
            "tie_word_embeddings": True,
            **ids,
            "text_config": {
                "model_type": "bart",
                "d_model": values.pop("hidden_size"),
                **values,
                "activation_function": "gelu",
                "decoder_start_token_id": self.eos_token_id,
                "is_encoder_decoder": True,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "florence_vision",
                **vision,
                "projection_dim": self.hidden_size,
                "in_channels": 3,
                "qkv_bias": True,
                "activation_function": "gelu",
            },
        }


def _vision_problems(vision: VisionConfig) -> list[str]:
    """Sizes that contradict each other, in words."""
    problems = []
    for name in _PER_STAGE:
        values, least = getattr(vision, name), int(name != "patch_padding")
        kind = bool if name == "patch_prenorm" else int
        if (
            not isinstance(values, tuple)
            or len(values) != STAGES
            or any(type(value) is not kind or (kind is int and value < least) for value in values)
        ):
            problems.append(
                f"vision_config.{name}={values!r}, expected {STAGES} of {kind.__name__}"
            )
    if problems:
        return problems
    for stage, (kernel, stride, padding) in enumerate(
        zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True)
    ):
        width = vision.embed_dim[stage]
        problems += [
            f"vision_config.{name}={count} of stage {stage} does not divide its width of {width}"
            for name in ("num_heads", "num_groups")
            if width % (count := getattr(vision, name)[stage])
        ]
        if not kernel - stride <= 2 * padding < kernel:
            problems.append(
                f"vision_config: stage {stage} makes no whole number of its stride of {stride} "
                f"with patch_size={kernel} and patch_padding={padding}"
            )
    return problems


def _check_computed(
    config: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]
) -> None:
    """Raises ModelError for values that ask for another computation than this family's."""
    config_file.check_computed(
        ("text_config.model_type", text.get("model_type", "bart"), "bart"),
        ("text_config.activation_function", text.get("activation_function", "gelu"), "gelu"),
        ("text_config.scale_embedding", text.get("scale_embedding", False), True, False),
        ("vision_config.model_type", vision.get("model_type"), None, "florence_vision"),
        ("vision_config.activation_function", vision.get("activation_function", "gelu"), "gelu"),
        ("vision_config.qkv_bias", vision.get("qkv_bias", True), True),
        ("vision_config.in_channels", vision.get("in_channels", 3), 3),
        ("tie_word_embeddings", config.get("tie_word_embeddings", True), True),
    )


def read_model_config(model_dir: Path) -> Florence2Config:
    """Reads <model_dir>/config.json alone, with the published image settings.

    Raises: ModelError.
    """
    return config_file.read_file(model_dir / "config.json", Florence2Config.from_dict)


def read_config(model_dir: Path) -> Florence2Config:
    """Reads config.json and the image settings.

    Raises: ModelError: they cannot be read or contradict each other.
    """
    cfg = read_model_config(model_dir)
    (images, tokens_said), where = processor_file.read(
        model_dir, lambda content: (ImageConfig.from_dict(content), content.get("image_seq_length"))
    )
    cfg = dataclasses.replace(cfg, images=images)
    side_px, vision = cfg.images.side_px, cfg.vision
    problem = ""
    if side_px % vision.patch_px:
        problem = f"expected a multiple of the {vision.patch_px} pixels of config.json's strides"
    elif cfg.grid_side > vision.max_position_embeddings:
        most = vision.max_position_embeddings * vision.patch_px
        problem = f"config.json has positions of {most} pixels"
    if problem:
        raise ModelError(f"{where}: squares of {side_px} pixels, {problem}")
    tokens = 1 + cfg.grid_side**2
    if tokens_said not in (None, tokens):
        raise ModelError(
            f"{where}: image_seq_length={tokens_said}, but a screen is {tokens} visual tokens: it "
            "belongs to another model; take the file of this model's directory"
        )
    return cfg


def max_positions(cfg: Florence2Config) -> int:
    """Of a context and what is sampled together, although either tower has so many."""
    return cfg.max_position_embeddings
