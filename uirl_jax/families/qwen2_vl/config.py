"""config.json and preprocessor_config.json of Qwen2-VL: reads, checks and writes them.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/configuration_qwen2_vl.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from uirl_jax.errors import ModelError
from uirl_jax.models.directory import read_json

VISION_ROPE_THETA = 10_000.0
_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json.

    A field that the file lacks has the default of transformers' Qwen2VLImageProcessor. The
    published directories of Qwen2-VL have max_pixels=12,845,056 (16,384 visual tokens): a 1280x800
    screen is 1,334 tokens with them and 1,260 with the default.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2  # merge_size**2 patches become one visual token
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @property
    def patch_levels(self) -> int:
        """C, the bytes of one patch of a still image: channels x height x width."""
        return 3 * self.patch_size**2

    @property
    def patch_features(self) -> int:
        """F, the floats of one patch: channels x time x height x width."""
        return self.patch_levels * self.temporal_patch_size

    @classmethod
    def from_dict(cls, preprocessor_config: Mapping[str, Any]) -> "ImageConfig":
        """Reads the fields of this class.

        min_pixels and max_pixels may be fields of their own, as in older files, or shortest_edge
        and longest_edge of `size`.
        Raises: ModelError: the file asks for preprocessing that is not supported.
        """
        for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not preprocessor_config.get(switch, True):
                raise ModelError(f"preprocessor_config.json: {switch}=false is not supported")
        if preprocessor_config.get("resample", _BICUBIC) != _BICUBIC:
            raise ModelError(
                f"preprocessor_config.json: resample={preprocessor_config['resample']}, "
                "expected 3 (bicubic)"
            )
        size = preprocessor_config.get("size") or {}
        found = {
            "min_pixels": size.get("shortest_edge", size.get("min_pixels")),
            "max_pixels": size.get("longest_edge", size.get("max_pixels")),
        }
        for field in dataclasses.fields(cls):
            value = preprocessor_config.get(field.name)
            if value is not None:
                found[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**{name: value for name, value in found.items() if value is not None})

    @classmethod
    def load(cls, model_dir: str | Path) -> "ImageConfig":
        """Reads <model_dir>/preprocessor_config.json. Raises: ModelError."""
        return cls.from_dict(read_json(Path(model_dir) / "preprocessor_config.json"))

    def to_dict(self) -> dict[str, Any]:
        """preprocessor_config.json as transformers' Qwen2-VL processor reads it."""
        values = dataclasses.asdict(self)
        size = {
            "shortest_edge": values.pop("min_pixels"),
            "longest_edge": values.pop("max_pixels"),
        }
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
            "size": size,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": int(_BICUBIC),
        }


def level_values(cfg: ImageConfig) -> np.ndarray:
    """float32[3,256], the normalised value of every level of a channel: a table for pixels."""
    # Rescaled in float64 and normalised in float32, as in the reference.
    level_l = (np.arange(256, dtype=np.float64) * cfg.rescale_factor).astype(np.float32)
    mean_c = np.array(cfg.image_mean, np.float32)
    std_c = np.array(cfg.image_std, np.float32)
    return (level_l[None] - mean_c[:, None]) / std_c[:, None]


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
    images: ImageConfig = ImageConfig()  # of preprocessor_config.json

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
