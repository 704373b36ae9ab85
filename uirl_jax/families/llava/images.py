"""Screens as LLaVA-1.5 sees them: padded to a square, and resized.

The published preprocessor_config.json crops the middle square instead.

Source: transformers, models/llava/image_processing_pil_llava.py with do_pad; the original LLaVA,
llava/mm_utils.py, expand2square.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from PIL import Image

from uirl_jax.actions.coordinates import Margins
from uirl_jax.errors import ImageError
from uirl_jax.families import processor_file
from uirl_jax.families.border import Size

_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
_MAX_SIDE_PX = 8192  # the padded square of this side takes 201 MB for a moment


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json. Defaults are those of the published models."""

    side_px: int = 336  # of the square that the vision tower takes
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    # Whatever the file says: the published one crops the middle square, which shows 62.5 % of the
    # width of a 1280x800 screen, and what a user interface has at its edges is needed. The original
    # LLaVA-1.5 was trained on padded squares.
    pad_to_square: bool = True

    def __post_init__(self) -> None:
        problems = processor_file.number_problems(self)
        if type(self.side_px) is not int or self.side_px < 1:
            problems.append(f"size={self.side_px!r}, expected a positive integer")
        if not self.pad_to_square:
            problems.append("pad_to_square=false is not supported: a crop would hide the edges")
        processor_file.check(problems)

    @property
    def padding_color(self) -> tuple[int, int, int]:
        """Of the margins: the mean, which is normalised to about 0."""
        red, green, blue = (int(255 * mean) for mean in self.image_mean)
        return red, green, blue

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ImageConfig":
        """Reads a preprocessor_config.json but for what it says of crops and padding.

        Raises: ModelError: it belongs to another family, or asks for what is not computed.
        """
        problems = processor_file.problems_of(
            content, processors=("CLIPImageProcessor", "LlavaImageProcessor"), resample=_BICUBIC
        )
        sides = {name: _sides(content[name]) for name in ("size", "crop_size") if content.get(name)}
        found = [side for named in sides.values() for side in named] or [cls.side_px]
        if any(side != found[0] for side in found):
            given = ", ".join(f"{name}={content[name]}" for name in sides)
            problems.append(f"{given}, expected one square")
        processor_file.check(problems)
        return cls(side_px=found[0], **processor_file.numbers(content))

    def to_dict(self) -> dict[str, Any]:
        """preprocessor_config.json with which transformers cuts screens as is done here."""
        side = {"height": self.side_px, "width": self.side_px}
        return {
            "image_processor_type": "LlavaImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_pad": self.pad_to_square,
            "do_resize": True,
            "size": {"shortest_edge": self.side_px},
            "resample": _BICUBIC,
            "do_center_crop": True,  # of a square, so nothing is cut off
            "crop_size": side,
            "do_rescale": True,
            "rescale_factor": self.rescale_factor,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "do_convert_rgb": True,
        }


def _sides(size: Any) -> list[Any]:
    """The lengths that a size of a preprocessor_config.json names."""
    return list(size.values()) if isinstance(size, Mapping) else [size]


def margins(size_px: Size, grid_side: int) -> Margins:
    """What makes a square of a screen, the screen in its middle.

    Args:
      grid_side: patches along a side of the square.
    Raises: ImageError: the shorter side of the screen would be less than a patch.
    """
    width_px, height_px = size_px
    longer, shorter = max(size_px), min(size_px)
    if shorter * grid_side < longer:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected an aspect ratio of at most "
            f"{grid_side} to 1: padded to a square, its shorter side would be less than a patch"
        )
    if longer > _MAX_SIDE_PX:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected at most {_MAX_SIDE_PX} a side: it "
            "is padded to a square"
        )
    left, top = (longer - width_px) // 2, (longer - height_px) // 2
    return Margins(left, top, longer - width_px - left, longer - height_px - top)


def padded(image: Image.Image, cfg: ImageConfig, around: Margins) -> Image.Image:
    """The square of an RGB image with these margins, resized."""
    if any(around):
        side_px = max(image.size)
        square = Image.new("RGB", (side_px, side_px), cfg.padding_color)
        square.paste(image, (around.left, around.top))
        image = square
    if image.width == cfg.side_px:  # resizing to the same size is the identity
        return image
    return image.resize((cfg.side_px, cfg.side_px), Image.Resampling.BICUBIC)
