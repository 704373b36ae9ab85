"""Screens as Florence-2 sees them: squashed to a square, whatever their shape.

Source: transformers, models/clip/image_processing_pil_clip.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from uirl_jax.families import processor_file

_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
_PROCESSOR = "CLIPImageProcessor"
# What the reference takes where the file leaves a value out.
_DEFAULTS: Mapping[str, Any] = {
    "do_center_crop": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json. Defaults are those of the published models."""

    side_px: int = 768  # of the square that the vision tower takes
    image_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    image_std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        problems = processor_file.number_problems(self)
        if type(self.side_px) is not int or self.side_px < 1:
            problems.append(f"size={self.side_px!r}, expected a positive integer")
        processor_file.check(problems)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ImageConfig":
        """Reads a preprocessor_config.json.

        Raises: ModelError: it belongs to another family, or asks for what is not computed.
        """
        content = {**_DEFAULTS, **content}
        problems = processor_file.problems_of(
            content,
            processors=(_PROCESSOR,),
            resample=_BICUBIC,
            # do_convert_rgb is null in the published files; screens are RGB in any case.
            switches=("do_resize", "do_rescale", "do_normalize"),
        )
        if content["do_center_crop"]:
            problems.append("do_center_crop=true, expected false")
        size = content.get("size")
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
        return {
            "image_processor_type": _PROCESSOR,
            "processor_class": "Florence2Processor",
            "image_seq_length": tokens,
            "do_resize": True,
            "size": square,
            "resample": _BICUBIC,
            "do_center_crop": False,
            "crop_size": square,
            "do_rescale": True,
            "rescale_factor": self.rescale_factor,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "do_convert_rgb": None,
        }
