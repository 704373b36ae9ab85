"""Coordinate spaces of models, and the one function that converts between them and the screen.

An action format has a space (`formats`): a model that was taught one space misses everything in
another. A family may put margins around a screen before it resizes it; the spaces that are parts of
an image or its pixels then count from the margin's edge. No other module multiplies a coordinate.
"""

from typing import NamedTuple

from uirl_jax.errors import ConfigError


class Margins(NamedTuple):
    """What was put around a screen before it was resized, in pixels of the screen."""

    left: int = 0
    top: int = 0
    right: int = 0
    bottom: int = 0

    def along(self, axis: int) -> tuple[int, int]:
        """Before and after the screen on an axis: 0 is x, 1 is y."""
        return self[axis], self[2 + axis]


NO_MARGINS = Margins()

# pixels    of the verifier's screen, as the bundled server and its demonstrations count them
# image     pixels of the resized image that the model sees (Qwen2.5-VL, UI-TARS 1.5)
# 0-999     and 0-1000: parts of either axis (Qwen3-VL, UI-TARS, Qwen2-VL); 0-1: a fraction of it
# loc       1024 bins of either axis: the bin next to a pixel, read as where it begins (PaliGemma)
# loc_1000  1000 bins: the one that a pixel lies in, read as its middle (Florence-2)
# points_32 and points_64: 32 and 64 bins, in the same way
# All but pixels are of the screen with its margins.
BINS = {"loc": 1024, "loc_1000": 1000, "points_32": 32, "points_64": 64}
SPACES = ("pixels", "image", "0-999", "0-1000", "0-1", *BINS)
_MIDDLES = frozenset(BINS) - {"loc"}  # bins that are read as their middle
FRACTION_DECIMALS = 4  # half a unit of the last is half a pixel of 10,000


def check_space(space: str) -> None:
    """Raises ConfigError for a space that is none of SPACES."""
    if space not in SPACES:
        raise ConfigError(f"coordinates={space!r}, expected one of {', '.join(SPACES)}")


def span(space: str, screen_px: int, image_px: int) -> int:
    """What the far edge of an axis is called in a space; the near one is always 0."""
    edges = {"0-999": 999, "0-1000": 1000, "0-1": 1, **BINS}
    return {"pixels": screen_px, "image": image_px, **edges}[space]


def allowed(
    space: str, screen_px: int, image_px: int, margins: tuple[int, int] = (0, 0)
) -> tuple[int | float, int | float]:
    """The smallest and the largest coordinate on the screen. Arguments as in `convert`."""
    if space in BINS and margins == (0, 0):
        return 0, BINS[space] - 1  # the far edge has no bin
    if margins == (0, 0):
        return 0, span(space, screen_px, image_px)
    first, last = (
        convert(edge, space, screen_px, image_px, margins=margins, to_screen=False)
        for edge in (0, screen_px)
    )
    return first, last


def convert(
    value: int | float,
    space: str,
    screen_px: int,
    image_px: int,
    *,
    margins: tuple[int, int] = (0, 0),
    to_screen: bool,
) -> int | float:
    """Converts one coordinate from a model's space to a pixel of the screen, or back.

    Args:
      value: to_screen: in `space`, as `allowed` says; else a pixel of the screen.
      screen_px: the screen's width for an x, its height for a y.
      image_px: the same of the image that the model sees.
      margins: of that axis, Margins.along; the image shows them too.

    Returns:
      The nearest pixel, at most the last one: the far edge lies one pixel outside. Or the nearest
      coordinate of the space: whole, but in 0-1 rounded to FRACTION_DECIMALS. There and back is
      exact where an axis, margins included, has no more pixels than the space has units (10,000 in
      0-1), and within half a unit otherwise, at the far edge of loc within a whole one. A bin that
      is read as its middle gives its number, within half of it.
    """
    if space == "pixels":
        return value
    edge, framed_px = span(space, screen_px, image_px), margins[0] + screen_px + margins[1]
    if to_screen:
        exact = value * framed_px
        if space in _MIDDLES:  # halves down: of 1000 pixels the middle of loc_1000's n is n + 0.5
            nearest = -((edge - 2 * exact - framed_px) // (2 * edge))
            return max(0, min(screen_px - 1, int(nearest) - margins[0]))
        nearest = int(exact / edge + 0.5) if isinstance(value, float) else _nearest(exact, edge)
        return max(0, min(screen_px - 1, nearest - margins[0]))
    value += margins[0]
    if space == "0-1":
        return round(value / framed_px, FRACTION_DECIMALS)
    if space in _MIDDLES:
        return min(int(value * edge // framed_px), edge - 1)
    nearest = _nearest(value * edge, framed_px)
    return min(nearest, edge - 1) if space == "loc" else nearest


def _nearest(numerator: float, denominator: float) -> int:
    """The whole number next to a quotient >= 0, halves up."""
    return int((2 * numerator + denominator) // (2 * denominator))
