"""Qwen2.5-VL on the host: screens as patches in the order of attention windows.

Windows go row by row over a screen; inside a window its visual tokens go row by row, and the
patches of a visual token stay together. Every window is then a run of patches, and `model` puts the
visual tokens back in the order of the text. Windows at the right and lower edge have fewer patches.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from uirl_jax.families.border import PackedScreens, PlacedScreen
from uirl_jax.families.qwen.images import Grid
from uirl_jax.families.qwen.inputs import QwenInputs, grid_of
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig

_PIXELS = ("patches_ipc", "pixels_ipf")  # one of them is in a call of the vision tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VLInputs(QwenInputs):
    """See border.Inputs and QwenInputs."""

    window_tokens: int  # visual tokens in a row and a column of a window

    def completed(self, packed: PackedScreens, placed: Sequence[PlacedScreen]) -> PackedScreens:
        """The arrays of QwenInputs with each screen's patches in the order of windows, and

        patch_windows_ip: int32[I,P], a number for each window of a row, 0 at padding.
        token_order_im: int32[I,M], where in its row each visual token is, in the text's order.
        """
        area = self.images.merge_size**2
        arrays = dict(packed.arrays)
        segments_ip = arrays["patch_segments_ip"]
        windows_ip = np.zeros_like(segments_ip)
        rows, row_patches = segments_ip.shape
        token_order_im = np.tile(np.arange(row_patches // area, dtype=np.int32), (rows, 1))
        moved = [name for name in (*_PIXELS, "patch_positions_ip2") if name in arrays]
        for screen, row, start, _ in placed:
            span = slice(start, start + screen.patches)
            if not segments_ip[row, span].any():  # another host has its pixels
                continue
            order_m, counts_w = window_order(
                grid_of(screen), self.images.merge_size, self.window_tokens
            )
            order_p = (order_m[:, None] * area + np.arange(area, dtype=np.int32)).reshape(-1)
            for name in moved:
                arrays[name][row, span] = arrays[name][row, span][order_p]
            # Numbered by the patch with which each window starts: distinct in a row.
            starts_w = start + area * (np.cumsum(counts_w) - counts_w)
            windows_ip[row, span] = np.repeat(1 + starts_w, area * counts_w)
            first = start // area
            token_order_im[row, first : first + screen.tokens] = first + np.argsort(order_m)
        arrays |= {"patch_windows_ip": windows_ip, "token_order_im": token_order_im}
        return packed._replace(arrays=arrays)


def make_inputs(cfg: Qwen25VLConfig) -> Qwen25VLInputs:
    return Qwen25VLInputs(cfg.images, cfg.image_token_id, window_tokens=cfg.vision.window_tokens)


def window_order(
    grid_thw: Grid, merge_size: int, window_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The visual tokens of a screen, window after window.

        a screen of 3 x 5 visual tokens, windows of 2 x 2       order 0 1 5 6  2 3 7 8  4 9
             0  1 |  2  3 |  4                                        10 11  12 13  14
             5  6 |  7  8 |  9                                  counts 4 4 2 2 2 1
            ------+-------+---
            10 11 | 12 13 | 14

    Returns:
      order_m: int32[M], number of each visual token in the text's order.
      counts_w: int32[W], visual tokens of each window.
    Source: transformers, vision_utils.py, get_vision_window_index.
    """
    frames, height, width = grid_thw
    rows, columns = height // merge_size, width // merge_size
    numbers_trc = np.arange(frames * rows * columns, dtype=np.int32).reshape(frames, rows, columns)
    windows = [
        frame_rc[row : row + window_tokens, column : column + window_tokens].reshape(-1)
        for frame_rc in numbers_trc
        for row in range(0, rows, window_tokens)
        for column in range(0, columns, window_tokens)
    ]
    return np.concatenate(windows), np.array([len(window) for window in windows], np.int32)
