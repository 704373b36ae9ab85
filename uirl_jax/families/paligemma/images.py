"""Screens as PaliGemma sees them: squashed to a square, whatever their shape.

Source: transformers, models/siglip/image_processing_pil_siglip.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from uirl_jax.families import processor_file

_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
_PROCESSOR = "SiglipImageProcessor"


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Image settings of preprocessor_config.json. Defaults are those of the published models."""

    side_px: int = 224  # of the square that the vision tower takes
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
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
        problems = processor_file.problems_of(
            content,
            processors=(_PROCESSOR,),
            resample=_BICUBIC,
            # do_convert_rgb is null in the published files; screens are RGB in any case.
            switches=("do_resize", "do_rescale", "do_normalize"),
        )
        size = content.get("size") or {"height": cls.side_px, "width": cls.side_px}
        sides = size if isinstance(size, Mapping) else {}
        if set(sides) != {"height", "width"} or sides["height"] != sides["width"]:
            problems.append(f"size={size}, expected the height and width of a square")
        processor_file.check(problems)
        return cls(side_px=sides["height"], **processor_file.numbers(content))

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
