"""Qwen3-VL on the host: screens in rows of patches, with their places on the learned positions."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from uirl_jax.families.border import PackedScreens, PlacedScreen
from uirl_jax.families.qwen.images import Grid
from uirl_jax.families.qwen.inputs import QwenInputs, grid_of, patch_positions
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLInputs(QwenInputs):
    """See border.Inputs and QwenInputs."""

    table_side: int  # of the square grid of learned positions

    def completed(self, packed: PackedScreens, placed: Sequence[PlacedScreen]) -> PackedScreens:
        """The arrays of QwenInputs, and table_positions_ip2: float32[I,P,2]."""
        positions_ip2 = np.zeros(packed.arrays["patch_positions_ip2"].shape, np.float32)
        for screen, row, start, _ in placed:
            positions_ip2[row, start : start + screen.patches] = table_positions(
                grid_of(screen), self.images.merge_size, self.table_side
            )
        return packed._replace(arrays=packed.arrays | {"table_positions_ip2": positions_ip2})


def make_inputs(cfg: Qwen3VLConfig) -> Qwen3VLInputs:
    return Qwen3VLInputs(cfg.images, cfg.image_token_id, table_side=cfg.vision.table_side)


def table_positions(grid_thw: Grid, merge_size: int, side: int) -> np.ndarray:
    """float32[P,2], (row, column) of each patch on the grid of learned positions.

    The corners of an image lie on the corners of that grid, whatever the image's size.
    Source: transformers, vision_utils.py, _interpolation_axis_taps_weights with align_corners.
    """
    _, height, width = grid_thw
    positions_p2 = patch_positions(grid_thw, merge_size).astype(np.float32)
    steps_2 = np.maximum(np.array([height, width], np.float32) - 1, 1)
    return positions_p2 * np.float32(side - 1) / steps_2
