"""LLaVA-1.5 on the host: a screen is padded to a square; positions are 0, 1, 2."""

import dataclasses

from PIL import Image

from uirl_jax.actions.coordinates import Margins
from uirl_jax.families.border import Size
from uirl_jax.families.llava.config import LlavaConfig
from uirl_jax.families.llava.images import ImageConfig, margins, padded
from uirl_jax.families.square_screens import SquareInputs


@dataclasses.dataclass(frozen=True)
class LlavaInputs(SquareInputs):
    """See SquareInputs."""

    images: ImageConfig

    def margins(self, size_px: Size) -> Margins:
        return margins(size_px, self.grid_side)

    def square(self, image: Image.Image) -> Image.Image:
        return padded(image, self.images, self.margins(image.size))


def make_inputs(cfg: LlavaConfig) -> LlavaInputs:
    return LlavaInputs(cfg.images, cfg.image_token_id, cfg.vision.grid_side)
