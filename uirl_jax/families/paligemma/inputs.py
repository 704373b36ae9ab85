"""PaliGemma on the host: a screen is squashed to a square; positions are 1, 2, 3."""

import dataclasses
from typing import ClassVar

from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.images import ImageConfig
from uirl_jax.families.squashed_screens import SquashedInputs


@dataclasses.dataclass(frozen=True)
class PaliGemmaInputs(SquashedInputs):
    """See SquareInputs."""

    images: ImageConfig
    first_position: ClassVar[int] = 1
    prefix_lm = True


def make_inputs(cfg: PaliGemmaConfig) -> PaliGemmaInputs:
    return PaliGemmaInputs(cfg.images, cfg.image_token_id, cfg.vision.grid_side)
