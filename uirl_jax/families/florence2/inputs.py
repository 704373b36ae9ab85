"""Florence-2 on the host: a screen is squashed to a square; positions say encoder or decoder.

A context of the project holds what the encoder reads, then what the decoder begins with (`chat`).
Both count positions from 0; those of the decoder's tokens have DECODER added, so that a position
tells which tower its token belongs to. Three visual tokens v, of a context and two sampled tokens:

    v v v <s> Go </s> </s>  <s>  yes  </s>
    0 1 2  3   4   5   D+0  D+1  D+2  D+3
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from uirl_jax.families.border import Screen
from uirl_jax.families.florence2.config import Florence2Config
from uirl_jax.families.florence2.images import ImageConfig
from uirl_jax.families.squashed_screens import SquashedInputs

DECODER = 2**20  # far beyond the positions of an encoder
OPENING = 2  # tokens of a context that the decoder reads


@dataclasses.dataclass(frozen=True)
class Florence2Inputs(SquashedInputs):
    """See SquareInputs. A screen's first visual token is the mean of all others."""

    images: ImageConfig
    end_token_id: int  # ends what the encoder reads, and opens what the decoder does
    more_tokens: ClassVar[int] = 1
    prefix_lm = True

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        """int32[1,T]. The decoder's tokens are those behind the first two end tokens that touch,
        the second of which is one of them; without such the encoder reads all."""
        positions_at = super().positions(token_ids_t, screens)
        is_end_t = np.asarray(token_ids_t) == self.end_token_id
        starts = 1 + np.flatnonzero(is_end_t[:-1] & is_end_t[1:])
        if starts.size:
            positions_at[:, starts[0] :] += DECODER - starts[0]
        return positions_at


def make_inputs(cfg: Florence2Config) -> Florence2Inputs:
    return Florence2Inputs(cfg.images, cfg.image_token_id, cfg.grid_side, cfg.eos_token_id)
