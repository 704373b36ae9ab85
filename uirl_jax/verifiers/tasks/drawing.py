"""Pixels of the hermetic desktop: wallpaper, widgets and text, with Pillow.

What is drawn here is what the policy sees. Drawing is fast (hundreds of screens a second on one
core: the wallpaper and each word are drawn once and then pasted), and the wallpaper is made to be
learned from: it shows position strongly, in colours that widgets do not have. Where widgets are is
in `desktop_tasks`, what clicks do in `window`.
"""

import dataclasses
import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]
Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels; x1 and y1 are outside

# Easy ones first: a task variant may take the first few only.
BUTTON_COLORS: dict[str, Color] = {
    "red": (230, 20, 20),
    "blue": (20, 40, 240),
    "green": (0, 160, 30),
    "yellow": (255, 230, 0),
    "black": (10, 10, 10),
    "white": (255, 255, 255),
    "orange": (255, 120, 0),
    "cyan": (0, 230, 240),
}
PLATE_COLOR: Color = (214, 214, 206)
FIELD_COLOR: Color = (250, 250, 250)
FIELD_BORDER_COLOR: Color = (70, 70, 70)
FOCUS_COLOR: Color = (255, 0, 200)  # no button and no wallpaper comes near it
SELECTION_COLOR: Color = (170, 200, 255)
CELL_COLOR: Color = (244, 244, 238)
HEADER_COLOR: Color = (196, 204, 196)
DIALOG_COLOR: Color = (238, 234, 250)
TITLE_COLOR: Color = (70, 60, 110)
CLOSE_COLOR: Color = (180, 0, 140)
INK: Color = (20, 20, 20)
LIGHT_INK: Color = (250, 250, 250)

FIELD_BORDER_PX = 3
FONT_SIZE_PX = 11


@dataclasses.dataclass(frozen=True)
class Widget:
    """One rectangle of the screen. What it does when it is clicked is the window's business."""

    name: str
    kind: str  # button, plate, field, cell, header, dialog, title
    box: Box
    text: str = ""  # of a field: nothing; what was typed into it is in Window.texts
    color: Color = PLATE_COLOR

    def contains(self, x: int, y: int) -> bool:
        x0, y0, x1, y1 = self.box
        return x0 <= x < x1 and y0 <= y < y1


@functools.lru_cache(maxsize=8)
def _wallpaper(width_px: int, height_px: int) -> Image.Image:
    """A soft tartan that encodes position: every place has colours of its own.

    Red tells x and blue tells y, each as a ramp (which half of the screen), a wave of 112 px (which
    quarter) and, together in green, waves of 56 px (which side of a visual token of 28 px). A ramp
    alone was seen to teach nothing: a digit of a coordinate is a steep function of it.
    """

    def waves(size_px: int) -> tuple[np.ndarray, np.ndarray]:
        place = np.arange(size_px)
        coarse = 40 * (2 * place / (size_px - 1) - 1) + 32 * np.sin(2 * np.pi * place / 112)
        return coarse, 32 * np.sin(2 * np.pi * place / 56)

    (coarse_x, fine_x), (coarse_y, fine_y) = waves(width_px), waves(height_px)
    pixels_hwc = np.full((height_px, width_px, 3), 128.0)
    pixels_hwc[:, :, 0] += coarse_x[None, :]
    pixels_hwc[:, :, 1] += fine_x[None, :] + fine_y[:, None]
    pixels_hwc[:, :, 2] += coarse_y[:, None]
    pixels_hwc = pixels_hwc.round().astype(np.uint8)
    return Image.fromarray(pixels_hwc)


@functools.lru_cache(maxsize=4)
def _font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size_px)


@functools.lru_cache(maxsize=1024)
def _text_mask(text: str, size_px: int) -> Image.Image:
    """Coverage of one line of text, 8 bit; always as high as "Ay", so that words share a baseline.

    Cached: setting type costs ten times the paste.
    """
    font = _font(size_px)
    x0, _, x1, _ = font.getbbox(text)
    _, y0, _, y1 = font.getbbox("Ay")
    mask = Image.new("L", (max(1, int(x1 - x0)), int(y1 - y0)), 0)
    ImageDraw.Draw(mask).text((-x0, -y0), text, fill=255, font=font)
    return mask


def _put_text(image: Image.Image, box: Box, text: str, color: Color, *, centred: bool) -> None:
    """Writes `text` into `box`; if it does not fit, its start is cut (its end where centred)."""
    x0, y0, x1, y1 = box
    if not text or x1 <= x0 or y1 <= y0:
        return
    mask = _text_mask(text, FONT_SIZE_PX)
    if mask.width > x1 - x0:
        cut_px = 0 if centred else mask.width - (x1 - x0)
        mask = mask.crop((cut_px, 0, cut_px + x1 - x0, mask.height))
    if mask.height > y1 - y0:
        mask = mask.crop((0, 0, mask.width, y1 - y0))
    left = x0 + (x1 - x0 - mask.width) // 2 if centred else x0
    image.paste(color, (left, y0 + (y1 - y0 - mask.height) // 2), mask)


def _ink_on(color: Color) -> Color:
    return INK if sum(color) > 380 else LIGHT_INK


def draw_screen(
    width_px: int,
    height_px: int,
    widgets: list[Widget],
    texts: dict[str, str],
    focus: str | None,
    selected: bool,
) -> Image.Image:
    """Draws one screen.

    Args:
      widgets: from the bottom to the top.
      texts: what stands in each field, by the field's name.
      focus: name of the field or cell that has the keyboard.
      selected: all text of the focused field is selected.

    Returns:
      A new RGB image of width_px x height_px.
    """
    image = _wallpaper(width_px, height_px).copy()
    draw = ImageDraw.Draw(image)
    for widget in widgets:
        x0, y0, x1, y1 = widget.box
        corners = (x0, y0, x1 - 1, y1 - 1)  # Pillow's second corner is inside
        focused = widget.name == focus
        if widget.kind == "field":
            border = FOCUS_COLOR if focused else FIELD_BORDER_COLOR
            draw.rectangle(corners, FIELD_COLOR, border, FIELD_BORDER_PX)
            inner = (x0 + 6, y0 + FIELD_BORDER_PX, x1 - 6, y1 - FIELD_BORDER_PX)
            text = texts.get(widget.name, "")
            if focused and selected and text:
                draw.rectangle((inner[0], inner[1], inner[2] - 1, inner[3] - 1), SELECTION_COLOR)
            _put_text(image, inner, text, INK, centred=False)
        elif widget.kind == "cell":
            draw.rectangle(
                corners,
                CELL_COLOR,
                FOCUS_COLOR if focused else FIELD_BORDER_COLOR,
                2 if focused else 1,
            )
            _put_text(image, (x0 + 4, y0, x1 - 3, y1), widget.text, INK, centred=False)
        else:
            draw.rectangle(corners, widget.color)
            _put_text(image, widget.box, widget.text, _ink_on(widget.color), centred=True)
    return image
