"""Screens that are made squares: each a row of its own, each patch a visual token; 1-D positions.

How a square is made of a screen is the family's: LLaVA pads it, others squash it
(`squashed_screens`). numpy and Pillow.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from PIL import Image

from uirl_jax.actions.coordinates import Margins
from uirl_jax.errors import ConfigError, ImageError, ModelError
from uirl_jax.families.border import PackedScreens, PlacedScreen, Screen, Size
from uirl_jax.families.screens import count_positions, patches_of


class SquareImages(Protocol):
    """What is read here of a family's image settings."""

    @property
    def side_px(self) -> int: ...


def check_side(where: str, images: SquareImages, image_size: int) -> None:
    """Raises: ModelError: the image settings, which are there, are for other squares."""
    if images.side_px != image_size:
        raise ModelError(
            f"{where}: squares of {images.side_px} pixels, config.json has "
            f"image_size={image_size}: it belongs to another model; take the file of this model's "
            "directory"
        )


@dataclasses.dataclass(frozen=True)
class SquareInputs(abc.ABC):
    """See border.Inputs. A screen's array is patches_pc, uint8[P,C]."""

    images: SquareImages
    image_token_id: int
    grid_side: int  # patches along a side
    first_position: ClassVar[int] = 0
    more_tokens: ClassVar[int] = 0  # visual tokens of a screen besides those of its patches
    position_axes = 1
    shares_rows = False
    prefix_lm = False

    @abc.abstractmethod
    def margins(self, size_px: Size) -> Margins:
        """What is put around a screen. Raises: ImageError: its square would show too little."""

    @abc.abstractmethod
    def square(self, image: Image.Image) -> Image.Image:
        """side_px x side_px of an RGB image. Raises: ImageError: see margins."""

    @property
    def patches(self) -> int:
        """Of a screen."""
        return self.grid_side**2

    @property
    def tokens(self) -> int:
        """Visual tokens of a screen."""
        return self.patches + self.more_tokens

    @property
    def patch_px(self) -> int:
        return self.images.side_px // self.grid_side

    def plan_screen(self, size_px: Size) -> Screen:
        return dataclasses.replace(self._square, size_px=size_px, margins=self.margins(size_px))

    def cut_screen(self, image: Image.Image) -> Screen:
        square = self.square(image if image.mode == "RGB" else image.convert("RGB"))
        patches_pc = patches_of(np.asarray(square).transpose(2, 0, 1), self.patch_px)
        return dataclasses.replace(self.plan_screen(image.size), arrays={"patches_pc": patches_pc})

    @property
    def _square(self) -> Screen:
        side_px = self.images.side_px
        return Screen("", (0, 0), (side_px, side_px), tokens=self.tokens, patches=self.patches)

    def row_tokens(self, row_patches: int) -> int:
        if row_patches < self.patches:
            raise ConfigError(
                f"a row of {row_patches} patches: a screen has {self.patches}; set "
                f"engine.image_row_patches and learner.batch.patch_lengths to {self.patches}"
            )
        return self.tokens

    def pack_screens(
        self, placed: Sequence[PlacedScreen], rows: int, row_patches: int
    ) -> PackedScreens:
        """patches_ipc: uint8[I,P,C]. A row is never longer than a screen."""
        self.row_tokens(row_patches)
        patches_ipc = np.zeros((rows, self.patches, 3 * self.patch_px**2), np.uint8)
        for screen, row, _, _ in placed:
            if screen.arrays is not None:
                patches_ipc[row] = screen.arrays["patches_pc"]
        first_tokens = [place.row * self.tokens for place in placed]
        return PackedScreens({"patches_ipc": patches_ipc}, first_tokens)

    def positions(self, token_ids_t: np.ndarray, screens: Sequence[Screen]) -> np.ndarray:
        return count_positions(
            token_ids_t,
            self.image_token_id,
            screens,
            tokens=self.tokens,
            first=self.first_position,
        )

    def next_position(self, positions_at: np.ndarray) -> int:
        return int(positions_at.max(initial=self.first_position - 1)) + 1

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
        images, features = len(pixel_values), 3 * self.patch_px**2
        pixels_ipf = np.zeros((images, self.patches, features), np.float32)
        for row, image_chw in enumerate(pixel_values):
            pixels_ipf[row] = patches_of(image_chw, self.patch_px)
        first_tokens = [row * self.tokens for row in range(images)]
        screens = [self._square] * images
        return screens, PackedScreens({"pixels_ipf": pixels_ipf}, first_tokens)
