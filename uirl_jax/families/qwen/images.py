"""preprocessor_config.json, and screens cut into patches by it, as transformers' processor does.

Patches stay bytes, one frame each, until they are on the device (`model.pixel_values`). Engine,
learner and tools use the same functions, so that actor and learner see the same numbers.

Source: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.families import processor_file
from uirl_jax.families.pixel_levels import level_values

Grid = tuple[int, int, int]  # patches in time, height and width

_MAX_ASPECT_RATIO = 200  # of smart_resize in the reference implementation
_SIZES = ("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels")
_BOUNDS = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}  # in `size`
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

    def __post_init__(self) -> None:
        problems = processor_file.number_problems(self)
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                problems.append(f"{name}={value!r}, expected a positive integer")
        if not problems and self.min_pixels > self.max_pixels:
            problems.append(
                f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}"
            )
        processor_file.check(problems)

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
        problems = [
            f"{switch}=false is not supported"
            for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
            if not preprocessor_config.get(switch, True)
        ]
        if (resample := preprocessor_config.get("resample", _BICUBIC)) != _BICUBIC:
            problems.append(f"resample={resample!r}, expected 3 (bicubic)")
        size = preprocessor_config.get("size") or {}
        if not isinstance(size, Mapping) or not size.keys() <= _BOUNDS:
            problems.append(f"size={size!r}, expected shortest_edge and longest_edge")
        processor_file.check(problems)
        found = {
            "min_pixels": size.get("shortest_edge", size.get("min_pixels")),
            "max_pixels": size.get("longest_edge", size.get("max_pixels")),
        }
        own = {name: preprocessor_config.get(name) for name in _SIZES}
        found |= {name: value for name, value in own.items() if value is not None}
        found |= processor_file.numbers(preprocessor_config)
        return cls(**{name: value for name, value in found.items() if value is not None})

    @classmethod
    def load(cls, model_dir: str | Path) -> "ImageConfig":
        """Reads the image settings of a directory. Raises: ModelError."""
        return processor_file.read(Path(model_dir), cls.from_dict)[0]

    def to_dict(self, processor_class: str = "Qwen2VLProcessor") -> dict[str, Any]:
        """preprocessor_config.json as transformers reads it.

        Args:
          processor_class: of the family, in transformers; the image processor is one for all.
        """
        values = dataclasses.asdict(self)
        size = {
            "shortest_edge": values.pop("min_pixels"),
            "longest_edge": values.pop("max_pixels"),
        }
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
            "size": size,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": processor_class,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": int(_BICUBIC),
        }


def smart_resize(
    height_px: int, width_px: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) that an image is resized to: multiples of factor, within the pixel limits.

    Raises: ImageError: the aspect ratio is above 200 to 1.
    Source: transformers, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
    """
    ratio = max(height_px, width_px) / max(min(height_px, width_px), 1)
    if min(height_px, width_px) < 1 or ratio > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected an aspect ratio of at most "
            f"{_MAX_ASPECT_RATIO} to 1"
        )
    height = round(height_px / factor) * factor
    width = round(width_px / factor) * factor
    if height * width > max_pixels:
        beta = math.sqrt((height_px * width_px) / max_pixels)
        height = max(factor, math.floor(height_px / beta / factor) * factor)
        width = max(factor, math.floor(width_px / beta / factor) * factor)
    elif height * width < min_pixels:
        beta = math.sqrt(min_pixels / (height_px * width_px))
        height = math.ceil(height_px * beta / factor) * factor
        width = math.ceil(width_px * beta / factor) * factor
    return height, width


def image_grid(size_px: tuple[int, int], cfg: ImageConfig) -> Grid:
    """Grid of a (width, height) image after resizing. Raises: ImageError: see smart_resize."""
    factor = cfg.patch_size * cfg.merge_size
    width_px, height_px = size_px
    height_px, width_px = smart_resize(height_px, width_px, factor, cfg.min_pixels, cfg.max_pixels)
    return 1, height_px // cfg.patch_size, width_px // cfg.patch_size


def cut_image(image: Image.Image, cfg: ImageConfig) -> tuple[np.ndarray, Grid]:
    """Resizes an image and cuts it into patches.

    Returns:
      patches_pc: uint8[P,C]; the merge_size**2 patches of one visual token are consecutive, and C
        is (channel, height, width).
      grid_thw: (1, height, width) in patches.
    Source: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py.
    """
    if image.mode != "RGB":
        image = image.convert("RGB")
    _, grid_h, grid_w = grid_thw = image_grid(image.size, cfg)
    size_px = grid_w * cfg.patch_size, grid_h * cfg.patch_size
    if size_px != image.size:  # resizing to the same size is the identity
        image = image.resize(size_px, Image.Resampling.BICUBIC)
    blocks = (
        np.asarray(image)
        .reshape(
            grid_h // cfg.merge_size,
            cfg.merge_size,
            cfg.patch_size,
            grid_w // cfg.merge_size,
            cfg.merge_size,
            cfg.patch_size,
            3,
        )
        .transpose(0, 3, 1, 4, 6, 2, 5)
    )  # block row, block column, row, column, channel, then pixels
    return blocks.reshape(grid_h * grid_w, cfg.patch_levels), grid_thw


def pixel_values(patches_pc: np.ndarray, cfg: ImageConfig) -> np.ndarray:
    """The vision tower's input, on the host; `model.pixel_values` is the same on the device.

    Returns: float32[P,F]; F is (channel, time, height, width), the still image repeated in time.
    """
    table_cl = level_values(cfg)
    area = cfg.patch_size**2
    levels_pcx = patches_pc.reshape(-1, 3, area)
    values_pctx = np.empty((len(levels_pcx), 3, cfg.temporal_patch_size, area), np.float32)
    for c in range(3):
        values_pctx[:, c] = table_cl[c][levels_pcx[:, c]][:, None]
    return values_pctx.reshape(len(levels_pcx), cfg.patch_features)


def num_visual_tokens(grid_thw: Grid, merge_size: int) -> int:
    """Tokens of an image in the text: its patches / merge_size**2."""
    t, h, w = grid_thw
    return t * (h // merge_size) * (w // merge_size)
