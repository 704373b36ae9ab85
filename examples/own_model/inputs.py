"""Every screen becomes 256 x 192 pixels and 8 x 6 visual tokens. Positions are 0, 1, 2."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image

from examples.own_model.config import OwnConfig
from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size
from uirl_jax.families.screens import count_positions

WIDTH_PX, HEIGHT_PX = 256, 192
BLOCK_PX = 8  # the first convolution's kernel and stride
COLUMNS, ROWS = WIDTH_PX // BLOCK_PX, HEIGHT_PX // BLOCK_PX
TOKENS = COLUMNS * ROWS // 16  # two more halve either side


class OwnInputs:
    """See border.Inputs."""

    position_axes = 1
    shares_rows = False
    prefix_lm = False

    def __init__(self, cfg: OwnConfig) -> None:
        self.image_token_id = cfg.image_token_id

    def plan_screen(self, size_px: Size) -> Screen:
        return Screen("", size_px, (WIDTH_PX, HEIGHT_PX), tokens=TOKENS, patches=TOKENS)

    def cut_screen(self, image: Image.Image) -> Screen:
        seen = image.convert("RGB").resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BILINEAR)
        pixels_hwc = np.asarray(seen)
        cut = pixels_hwc.reshape(ROWS, BLOCK_PX, COLUMNS, BLOCK_PX, 3).swapaxes(1, 2)
        arrays = {"blocks_hwc": cut.reshape(ROWS, COLUMNS, -1)}
        return dataclasses.replace(self.plan_screen(image.size), arrays=arrays)

    def row_tokens(self, row_patches: int) -> int:
        if row_patches < TOKENS:
            raise ConfigError(f"a row of {row_patches} patches: a screen has {TOKENS}")
        return TOKENS

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        blocks_ihwc = np.zeros((rows, ROWS, COLUMNS, 3 * BLOCK_PX**2), np.uint8)
        for screen, row, _, _ in placed:
            if screen.arrays is not None:
                blocks_ihwc[row] = screen.arrays["blocks_hwc"]
        return PackedScreens({"blocks_ihwc": blocks_ihwc}, [place.row * TOKENS for place in placed])

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        return count_positions(token_ids_t, self.image_token_id, screens, tokens=TOKENS)

    def next_position(self, positions_at: np.ndarray) -> int:
        return positions_at.shape[1]

    def from_processor(self, **arrays: np.ndarray) -> tuple[list[Screen], PackedScreens]:
        raise ImageError(f"own_model has no processor in transformers, got {sorted(arrays)}")
