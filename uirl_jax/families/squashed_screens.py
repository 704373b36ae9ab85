"""Whole screens squashed to squares, whatever their shape (PaliGemma, Florence-2).

The settings of the image processor, as a family's preprocessor_config.json says them, and the
screens. numpy and Pillow.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from PIL import Image

from uirl_jax.actions.coordinates import NO_MARGINS, Margins
from uirl_jax.errors import ImageError
from uirl_jax.families import processor_file
from uirl_jax.families.border import Size
from uirl_jax.families.square_screens import SquareInputs

_MAX_ASPECT = 20  # a screen of 1:20 keeps a pixel of every 20


@dataclasses.dataclass(frozen=True)
class SquashedImages:
    """Image settings of preprocessor_config.json; a family's defaults are its published models'.

    Attributes:
      side_px: of the square that the vision tower takes.
      image_processor, processor: classes in transformers, of images alone and with a tokenizer.
      assumed: what the reference takes where the file leaves a value out.
      crops: the reference would crop, unless the file says otherwise.
    """

    side_px: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    image_processor: ClassVar[str]
    processor: ClassVar[str]
    assumed: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    crops: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = processor_file.number_problems(self)
        if type(self.side_px) is not int or self.side_px < 1:
            problems.append(f"size={self.side_px!r}, expected a positive integer")
        processor_file.check(problems)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Reads a preprocessor_config.json.

        Raises: ModelError: it belongs to another family, or asks for what is not computed.
        """
        content = {**cls.assumed, **content}
        problems = processor_file.problems_of(
            content,
            processors=(cls.image_processor,),
            resample=int(Image.Resampling.BICUBIC),
            # do_convert_rgb may be null in published files; screens are RGB in any case.
            switches=("do_resize", "do_rescale", "do_normalize"),
        )
        if content.get("do_center_crop", cls.crops):
            problems.append("do_center_crop=true, expected false")
        size = content.get("size") or cls.assumed.get("size")
        sides = size if isinstance(size, Mapping) else {}
        if set(sides) != {"height", "width"} or sides["height"] != sides["width"]:
            problems.append(f"size={size}, expected the height and width of a square")
        processor_file.check(problems)
        return cls(side_px=sides["height"], **processor_file.numbers(content))

    def to_dict(self, tokens: int) -> dict[str, Any]:
        """preprocessor_config.json with which transformers cuts screens as is done here.

        Args: tokens: visual tokens of a screen.
        """
        square = {"height": self.side_px, "width": self.side_px}
        cropping = {"do_center_crop": False, "crop_size": square} if self.crops else {}
        return {
            "image_processor_type": self.image_processor,
            "processor_class": self.processor,
            "image_seq_length": tokens,
            "do_resize": True,
            "size": square,
            "resample": int(Image.Resampling.BICUBIC),
            **cropping,
            "do_rescale": True,
            "rescale_factor": self.rescale_factor,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "do_convert_rgb": None,
        }


@dataclasses.dataclass(frozen=True)
class SquashedInputs(SquareInputs):
    """Squares of whole screens, whatever their shape."""

    def margins(self, size_px: Size) -> Margins:
        longer, shorter = max(size_px), min(size_px)
        if shorter * _MAX_ASPECT < longer:
            width_px, height_px = size_px
            raise ImageError(
                f"image of {width_px}x{height_px} pixels, expected an aspect ratio of at most "
                f"{_MAX_ASPECT} to 1: it is squashed to a square"
            )
        return NO_MARGINS

    def square(self, image: Image.Image) -> Image.Image:
        self.margins(image.size)
        side_px = self.images.side_px
        if image.size == (side_px, side_px):  # resizing to the same size is the identity
            return image
        return image.resize((side_px, side_px), Image.Resampling.BICUBIC)
