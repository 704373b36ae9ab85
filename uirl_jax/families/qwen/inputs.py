"""The Qwen-VL families on the host: screens in rows of patches, and M-RoPE positions of tokens."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size
from uirl_jax.families.qwen.images import (
    Grid,
    ImageConfig,
    cut_image,
    image_grid,
    num_visual_tokens,
)


@dataclasses.dataclass(frozen=True)
class QwenInputs:
    """See border.Inputs. A screen's layout is its Grid; its array is patches_pc, uint8[P,C]."""

    images: ImageConfig
    image_token_id: int
    position_axes = 3
    shares_rows = True
    prefix_lm = False

    def plan_screen(self, size_px: Size) -> Screen:
        return self._screen(size_px, image_grid(size_px, self.images))

    def cut_screen(self, image: Image.Image) -> Screen:
        patches_pc, grid = cut_image(image, self.images)
        planned = self._screen(image.size, grid)
        return dataclasses.replace(planned, arrays={"patches_pc": patches_pc})

    def _screen(self, size_px: Size, grid: Grid) -> Screen:
        patch = self.images.patch_size
        return Screen(
            key="",
            size_px=size_px,
            seen_px=(grid[2] * patch, grid[1] * patch),
            tokens=num_visual_tokens(grid, self.images.merge_size),
            patches=math.prod(grid),
            layout=grid,
        )

    def row_tokens(self, row_patches: int) -> int:
        area = self.images.merge_size**2
        if row_patches % area:
            raise ConfigError(
                f"a row of {row_patches} patches: {area} patches make one visual token; set "
                f"engine.image_row_patches and learner.batch.patch_lengths to multiples of {area}"
            )
        return row_patches // area

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        """patches_ipc: uint8[I,P,C]; patch_positions_ip2: int32[I,P,2]; patch_segments_ip:
        int32[I,P], 0 at padding. The table of visual tokens has I * P / merge_size**2 rows."""
        area, row_tokens = self.images.merge_size**2, self.row_tokens(row_patches)
        patches_ipc = np.zeros((rows, row_patches, self.images.patch_levels), np.uint8)
        positions_ip2 = np.zeros((rows, row_patches, 2), np.int32)
        segments_ip = np.zeros((rows, row_patches), np.int32)
        first_tokens = []
        for screen, row, start, segment in placed:
            first_tokens.append(row * row_tokens + start // area)
            if screen.arrays is None:
                continue
            span = slice(start, start + screen.patches)
            patches_ipc[row, span] = screen.arrays["patches_pc"]
            positions_ip2[row, span] = patch_positions(grid_of(screen), self.images.merge_size)
            segments_ip[row, span] = segment
        arrays = {
            "patches_ipc": patches_ipc,
            "patch_positions_ip2": positions_ip2,
            "patch_segments_ip": segments_ip,
        }
        return self.completed(PackedScreens(arrays, first_tokens), placed)

    def completed(self, packed: PackedScreens, placed: Sequence[PlacedScreen]) -> PackedScreens:
        """What a family adds to the arrays of a call, or changes in them; here nothing."""
        del placed
        return packed

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        grids = [grid_of(screen) for screen in screens]
        return rope_positions(token_ids_t, grids, self.image_token_id, self.images.merge_size)

    def next_position(self, positions_at: np.ndarray) -> int:
        return int(positions_at.max(initial=-1)) + 1

    def from_processor(
        self,
        *,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
        **more: np.ndarray,
    ) -> tuple[list[Screen], PackedScreens]:
        """Screens without pixels, and the arrays of the images, each in a row of its own.

        Args:
          pixel_values: float[P,F], the patches of all images, one after the other.
          image_grid_thw: int[N,3], of each image in patches.
          more: refused.
        """
        if more or pixel_values is None or image_grid_thw is None:
            got = sorted(more) or "one of them alone"
            raise ImageError(
                f"of images got {got}, expected pixel_values and image_grid_thw; videos are not "
                "supported"
            )
        grids = [(int(t), int(h), int(w)) for t, h, w in image_grid_thw]
        merge = self.images.merge_size
        for index, grid in enumerate(grids):
            if grid[0] != 1 or any(side < 1 or side % merge for side in grid[1:]):
                raise ImageError(
                    f"image_grid_thw[{index}]={grid}, expected one frame, as videos are not "
                    f"supported, and sides that are multiples of {merge}"
                )
        screens = [self._screen((0, 0), grid) for grid in grids]
        counts = [screen.patches for screen in screens]
        if pixel_values.shape[1:] != (self.images.patch_features,):
            raise ImageError(
                f"pixel_values of shape {pixel_values.shape}, expected (patches, "
                f"{self.images.patch_features}): another model's processor made it"
            )
        if sum(counts) != len(pixel_values):
            raise ImageError(
                f"pixel_values has {len(pixel_values)} patches, image_grid_thw says {sum(counts)}"
            )
        most = max(counts, default=0)
        pixels_ipf = np.zeros((len(grids), most, self.images.patch_features), np.float32)
        positions_ip2 = np.zeros((len(grids), most, 2), np.int32)
        segments_ip = np.zeros((len(grids), most), np.int32)
        images_pf = np.split(pixel_values, np.cumsum(counts)[:-1])
        for row, (grid, image_pf) in enumerate(zip(grids, images_pf, strict=True)):
            pixels_ipf[row, : counts[row]] = image_pf
            positions_ip2[row, : counts[row]] = patch_positions(grid, self.images.merge_size)
            segments_ip[row, : counts[row]] = 1
        arrays = {
            "pixels_ipf": pixels_ipf,
            "patch_positions_ip2": positions_ip2,
            "patch_segments_ip": segments_ip,
        }
        row_tokens = self.row_tokens(most)
        packed = PackedScreens(arrays, [row * row_tokens for row in range(len(grids))])
        placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
        return screens, self.completed(packed, placed)


def grid_of(screen: Screen) -> Grid:
    """The grid of a screen that QwenInputs planned."""
    frames, height, width = screen.layout
    return frames, height, width


def patch_positions(grid_thw: Grid, merge_size: int) -> np.ndarray:
    """int32[P,2], (row, column) of each patch in cut_image's order.

    Source: transformers, vision_utils.py, get_vision_position_ids.
    """
    t, h, w = grid_thw
    rows_hw, columns_hw = np.indices((h, w), dtype=np.int32)
    blocks = (h // merge_size, merge_size, w // merge_size, merge_size)
    order = [a.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for a in (rows_hw, columns_hw)]
    return np.tile(np.stack(order, axis=-1), (t, 1))


def rope_positions(
    token_ids_t: np.ndarray, grids: Sequence[Grid], image_token_id: int, merge_size: int
) -> np.ndarray:
    """M-RoPE positions of one unpadded sequence, int32[3,T]: time, height, width.

    Text tokens count up on all axes. Each visual token adds its row and column to the position at
    which its image starts; text after the image continues at the largest position + 1:

        token     P  P  v  v  v  v  v  v  P        an image of 2 x 3 visual tokens
        time      0  1  2  2  2  2  2  2  5
        height    0  1  2  2  2  3  3  3  5
        width     0  1  2  3  4  2  3  4  5

    Raises: ImageError: the runs of image_token_id do not have the lengths of the grids.
    Source: transformers, models/qwen2_vl/modeling_qwen2_vl.py, get_rope_index.
    """
    is_image_t = np.asarray(token_ids_t) == image_token_id
    positions_3t = np.zeros((3, len(is_image_t)), np.int32)
    starts = np.flatnonzero(is_image_t & ~np.concatenate([[False], is_image_t[:-1]]))
    ends = np.flatnonzero(is_image_t & ~np.concatenate([is_image_t[1:], [False]])) + 1
    counts = [num_visual_tokens(grid, merge_size) for grid in grids]
    if (ends - starts).tolist() != counts:
        raise ImageError(
            f"runs of image tokens of lengths {(ends - starts).tolist()}, expected {counts} "
            f"for the grids {[tuple(grid) for grid in grids]}"
        )
    done, position = 0, 0
    for start, end, (t, h, w) in zip(starts, ends, grids, strict=True):
        positions_3t[:, done:start] = position + np.arange(start - done)
        position += start - done
        rows, columns = h // merge_size, w // merge_size
        indices_3thw = np.indices((t, rows, columns), dtype=np.int32)
        positions_3t[:, start:end] = position + indices_3thw.reshape(3, -1)
        # Without the time axis, as in the reference.
        position += max(h, w) // merge_size
        done = end
    positions_3t[:, done:] = position + np.arange(len(is_image_t) - done)
    return positions_3t
