"""Screenshots as untrusted bytes: decoded within limits, and read into a family's arrays.

Between the verifier's bytes and `Inputs` of a family; numpy and Pillow, no JAX. Nothing is cached.
"""

import dataclasses
import hashlib
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.families.border import Inputs, Screen, Size
from uirl_jax.untrusted.images import MAX_JPEG_SCANS, MAX_PIXELS, has_too_many_scans

_FORMATS = ("PNG", "JPEG", "WEBP")


def image_key(screenshot: bytes) -> str:
    """What names a screenshot everywhere: the SHA-256 of its bytes, in hex."""
    return hashlib.sha256(screenshot).hexdigest()


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Untrusted bytes -> RGB image.

    Args:
      data: a PNG, JPEG or WEBP file.
      max_pixels: checked against the header before any pixel is decoded: a PNG of 236 KB may hold
        9000x9000 pixels and take 324 MB.
    Raises: ImageError for anything else, with the reason.
    """
    try:
        image = _open(data, max_pixels)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    except ImageError:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen unrelated types on hostile bytes
        raise _unreadable(data, error) from error


def image_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Size:
    """(width, height) in an image's header; its pixels are not decoded. Raises: ImageError."""
    try:
        return _open(data, max_pixels).size
    except ImageError:
        raise
    except Exception as error:  # as in decode_image
        raise _unreadable(data, error) from error


def _open(data: bytes, max_pixels: int) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    if image.format == "JPEG" and has_too_many_scans(data):
        raise ImageError(f"a JPEG of more than {MAX_JPEG_SCANS} scans")
    width_px, height_px = image.size
    if width_px * height_px > max_pixels:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected at most {max_pixels} pixels"
        )
    frames = getattr(image, "n_frames", 1)  # JPEG has no such field
    if image.format != "JPEG" and frames != 1:
        raise ImageError(f"image of {frames} frames, expected a still image")
    return image


def _unreadable(data: bytes, error: Exception) -> ImageError:
    return ImageError(
        f"{len(data)} bytes are not a readable PNG, JPEG or WEBP image "
        f"({type(error).__name__}: {str(error)[:120]})"
    )


def plan_screen(inputs: Inputs, screenshot: bytes, size_px: Size) -> Screen:
    """A screen that is read when its pixels are needed (`read_planned`).

    Args:
      screenshot: bytes that `decode_image` takes.
      size_px: of the screen that the verifier announced.

    Raises: ImageError: the family has no plan for that size.
    """
    planned = inputs.plan_screen(size_px)
    return dataclasses.replace(planned, key=image_key(screenshot), screenshot=screenshot)


def read_planned(inputs: Inputs, screen: Screen) -> Screen:
    """The screen with its arrays.

    Raises: ImageError: the bytes are not an image, or one of another size than planned.
    """
    if screen.arrays is not None:
        return screen
    cut = inputs.cut_screen(decode_planned(screen))
    return dataclasses.replace(cut, key=screen.key, screenshot=screen.screenshot)


def decode_planned(screen: Screen) -> Image.Image:
    """The image of a planned screen. Raises: ImageError, as read_planned."""
    image = decode_image(screen.screenshot)
    if image.size != screen.size_px:  # a verifier may announce one size and send another
        raise ImageError(
            f"a screenshot of {image.width}x{image.height} pixels, "
            f"the screen has {screen.size_px[0]}x{screen.size_px[1]}"
        )
    return image


def vision_index(token_ids_t: np.ndarray, image_token_id: int, rows_v: np.ndarray) -> np.ndarray:
    """int32[T]: the k-th placeholder stands for row rows_v[k] of the visual table; -1 elsewhere."""
    index_t = np.full(len(token_ids_t), -1, np.int32)
    index_t[token_ids_t == image_token_id] = rows_v
    return index_t


def patches_of(image_chw: np.ndarray, patch_px: int) -> np.ndarray:
    """[P,C], the patches row by row; C is (channel, height, width). What is no whole patch, at the
    right and lower edge, is left out."""
    rows, columns = (side // patch_px for side in image_chw.shape[1:])
    whole = image_chw[:, : rows * patch_px, : columns * patch_px]
    blocks = whole.reshape(3, rows, patch_px, columns, patch_px)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)


def count_positions(
    token_ids_t: np.ndarray,
    image_token_id: int,
    screens: Sequence[Screen],
    *,
    tokens: int,
    first: int = 0,
) -> np.ndarray:
    """int32[1,T], one after the other, whatever a token is.

    Args:
      tokens: of every screen.
      first: position.
    Raises: ImageError: the ids are not of these screens.
    """
    found = np.count_nonzero(np.asarray(token_ids_t) == image_token_id)
    if found != tokens * len(screens):
        raise ImageError(
            f"{found} image tokens, expected {tokens} for each of {len(screens)} screens"
        )
    return np.arange(first, first + len(token_ids_t), dtype=np.int32)[None]
