"""Coordinates of the published sets -> pixels of our pictures. Nothing else converts.

A set says a place in one of a few forms: two corners or a corner and a size; x first or y first; in
pixels, in pixels of a picture that was resized since, as fractions, or in thousandths. Most reports
of results that could not be reproduced come down to one of these (UI-R1 issues 4 and 10).

    form                                  sets
    corner and size, pixels               ScreenSpot, ScreenSpot-v2 (JSON)
    two corners, pixels                   ScreenSpot-Pro, UI-R1
    two corners, 0-1                      ScreenSpot (parquet), SeeClick and Rico, GUI-R1-3K
    two corners, 0-1000                   GUI-Odyssey
    corner and size, 0-1, y first         AITW
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from uirl_jax.errors import RecordError
from uirl_jax.verifiers.recorded.row import Box, Size

SLACK_PX = 1.0  # how far rounding may put a place outside of its picture
_UNITS = {"pixels": "pixels", "0-1": "fractions of the picture", "0-1000": "thousandths of it"}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a set says places.

    Attributes:
      unit: pixels, 0-1 or 0-1000.
      has_size: a box is a corner and its extents, not two corners.
      y_first: each pair is (y, x), (height, width).
    """

    unit: str = "pixels"
    has_size: bool = False
    y_first: bool = False

    def spans(self, size: Size, counted: Size | None) -> tuple[float, float]:
        """What the far edges of x and y are called."""
        if self.unit == "pixels":
            return counted or size
        span = {"0-1": 1.0, "0-1000": 1000.0}[self.unit]
        return span, span


PIXELS, PIXELS_WITH_SIZE = Form(), Form(has_size=True)
FRACTIONS, THOUSANDTHS = Form("0-1"), Form("0-1000")
AITW = Form("0-1", has_size=True, y_first=True)


def read_box(values: Any, form: Form, size: Size, *, counted: Size | None = None) -> Box:
    """A box as its set says it, in pixels of the picture.

    Args:
      values: four numbers, untrusted.
      size: of the picture.
      counted: of the picture that pixels were counted in, where it was resized since.

    Raises: RecordError: not four finite numbers, no box, or more than a pixel outside.
    """
    a, b, c, d = numbers(values, 4)
    if form.y_first:
        a, b, c, d = b, a, d, c
    if form.has_size:
        if c <= 0 or d <= 0:
            raise RecordError(f"{_shown(values)} has no size")
        c, d = a + c, b + d
    if not (a < c and b < d):
        raise RecordError(f"{_shown(values)} is no box: expected two corners, the upper left first")
    spans = form.spans(size, counted)
    sides = [at * px / span for at, px, span in zip((a, b, c, d), size * 2, spans * 2, strict=True)]
    box = Box(*(_inside(at, px) for at, px in zip(sides, size * 2, strict=True)))
    if any(abs(at - kept) > SLACK_PX for at, kept in zip(sides, box, strict=True)):
        raise RecordError(_outside(values, form, size))
    if not (box.left < box.right and box.top < box.bottom):
        raise RecordError(f"{_shown(values)} is empty on a picture of {size[0]}x{size[1]}")
    return box


def read_point(
    values: Any, form: Form, size: Size, *, counted: Size | None = None
) -> tuple[int, int]:
    """The pixel (x, y) that a point lies in. Arguments and errors as in `read_box`."""
    x, y = numbers(values, 2)
    if form.y_first:
        x, y = y, x
    spans = form.spans(size, counted)
    exact = [at * px / span for at, px, span in zip((x, y), size, spans, strict=True)]
    # 29 hundredths of 100 pixels are 28.999999999999996 of them.
    pixels = [math.floor(at + 1e-6) for at in exact]
    if any(at < -SLACK_PX or at > px + SLACK_PX for at, px in zip(exact, size, strict=True)):
        raise RecordError(_outside(values, form, size))
    return min(max(pixels[0], 0), size[0] - 1), min(max(pixels[1], 0), size[1] - 1)


def centre(box: Box, size: Size) -> tuple[int, int]:
    """The pixel in the middle of a box: where to click, if the set says a box alone."""
    x, y = box.centre
    return min(int(x), size[0] - 1), min(int(y), size[1] - 1)


def without_far_edge(box: Sequence[int]) -> Box:
    """A box of ours, whose right and bottom are the first pixels outside: they are its last now."""
    left, top, right, bottom = box
    return Box(left, top, right - 1, bottom - 1)


def numbers(values: Any, count: int) -> list[float]:
    """So many finite numbers. Raises RecordError for anything else, text with digits included."""
    if not isinstance(values, list | tuple) or len(values) != count:
        raise RecordError(f"{_shown(values)}: expected {count} numbers")
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RecordError(f"{_shown(values)}: {_shown(value)} is not a number")
        if not math.isfinite(value) or abs(value) > 1e9:
            raise RecordError(f"{_shown(values)}: {_shown(value)} is no place on a screen")
    return [float(value) for value in values]


def _inside(at: float, px: int) -> float:
    return min(max(at, 0.0), float(px))


def _outside(values: Any, form: Form, size: Size) -> str:
    return (
        f"{_shown(values)} is outside of a picture of {size[0]}x{size[1]}; expected "
        f"{_UNITS[form.unit]}"
    )


def _shown(value: Any) -> str:
    text = (
        repr(value) if isinstance(value, list | tuple | int | float | str) else type(value).__name__
    )
    return text if len(text) <= 80 else text[:77] + "..."
