"""Every screen becomes 32 x 32 pixels in 16 patches: 16 visual tokens. Positions are 0, 1, 2."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image

from tests.toy_family.config import ToyConfig
from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size

TOKENS, SIDE_PX, PATCH_PX = 16, 32, 8


class ToyInputs:
    """See border.Inputs."""

    position_axes = 1
    shares_rows = False

    def __init__(self, cfg: ToyConfig) -> None:
        self.image_token_id = cfg.image_token_id

    def plan_screen(self, size_px: Size) -> Screen:
        return Screen("", size_px, (SIDE_PX, SIDE_PX), tokens=TOKENS, patches=TOKENS)

    def cut_screen(self, image: Image.Image) -> Screen:
        pixels = np.asarray(image.resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR))
        side = SIDE_PX // PATCH_PX
        blocks = pixels.reshape(side, PATCH_PX, side, PATCH_PX, 3).swapaxes(1, 2)
        arrays = {"patches_pc": blocks.reshape(TOKENS, -1)}
        return dataclasses.replace(self.plan_screen(image.size), arrays=arrays)

    def row_tokens(self, row_patches: int) -> int:
        if row_patches < TOKENS:
            raise ConfigError(f"a row of {row_patches} patches: a screen has {TOKENS}")
        return TOKENS

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        patches_ipc = np.zeros((rows, TOKENS, 3 * PATCH_PX**2), np.uint8)
        for screen, row, _, _ in placed:
            if screen.arrays is not None:
                patches_ipc[row] = screen.arrays["patches_pc"]
        return PackedScreens({"patches_ipc": patches_ipc}, [place.row * TOKENS for place in placed])

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        found = np.count_nonzero(token_ids_t == self.image_token_id)
        if found != TOKENS * len(screens):
            raise ImageError(f"{found} image tokens for {len(screens)} screens of {TOKENS}")
        return np.arange(len(token_ids_t), dtype=np.int32)[None]

    def next_position(self, positions_at: np.ndarray) -> int:
        return positions_at.shape[1]

    def from_processor(self, **arrays: np.ndarray) -> tuple[list[Screen], PackedScreens]:
        raise ImageError(f"the toy has no processor in transformers, got {sorted(arrays)}")
