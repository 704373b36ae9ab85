"""Screens as Florence-2 sees them: squashed to a square, whatever their shape.

Source: transformers, models/clip/image_processing_pil_clip.py.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from uirl_jax.families.squashed_screens import SquashedImages


@dataclasses.dataclass(frozen=True)
class ImageConfig(SquashedImages):
    """See SquashedImages."""

    side_px: int = 768
    image_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    image_std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    image_processor: ClassVar[str] = "CLIPImageProcessor"
    processor: ClassVar[str] = "Florence2Processor"
    assumed: ClassVar[Mapping[str, Any]] = types.MappingProxyType(
        {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    )
    crops: ClassVar[bool] = True
