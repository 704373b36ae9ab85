"""Writes words into small pictures as a browser does, for `drawn_pages`.

Liberation Sans, which the bundled server's pages are shown in where they ask for Arial.
"""

import functools
import itertools
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from uirl_jax.errors import ConfigError

_FONT_DIRECTORIES = ("liberation", "liberation2")
_X_HEIGHT = 0.528  # of the font's size
_FINE = 8  # rows and columns of a large drawing that become one of pixels


@functools.lru_cache(maxsize=64)
def font(name: str, size_px: int) -> ImageFont.FreeTypeFont:
    for directory in _FONT_DIRECTORIES:
        path = Path("/usr/share/fonts/truetype") / directory / f"LiberationSans-{name}.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size_px)
    raise ConfigError(
        f"LiberationSans-{name}.ttf is not installed: apt-get install fonts-liberation"
    )


def write(
    image: Image.Image,
    place: tuple[float, int],
    text: str,
    size_px: int,
    ink: tuple[int, ...],
    *,
    light: bool,
) -> tuple[int, ...]:
    """Writes a line of text with its upper left corner at a place; the middle of each letter in x.

    Args:
      light: as Chromium does: small letters are a whole number of pixels high, and stand between
        pixels along the line. Else all of their stems are moved to whole pixels (full hinting).
    """
    known = font("Regular", size_px * _FINE)
    ends = [place[0] + known.getlength(text[:count]) / _FINE for count in range(len(text) + 1)]
    middles = tuple(int((one + two) / 2) for one, two in itertools.pairwise(ends))
    if not light:
        ImageDraw.Draw(image).text(place, text, ink, font("Regular", size_px))
        return middles
    left = math.floor(place[0])
    mask, above = _light(text, size_px, round((place[0] - left) * _FINE))
    top = place[1] + round(font("Regular", size_px).getmetrics()[0]) - above
    image.paste(ink, (left, top), mask)
    return middles


def _light(text: str, size_px: int, shift: int) -> tuple[Image.Image, int]:
    """How much ink each pixel has, and the number of rows above the base line."""
    large = font("Regular", size_px * _FINE)
    ascent, descent = large.getmetrics()
    columns = math.ceil((large.getlength(text) + shift) / _FINE) + 1
    height_px = _X_HEIGHT * size_px
    row = _FINE * height_px / math.ceil(height_px - 0.1)  # of the large drawing, of a row of pixels
    above, below = math.ceil(ascent / row), math.ceil(descent / row)
    base = math.ceil(above * row)  # the base line lies between rows of pixels
    start = base - above * row
    size = (columns * _FINE, math.ceil(start + (above + below) * row))
    fine = Image.new("L", size, 0)
    ImageDraw.Draw(fine).text((shift, base - ascent), text, 255, large)
    box = (0, start, columns * _FINE, start + (above + below) * row)
    return fine.resize((columns, above + below), Image.Resampling.BOX, box=box), above
