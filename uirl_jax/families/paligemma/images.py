"""Screens as PaliGemma sees them: squashed to a square, whatever their shape, cut into patches.

Patches stay bytes until they are on the device (`model.pixel_values`).

Source: transformers, models/siglip/image_processing_pil_siglip.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError, ModelError
from uirl_jax.families.border import Size

_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
_PROCESSOR = "SiglipImageProcessor"
_VARIANTS = ("", "Fast", "Pil")  # of the same processor, by its backend
_MAX_ASPECT = 20  # of a screen: one of 1:20 is squashed to a pixel of every 20


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json. Defaults are those of the published models."""

    side_px: int = 224  # of the square that the vision tower takes
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}, expected three numbers"
            for name, value in (("image_mean", self.image_mean), ("image_std", self.image_std))
            if not (isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value)))
        ]
        if type(self.side_px) is not int or self.side_px < 1:
            problems.append(f"size={self.side_px!r}, expected a positive integer")
        if not _is_number(self.rescale_factor):
            problems.append(f"rescale_factor={self.rescale_factor!r}, expected a number")
        if problems:
            raise ModelError(f"preprocessor_config.json: {'; '.join(problems)}")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ImageConfig":
        """Reads a preprocessor_config.json.

        Raises: ModelError: it belongs to another family, or asks for what is not computed.
        """
        # do_convert_rgb is null in the published files; screens are RGB in any case.
        problems = [
            f"{switch}=false"
            for switch in ("do_resize", "do_rescale", "do_normalize")
            if not content.get(switch, True)
        ]
        if content.get("resample", _BICUBIC) != _BICUBIC:
            problems.append(f"resample={content['resample']}, expected 3 (bicubic)")
        known = [_PROCESSOR + variant for variant in _VARIANTS]
        if content.get("image_processor_type", _PROCESSOR) not in known:
            problems.append(
                f"image_processor_type={content['image_processor_type']!r}, expected {_PROCESSOR}: "
                "it belongs to another model; take the file of this model's directory"
            )
        size = content.get("size") or {"height": cls.side_px, "width": cls.side_px}
        sides = size if isinstance(size, Mapping) else {}
        if set(sides) != {"height", "width"} or sides["height"] != sides["width"]:
            problems.append(f"size={size}, expected the height and width of a square")
        if problems:
            raise ModelError(f"preprocessor_config.json: {'; '.join(problems)}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value := content[name], list) else value
            for name in ("image_mean", "image_std", "rescale_factor")
            if content.get(name) is not None
        }
        return cls(side_px=sides["height"], **values)

    def to_dict(self, tokens: int) -> dict[str, Any]:
        """preprocessor_config.json with which transformers cuts screens as is done here.

        Args: tokens: visual tokens of a screen.
        """
        return {
            "image_processor_type": _PROCESSOR,
            "processor_class": "PaliGemmaProcessor",
            "image_seq_length": tokens,
            "do_resize": True,
            "size": {"height": self.side_px, "width": self.side_px},
            "resample": _BICUBIC,
            "do_rescale": True,
            "rescale_factor": self.rescale_factor,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "do_convert_rgb": None,
        }


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def check_size(size_px: Size) -> None:
    """Raises: ImageError for a screen of which the square would show next to nothing."""
    longer, shorter = max(size_px), min(size_px)
    if shorter * _MAX_ASPECT < longer:
        width_px, height_px = size_px
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected an aspect ratio of at most "
            f"{_MAX_ASPECT} to 1: it is squashed to a square"
        )


def cut_image(image: Image.Image, cfg: ImageConfig, grid_side: int) -> np.ndarray:
    """uint8[P,C], the patches of an image, row by row; C is (channel, height, width).

    Raises: ImageError: see check_size.
    """
    check_size(image.size)
    if image.mode != "RGB":
        image = image.convert("RGB")
    square_px = (cfg.side_px, cfg.side_px)
    if image.size != square_px:  # resizing to the same size is the identity
        image = image.resize(square_px, Image.Resampling.BICUBIC)
    return patches_of(np.asarray(image).transpose(2, 0, 1), grid_side)


def patches_of(image_chw: np.ndarray, grid_side: int) -> np.ndarray:
    """[P,C] of a square image."""
    patch_px = image_chw.shape[-1] // grid_side
    blocks = image_chw.reshape(3, grid_side, patch_px, grid_side, patch_px)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(grid_side**2, 3 * patch_px**2)
