"""Coordinate spaces of models, and the one function that converts between them and the screen.

An action format has a space (`formats`): a model that was taught one space misses everything in
another. No other module multiplies a coordinate.
"""

from uirl_jax.errors import ConfigError

# pixels  of the verifier's screen, as the bundled server and its demonstrations count them
# image   pixels of the resized image that the model sees (Qwen2.5-VL, UI-TARS 1.5)
# 0-999   and 0-1000: parts of either axis (Qwen3-VL, UI-TARS, Qwen2-VL); 0-1: a fraction of it
SPACES = ("pixels", "image", "0-999", "0-1000", "0-1")
FRACTION_DECIMALS = 4  # half a unit of the last is half a pixel of 10,000


def check_space(space: str) -> None:
    """Raises ConfigError for a space that is none of SPACES."""
    if space not in SPACES:
        raise ConfigError(f"coordinates={space!r}, expected one of {', '.join(SPACES)}")


def span(space: str, screen_px: int, image_px: int) -> int:
    """What the far edge of an axis is called in a space; the near one is always 0."""
    return {"pixels": screen_px, "image": image_px, "0-999": 999, "0-1000": 1000, "0-1": 1}[space]


def convert(
    value: int | float, space: str, screen_px: int, image_px: int, *, to_screen: bool
) -> int | float:
    """Converts one coordinate from a model's space to a pixel of the screen, or back.

    Args:
      value: to_screen: in `space`, within 0..span; else a pixel of the screen.
      screen_px: the screen's width for an x, its height for a y.
      image_px: the same of the image that the model sees.

    Returns:
      The nearest pixel, at most the last one: the far edge lies one pixel outside. Or the nearest
      coordinate of the space: whole, but in 0-1 rounded to FRACTION_DECIMALS. There and back is
      exact where an axis has no more pixels than the space has units (10,000 in 0-1), and within
      half a unit otherwise.
    """
    if space == "pixels":
        return value
    edge = span(space, screen_px, image_px)
    if to_screen:
        exact = value * screen_px
        nearest = int(exact / edge + 0.5) if isinstance(value, float) else _nearest(exact, edge)
        return min(screen_px - 1, nearest)
    if space == "0-1":
        return round(value / screen_px, FRACTION_DECIMALS)
    return _nearest(value * edge, screen_px)


def _nearest(numerator: float, denominator: float) -> int:
    """The whole number next to a quotient >= 0, halves up."""
    return int((2 * numerator + denominator) // (2 * denominator))
