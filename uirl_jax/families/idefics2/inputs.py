"""Idefics2 on the host: every screen is a row of patches of its own; positions are 0, 1, 2."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image

from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size
from uirl_jax.families.idefics2.config import Idefics2Config
from uirl_jax.families.idefics2.images import (
    ImageConfig,
    cut_image,
    patch_grid,
    position_ids,
    resized,
)
from uirl_jax.families.screens import count_positions, patches_of


@dataclasses.dataclass(frozen=True)
class Idefics2Inputs:
    """See border.Inputs. A screen's array is patches_pc, uint8[P,C]; its layout is the grid of its
    patches, (rows, columns)."""

    images: ImageConfig
    image_token_id: int
    tokens: int  # of a screen of any size: the latents of the resampler
    table_side: int  # of the square table of positions
    position_axes = 1
    shares_rows = False
    prefix_lm = False

    def plan_screen(self, size_px: Size) -> Screen:
        image_px = resized(size_px, self.images)
        grid = patch_grid(image_px, self.images.patch_size)
        return Screen(
            "", size_px, image_px, tokens=self.tokens, patches=grid[0] * grid[1], layout=grid
        )

    def cut_screen(self, image: Image.Image) -> Screen:
        patches_pc = cut_image(image, self.images)
        return dataclasses.replace(self.plan_screen(image.size), arrays={"patches_pc": patches_pc})

    def row_tokens(self, row_patches: int) -> int:
        smallest = (self.images.shortest_px // self.images.patch_size) ** 2
        if row_patches < smallest:
            raise ConfigError(
                f"a row of {row_patches} patches: a screen has {smallest} or more; raise "
                "engine.image_row_patches and learner.batch.patch_lengths"
            )
        return self.tokens

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        """patches_ipc: uint8[I,P,C]; position_ids_ip: int32[I,P]; segment_ids_ip: int32[I,P], 1 at
        patches, 0 at padding."""
        self.row_tokens(row_patches)
        levels = 3 * self.images.patch_size**2
        patches_ipc = np.zeros((rows, row_patches, levels), np.uint8)
        arrays = self._empty(rows, row_patches)
        for screen, row, _, _ in placed:
            self._place(arrays, row, screen.layout)
            if screen.arrays is not None:
                patches_ipc[row, : screen.patches] = screen.arrays["patches_pc"]
        first_tokens = [place.row * self.tokens for place in placed]
        return PackedScreens({"patches_ipc": patches_ipc, **arrays}, first_tokens)

    @staticmethod
    def _empty(rows: int, row_patches: int) -> dict[str, np.ndarray]:
        shape = (rows, row_patches)
        return {
            "position_ids_ip": np.zeros(shape, np.int32),
            "segment_ids_ip": np.zeros(shape, np.int32),
        }

    def _place(self, arrays: dict[str, np.ndarray], row: int, grid: tuple[int, ...]) -> None:
        rows, columns = grid
        arrays["position_ids_ip"][row, : rows * columns] = position_ids(
            (rows, columns), self.table_side
        )
        arrays["segment_ids_ip"][row, : rows * columns] = 1

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        return count_positions(token_ids_t, self.image_token_id, screens, tokens=self.tokens)

    def next_position(self, positions_at: np.ndarray) -> int:
        return int(positions_at.max(initial=-1)) + 1

    def from_processor(
        self,
        *,
        pixel_values: np.ndarray | None = None,
        pixel_attention_mask: np.ndarray | None = None,
        **more: np.ndarray,
    ) -> tuple[list[Screen], PackedScreens]:
        """Screens without pixels, and the arrays of the images, each in a row of its own.

        Args:
          pixel_values: float[B,N,3,H,W], images padded below and on the right.
          pixel_attention_mask: int[B,N,H,W], 1 at an image's own pixels; none in a missing image.
          more: refused.
        """
        if more or pixel_values is None or pixel_attention_mask is None:
            raise ImageError(
                f"of images got {sorted(more)}, expected pixel_values and pixel_attention_mask; "
                "videos are not supported"
            )
        if pixel_values.ndim != 5 or pixel_values.shape[2] != 3:
            raise ImageError(
                f"pixel_values of shape {pixel_values.shape}, expected (texts, images, 3, height, "
                "width): another model's processor made it"
            )
        if pixel_attention_mask.shape != (*pixel_values.shape[:2], *pixel_values.shape[3:]):
            raise ImageError(
                f"pixel_attention_mask of shape {pixel_attention_mask.shape} for pixel_values of "
                f"shape {pixel_values.shape}"
            )
        patch_size = self.images.patch_size
        screens, pixels = [], []
        for image_chw, mask_hw in zip(
            pixel_values.reshape(-1, *pixel_values.shape[2:]),
            pixel_attention_mask.reshape(-1, *pixel_values.shape[3:]),
            strict=True,
        ):
            if not mask_hw.any():
                continue
            height_px, width_px = int(mask_hw[:, 0].sum()), int(mask_hw[0].sum())
            if not mask_hw[:height_px, :width_px].all() or height_px * width_px != mask_hw.sum():
                raise ImageError("pixel_attention_mask is no rectangle from the upper left corner")
            grid = patch_grid((width_px, height_px), patch_size)
            if 0 in grid:
                raise ImageError(
                    f"an image of {width_px}x{height_px} pixels, less than a patch of "
                    f"{patch_size} a side"
                )
            pixels.append(patches_of(image_chw[:, :height_px, :width_px], patch_size))
            screens.append(
                Screen(
                    *("", (0, 0), (width_px, height_px)),
                    tokens=self.tokens,
                    patches=grid[0] * grid[1],
                    layout=grid,
                )
            )
        longest = max((screen.patches for screen in screens), default=0)
        pixels_ipf = np.zeros((len(screens), longest, 3 * patch_size**2), np.float32)
        arrays = self._empty(len(screens), longest)
        for row, (screen, pixels_pf) in enumerate(zip(screens, pixels, strict=True)):
            pixels_ipf[row, : screen.patches] = pixels_pf
            self._place(arrays, row, screen.layout)
        first_tokens = [row * self.tokens for row in range(len(screens))]
        return screens, PackedScreens({"pixels_ipf": pixels_ipf, **arrays}, first_tokens)


def make_inputs(cfg: Idefics2Config) -> Idefics2Inputs:
    return Idefics2Inputs(
        cfg.images, cfg.image_token_id, cfg.perceiver.resampler_n_latents, cfg.vision.grid_side
    )
