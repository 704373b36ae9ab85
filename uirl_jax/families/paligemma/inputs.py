"""PaliGemma on the host: every screen is a square in a row of its own; positions are 1, 2, 3."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image

from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.images import (
    ImageConfig,
    check_size,
    cut_image,
    patches_of,
)


@dataclasses.dataclass(frozen=True)
class PaliGemmaInputs:
    """See border.Inputs. A screen's array is patches_pc, uint8[P,C]."""

    images: ImageConfig
    image_token_id: int
    grid_side: int  # patches along a side; each is a visual token
    position_axes = 1
    shares_rows = False

    @property
    def tokens(self) -> int:
        """Visual tokens of a screen, one for each of its patches."""
        return self.grid_side**2

    def plan_screen(self, size_px: Size) -> Screen:
        check_size(size_px)
        return dataclasses.replace(self._square, size_px=size_px)

    def cut_screen(self, image: Image.Image) -> Screen:
        patches_pc = cut_image(image, self.images, self.grid_side)
        return dataclasses.replace(self.plan_screen(image.size), arrays={"patches_pc": patches_pc})

    @property
    def _square(self) -> Screen:
        side_px = self.images.side_px
        return Screen("", (0, 0), (side_px, side_px), tokens=self.tokens, patches=self.tokens)

    def row_tokens(self, row_patches: int) -> int:
        if row_patches < self.tokens:
            raise ConfigError(
                f"a row of {row_patches} patches: a screen has {self.tokens}; set "
                f"engine.image_row_patches and learner.batch.patch_lengths to {self.tokens}"
            )
        return self.tokens

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        """patches_ipc: uint8[I,P,C]. A row is never longer than a screen."""
        self.row_tokens(row_patches)
        levels = 3 * (self.images.side_px // self.grid_side) ** 2
        patches_ipc = np.zeros((rows, self.tokens, levels), np.uint8)
        for screen, row, _, _ in placed:
            if screen.arrays is not None:
                patches_ipc[row] = screen.arrays["patches_pc"]
        first_tokens = [place.row * self.tokens for place in placed]
        return PackedScreens({"patches_ipc": patches_ipc}, first_tokens)

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        found = np.count_nonzero(np.asarray(token_ids_t) == self.image_token_id)
        if found != self.tokens * len(screens):
            raise ImageError(
                f"{found} image tokens, expected {self.tokens} for each of {len(screens)} screens"
            )
        return np.arange(1, len(token_ids_t) + 1, dtype=np.int32)[None]

    def next_position(self, positions_at: np.ndarray) -> int:
        return int(positions_at.max(initial=0)) + 1

    def from_processor(
        self, *, pixel_values: np.ndarray | None = None, **more: np.ndarray
    ) -> tuple[list[Screen], PackedScreens]:
        """Screens without pixels, and the arrays of the images, each in a row of its own.

        Args:
          pixel_values: float[N,3,S,S], squares of side_px.
          more: refused.
        """
        if more or pixel_values is None:
            raise ImageError(
                f"of images got {sorted(more)}, expected pixel_values alone; videos are not "
                "supported"
            )
        side_px = self.images.side_px
        if pixel_values.shape[1:] != (3, side_px, side_px):
            raise ImageError(
                f"pixel_values of shape {pixel_values.shape}, expected (images, 3, {side_px}, "
                f"{side_px}): another model's processor made it"
            )
        pixels_ipf = np.zeros(
            (len(pixel_values), self.tokens, 3 * (side_px // self.grid_side) ** 2), np.float32
        )
        for row, image_chw in enumerate(pixel_values):
            pixels_ipf[row] = patches_of(image_chw, self.grid_side)
        first_tokens = [row * self.tokens for row in range(len(pixel_values))]
        screens = [self._square] * len(pixel_values)
        return screens, PackedScreens({"pixels_ipf": pixels_ipf}, first_tokens)


def make_inputs(cfg: PaliGemmaConfig) -> PaliGemmaInputs:
    return PaliGemmaInputs(cfg.images, cfg.image_token_id, cfg.vision.grid_side)
