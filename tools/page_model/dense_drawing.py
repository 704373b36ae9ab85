"""Draws in pixels of a page on a picture that has several for each of them, for `drawn_pages`."""

from collections.abc import Sequence

from PIL import Image, ImageDraw

from tools.page_model import drawn_text

Ink = tuple[int, ...]
Point = tuple[float, float]


class DenseDrawing:
    """What `drawn_pages` needs of ImageDraw; every place and width is in pixels of the page.

    Args: density: pixels of the picture along each side of one of the page.
    """

    def __init__(self, image: Image.Image, density: int) -> None:
        self._draw, self._density = ImageDraw.Draw(image), density

    def rectangle(self, box: Sequence[float], fill: Ink, outline: Ink | None = None) -> None:
        self._draw.rectangle(self._box(box), fill, outline, width=self._density)

    def rounded_rectangle(self, box: Sequence[float], radius: int, fill: Ink, outline: Ink) -> None:
        self._draw.rounded_rectangle(
            self._box(box), radius * self._density, fill, outline, width=self._density
        )

    def ellipse(self, box: Sequence[float], fill: Ink, outline: Ink | None = None) -> None:
        self._draw.ellipse(self._box(box), fill, outline, width=self._density)

    def polygon(self, points: Sequence[Point], fill: Ink) -> None:
        self._draw.polygon(self._points(points), fill)

    def line(self, points: Sequence[Point], fill: Ink, width: int = 1) -> None:
        self._draw.line(self._points(points), fill, width * self._density)

    def sign(self, middle: Point, sign: str, fill: Ink, size_px: int) -> None:
        """One letter or digit."""
        x, y = middle
        known = drawn_text.font("Regular", size_px * self._density)
        self._draw.text((x * self._density, y * self._density), sign, fill, known, anchor="mm")

    def _box(self, box: Sequence[float]) -> tuple[float, float, float, float]:
        """Pillow's boxes include the pixels at their right and at their bottom."""
        left, top, right, bottom = (side * self._density for side in box)
        last = self._density - 1
        return left, top, right + last, bottom + last

    def _points(self, points: Sequence[Point]) -> list[Point]:
        """The middles of these pixels of the page."""
        middle = (self._density - 1) / 2
        return [(x * self._density + middle, y * self._density + middle) for x, y in points]
