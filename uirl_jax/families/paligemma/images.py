"""Screens as PaliGemma sees them: squashed to a square, whatever their shape.

Source: transformers, models/siglip/image_processing_pil_siglip.py.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from uirl_jax.families.squashed_screens import SquashedImages


@dataclasses.dataclass(frozen=True)
class ImageConfig(SquashedImages):
    """See SquashedImages."""

    side_px: int = 224
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_processor: ClassVar[str] = "SiglipImageProcessor"
    processor: ClassVar[str] = "PaliGemmaProcessor"
    assumed: ClassVar[Mapping[str, Any]] = types.MappingProxyType(
        {"size": {"height": 224, "width": 224}}
    )
