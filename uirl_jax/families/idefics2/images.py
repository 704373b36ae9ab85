"""Screens as Idefics2 sees them: resized within bounds, cut into patches, never split.

Patches stay bytes until they are on the device (`model`). Pixels right of and below the last whole
patch are dropped, as in the reference.

Source: transformers, models/idefics2/image_processing_pil_idefics2.py and modeling_idefics2.py
(Idefics2VisionEmbeddings).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.families import processor_file
from uirl_jax.families.border import Size
from uirl_jax.families.screens import patches_of

_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR
_MAX_SIDE_PX = 4096


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json. Defaults are those of the published model."""

    patch_size: int = 14  # of config.json
    shortest_px: int = 378  # a shorter side is stretched to it, which distorts narrow screens
    longest_px: int = 980  # a longer one is reduced to it, the other side in proportion
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    # Whatever the file says; the published one says true: a screen is then four quarters and the
    # whole, 320 visual tokens in place of 64 and three times the work.
    split: bool = False

    def __post_init__(self) -> None:
        problems = processor_file.number_problems(self)
        for name in ("patch_size", "shortest_px", "longest_px"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_SIDE_PX:
                problems.append(f"{name}={value!r}, expected an integer from 1 to {_MAX_SIDE_PX}")
        if not problems and not self.patch_size <= self.shortest_px <= self.longest_px:
            problems.append(
                f"size={{'shortest_edge': {self.shortest_px}, 'longest_edge': {self.longest_px}}}, "
                f"expected a patch of {self.patch_size} pixels or more, and no less for the longest"
            )
        if self.split:
            problems.append("do_image_splitting=true is not supported")
        processor_file.check(problems)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], patch_size: int) -> "ImageConfig":
        """Reads a preprocessor_config.json but for what it says of splitting.

        Raises: ModelError: it belongs to another family, or asks for what is not computed.
        """
        problems = processor_file.problems_of(
            content, processors=("Idefics2ImageProcessor",), resample=_BILINEAR
        )
        size = content.get("size", {})
        if not isinstance(size, Mapping) or not size.keys() <= {"shortest_edge", "longest_edge"}:
            problems.append(f"size={size}, expected shortest_edge and longest_edge")
        processor_file.check(problems)
        return cls(
            patch_size=patch_size,
            shortest_px=size.get("shortest_edge", cls.shortest_px),
            longest_px=size.get("longest_edge", cls.longest_px),
            **processor_file.numbers(content),
        )

    def to_dict(self) -> dict[str, Any]:
        """preprocessor_config.json with which transformers cuts screens as is done here."""
        return {
            "image_processor_type": "Idefics2ImageProcessor",
            "processor_class": "Idefics2Processor",
            "do_image_splitting": self.split,
            "do_resize": True,
            "size": {"shortest_edge": self.shortest_px, "longest_edge": self.longest_px},
            "resample": _BILINEAR,
            "do_rescale": True,
            "rescale_factor": self.rescale_factor,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "do_pad": True,
            "do_convert_rgb": True,
        }


def resized(size_px: Size, cfg: ImageConfig) -> Size:
    """Width and height of the image that is cut into patches.

    Raises: ImageError: the shorter side would be less than a patch before it is stretched.
    """
    width_px, height_px = size_px
    longest_patches = cfg.longest_px // cfg.patch_size
    if min(size_px) * longest_patches < max(size_px):
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected an aspect ratio of at most "
            f"{longest_patches} to 1"
        )
    ratio = width_px / height_px
    if width_px >= height_px and width_px > cfg.longest_px:
        width_px = cfg.longest_px
        height_px = int(width_px / ratio)
    elif height_px > width_px and height_px > cfg.longest_px:
        height_px = cfg.longest_px
        width_px = int(height_px * ratio)
    return max(width_px, cfg.shortest_px), max(height_px, cfg.shortest_px)


def patch_grid(image_px: Size, patch_size: int) -> tuple[int, int]:
    """Rows and columns of whole patches in a resized image."""
    width_px, height_px = image_px
    return height_px // patch_size, width_px // patch_size


def cut_image(image: Image.Image, cfg: ImageConfig) -> np.ndarray:
    """uint8[P,C], the patches of an image, row by row; C is (channel, height, width).

    Raises: ImageError: see resized.
    """
    image_px = resized(image.size, cfg)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != image_px:  # resizing to the same size is the identity
        image = image.resize(image_px, Image.Resampling.BILINEAR)
    return patches_of(np.asarray(image).transpose(2, 0, 1), cfg.patch_size)


def position_ids(grid: tuple[int, int], table_side: int) -> np.ndarray:
    """int32[P], the row of the position table of each patch: the table is of a square, and a patch
    takes the entry in which its upper left corner lies, as a fraction of the image."""
    first, second = (_buckets(count, table_side) for count in grid)
    return (first[:, None] * table_side + second[None]).astype(np.int32).ravel()


def _buckets(count: int, table_side: int) -> np.ndarray:
    """In the reference's float32: in exact numbers a corner on a boundary may fall elsewhere."""
    boundaries = np.arange(1 / table_side, 1.0, 1 / table_side).astype(np.float32)
    step = np.float32(1.0) / np.float32(count)
    corners = np.arange(count, dtype=np.float32) * step
    return np.searchsorted(boundaries, np.minimum(corners, np.float32(1.0 - 1e-6)), side="right")
