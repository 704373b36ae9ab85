"""PaliGemma on the host: a screen is squashed to a square; positions are 1, 2, 3."""

import dataclasses
from typing import ClassVar

from PIL import Image

from uirl_jax.actions.coordinates import NO_MARGINS, Margins
from uirl_jax.families.border import Size
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.images import ImageConfig, check_size
from uirl_jax.families.square_screens import SquareInputs


@dataclasses.dataclass(frozen=True)
class PaliGemmaInputs(SquareInputs):
    """See SquareInputs."""

    images: ImageConfig
    first_position: ClassVar[int] = 1

    def margins(self, size_px: Size) -> Margins:
        check_size(size_px)
        return NO_MARGINS

    def square(self, image: Image.Image) -> Image.Image:
        check_size(image.size)
        side_px = self.images.side_px
        if image.size == (side_px, side_px):  # resizing to the same size is the identity
            return image
        return image.resize((side_px, side_px), Image.Resampling.BICUBIC)


def make_inputs(cfg: PaliGemmaConfig) -> PaliGemmaInputs:
    return PaliGemmaInputs(cfg.images, cfg.image_token_id, cfg.vision.grid_side)
