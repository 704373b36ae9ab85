"""Small pages drawn with Pillow, from which a small model learns to read.

Buttons, links, boxes to tick, fields, coloured boxes, shapes and letters at random places, in the
fonts of the bundled server's pages. A page takes milliseconds and no browser, so that a model made
from nothing sees each page once (`make_page_model`). The sizes are those of MiniWoB++: 160x210,
with a band for the instruction on top. No page of a real task is copied. What is asked about them
is in `page_questions`.
"""

import dataclasses
import itertools
import string
from typing import NamedTuple

import numpy as np
from PIL import Image

from tools.grounding import words
from tools.page_model import drawn_text
from tools.page_model.dense_drawing import DenseDrawing
from uirl_jax.families.qwen.images import ImageConfig

WIDTH_PX, HEIGHT_PX = 160, 210
BAND_PX = 50
PATCH_PX = 8  # of a page, that are one patch to a model
LEVELS = range(5)  # two coloured boxes; of five colours; of all, and shapes; words; everything

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels

COLORS = {
    "red": (255, 0, 0),
    "blue": (0, 0, 255),
    "lime": (0, 255, 0),
    "yellow": (255, 255, 0),
    "black": (0, 0, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "orange": (255, 165, 0),
    "purple": (128, 0, 128),
    "green": (0, 128, 0),
    "grey": (128, 128, 128),
    "pink": (255, 192, 203),
    "olive": (128, 128, 0),
    "white": (255, 255, 255),
}
_ALSO_CALLED = {"cyan": "aqua", "magenta": "fuchsia", "grey": "gray"}
SHAPES = ("circle", "triangle", "rectangle")
_INK = (20, 20, 20)
_MIDDLE = 0.64  # of a font's size: from the top of a line to the middle of its small letters
_TEXTS = (*words.ACTIONS, *words.NOUNS, *words.ADJECTIVES, *words.LATIN)
FIGURES = ("shape", "letter", "digit")  # kinds of things that are told by how they look
_SMALL_PX, _LARGE_PX = (7, 10), (15, 37)
DESCRIBED = len(LEVELS)  # a level of its own: one figure and words, of which one fits it
_DESCRIBED = 0.25  # of the pages of everything are such


def density_of(images: ImageConfig) -> int:
    """Pixels of a picture along each side of one of the page, to a model with such patches."""
    return images.patch_size // PATCH_PX


def centre(box: Box) -> tuple[int, int]:
    left, top, right, bottom = box
    return (left + right) // 2, (top + bottom) // 2


def covered(box: Box, size_px: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """bool[rows, columns]: the visual tokens of a page that a box touches.

    Args:
      size_px: width and height of the page.
      grid: rows and columns.
    """
    (width, height), (rows, columns) = size_px, grid
    left, top, right, bottom = box
    touched = np.zeros(grid, bool)
    touched[
        top * rows // height : bottom * rows // height + 1,
        left * columns // width : right * columns // width + 1,
    ] = True
    return touched


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing on a page. `box` is what to click, without a label beside it."""

    kind: str  # button, link, check, radio, field, colour, shape, letter, digit, close
    box: Box
    text: str = ""
    color: str = ""
    large: bool = False
    letters_x: tuple[int, ...] = ()  # the middle of each letter of the text

    @property
    def is_look(self) -> bool:
        """Whether `shows` says how it looks; else what is written there."""
        return self.kind in FIGURES or not self.text

    @property
    def shows(self) -> str:
        """What is there, in words; a text without its kind."""
        if self.kind in FIGURES:
            return f"{'large' if self.large else 'small'} {self.color} {self.text}"
        return self.text or self.color or self.kind


class Letter(NamedTuple):
    """One sign that is written on a page, and the pixel of its middle."""

    sign: str
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Page:
    image: Image.Image
    items: tuple[Item, ...]
    words: tuple[tuple[Letter, ...], ...] = ()  # that are written on it, in items or not
    unread: tuple[Box, ...] = ()  # where there may be other words
    is_whole: bool = True  # `items` are all that is there


def draw_page(rng: np.random.Generator, level: int, most: int = 8, density: int = 1) -> Page:
    """A page of the level with at most so many things.

    Args:
      density: pixels of the picture along each side of one of the page. All places on the page that
        is returned are pixels of the picture.
    """
    wanted = int(rng.integers(2, most + 1))
    painter = _Painter(rng, level, wanted, density)
    if level == DESCRIBED or (level == LEVELS[-1] and rng.random() < _DESCRIBED):
        painter.described(most - 1)
    elif level < 2:  # that it begins with two colours is what makes telling them learnable
        for color in rng.permutation(list(COLORS)[: 2 if level == 0 else 5])[:wanted]:
            painter.colour(str(color))
    else:
        kinds = {2: ("colour", "item"), 3: ("button", "link", "checks")}.get(level, _KINDS)
        # Pages of one kind are where things must be told apart; mixed ones are most real pages.
        chosen = kinds if rng.random() < 0.5 else (str(rng.choice(kinds)),)
        for _ in range(wanted):
            if painter.room:
                getattr(painter, str(rng.choice(chosen)))()
    items = tuple(_enlarged(item, density) for item in painter.items)
    words = tuple(
        tuple(Letter(sign, x * density, y * density) for sign, x, y in word)
        for word in painter.words
    )
    return Page(painter.image, items, words)


def _enlarged(item: Item, density: int) -> Item:
    left, top, right, bottom = (side * density for side in item.box)
    letters_x = tuple(x * density for x in item.letters_x)
    return dataclasses.replace(item, box=(left, top, right, bottom), letters_x=letters_x)


def in_reading_order(page: Page) -> list[Item]:
    """The things of a page from top to bottom; beside each other, from left to right."""
    return sorted(page.items, key=lambda item: centre(item.box)[::-1])


def any_text(rng: np.random.Generator) -> str:
    """A word, or letters and digits at random."""
    if rng.random() < 0.5:
        signs = string.ascii_letters + string.digits
        return "".join(rng.choice(list(signs), int(rng.integers(1, 8))))
    text = str(rng.choice(_TEXTS))
    form = rng.random()
    return text.lower() if form < 0.4 else text.upper() if form < 0.5 else text


def kind_words(figure: Item) -> tuple[str, ...]:
    """What a figure is, as a word on a page says it."""
    if figure.kind == "shape":
        return (figure.text.capitalize(),)
    return ("Digit", "Number") if figure.kind == "digit" else ("Letter",)


def color_names(color: str) -> list[str]:
    """What a colour is called."""
    return [color, *filter(None, [_ALSO_CALLED.get(color)])]


class _Painter:
    """Draws things side by side, never over each other; what finds no room is left out."""

    def __init__(self, rng: np.random.Generator, level: int, most: int, density: int = 1) -> None:
        self._rng, self._most, self._density = rng, most, density
        self._light = bool(rng.random() < 0.7)
        ground = 255 if rng.random() < 0.7 else int(rng.integers(225, 256))
        self.image = self._new_image((WIDTH_PX, HEIGHT_PX), (ground,) * 3)
        self._draw = DenseDrawing(self.image, density)
        self.items: list[Item] = []
        self.words: list[tuple[Letter, ...]] = []
        self._taken: list[Box] = []
        self._texts: set[str] = set()
        self._top = 0
        if level < 4 or rng.random() < 0.9:
            self._top = BAND_PX
            self._draw.rectangle((0, 0, WIDTH_PX, BAND_PX - 1), fill=(255, 255, 0))
            for line in range(int(rng.integers(1, 4))):
                said = " ".join(str(word) for word in rng.choice(words.LATIN, 5))
                self._write((2, 2 + 12 * line), said, 10)

    @property
    def room(self) -> int:
        """How many things more the page may have."""
        return self._most - len(self.items)

    def described(self, words: int) -> None:
        """One figure, and at most so many words of which one says what it is, or its colour."""
        self.item()
        if not self.items:
            return
        figure = self.items[0]
        if self._rng.random() < 0.7:
            fitting = str(self._rng.choice(kind_words(figure)))
            number = str(self._rng.choice(["Digit", "Number"]))
            other = {"Letter", number, *map(str.capitalize, SHAPES)} - {*kind_words(figure)}
        else:
            fitting = str(self._rng.choice(color_names(figure.color))).capitalize()
            other = {name.capitalize() for name in COLORS} - {figure.color.capitalize()}
        count = min(words, int(self._rng.integers(3, 6)))
        shown = [fitting, *map(str, self._rng.permutation(sorted(other))[: count - 1])]
        draw = self.button if self._rng.random() < 0.7 else self.link
        for text in self._rng.permutation(shown):
            draw(str(text))

    def button(self, text: str = "") -> None:
        """As large as its text needs, or of a size of its own."""
        text, font_px = text or self._new_text(), self._font_px(15)
        width, height = self._size(text, font_px)
        pad_x, pad_y = int(self._rng.integers(4, 16)), int(self._rng.integers(2, 8))
        size = (width + 2 * pad_x, height + 2 * pad_y)
        if self._rng.random() < 0.4:
            size = max(width + 4, int(self._rng.integers(30, 90))), int(self._rng.integers(18, 44))
            middle = (size[0] - width) // 2
            pad_x = middle if self._rng.random() < 0.5 else min(pad_x, 2 * middle)
        box = self._place(*size)
        if box is not None:
            fill = (239, 239, 239) if self._rng.random() < 0.7 else self._pale()
            self._draw.rounded_rectangle(box, 3, fill=fill, outline=(118, 118, 118))
            inside = self._new_image((size[0] - 5, size[1] - 5), fill)
            place = (max(pad_x, 3) - 3, (size[1] - height) // 2 - 3)
            corner = (box[0] + 3, box[1] + 3)
            letters_x = self._write_on(inside, place, text, font_px, _INK, corner)
            self.image.paste(inside, (corner[0] * self._density, corner[1] * self._density))
            self.items.append(Item("button", box, text, letters_x=letters_x))

    def link(self, text: str = "") -> None:
        text, font_px = text or self._new_text(), self._font_px(14)
        box = self._place(*self._size(text, font_px))
        if box is not None:
            ink = (0, 0, 238) if self._rng.random() < 0.7 else _INK
            letters_x = self._write(box[:2], text, font_px, ink)
            if self._rng.random() < 0.6:
                self._draw.line(((box[0], box[3]), (box[2], box[3])), fill=ink)
            self.items.append(Item("link", box, text, letters_x=letters_x))

    def checks(self) -> None:
        """A box to tick, or a round one, and its label; or a column of them."""
        font_px, pitch = int(self._rng.integers(10, 13)), int(self._rng.integers(16, 24))
        rows = min(self.room, int(self._rng.integers(1, 7))) if self._rng.random() < 0.5 else 1
        texts = [self._new_text() for _ in range(rows)]
        sizes = [self._size(text, font_px) for text in texts]
        side, gap = int(self._rng.integers(11, 15)), int(self._rng.integers(3, 12))
        width, height = max(width for width, _ in sizes), sizes[0][1]
        lower = int(self._rng.integers(0, 5))  # than its box a label may stand
        outline = self._place(
            side + gap + width, max(side, height + lower) + pitch * (len(texts) - 1)
        )
        if outline is None:
            return
        is_round, corner = self._rng.random() < 0.35, int(self._rng.integers(0, 4))
        for row, text in enumerate(texts):
            left, top = outline[0], outline[1] + row * pitch
            box = (left, top, left + side, top + side)
            self._box_to_tick(box, is_round, corner)
            place = (box[2] + gap, top + (side - height) // 2 + lower)
            letters_x = self._write(place, text, font_px)
            kind = "radio" if is_round else "check"
            self.items.append(Item(kind, box, text, letters_x=letters_x))

    def _box_to_tick(self, box: Box, is_round: bool, corner: int) -> None:
        left, top, right, _ = box
        side = right - left
        ticked = self._rng.random() < 0.4
        fill = (0, 117, 255) if ticked else (255, 255, 255)
        if is_round:
            self._draw.ellipse(box, fill=fill, outline=(118, 118, 118))
        else:
            self._draw.rounded_rectangle(box, corner, fill=fill, outline=(118, 118, 118))
        if ticked and not is_round:
            points = [(left + 2, top + side // 2), (left + side // 2 - 1, top + side - 3)]
            self._draw.line([*points, (left + side - 2, top + 3)], fill=(255, 255, 255), width=2)

    def field(self) -> None:
        font_px, height = int(self._rng.integers(10, 14)), int(self._rng.integers(16, 24))
        width = int(self._rng.integers(60, 140))
        label = self._new_text() if self._rng.random() < 0.5 else ""
        above = self._size(label, font_px)[1] + 3 if label else 0
        outline = self._place(width, height + above)
        if outline is None:
            return
        left, top, right, bottom = outline
        box = (left, top + above, right, bottom)
        focused = self._rng.random() < 0.2
        self._draw.rectangle(
            box, fill=(255, 255, 255), outline=(16, 16, 16) if focused else (118, 118, 118)
        )
        letters_x = self._write((left, top), label, font_px) if label else ()
        if self._rng.random() < 0.3:
            self._write((left + 3, box[1] + 3), any_text(self._rng)[:8], font_px)
        self.items.append(Item("field", box, label, letters_x=letters_x))

    def colour(self, color: str = "") -> None:
        color = color or str(self._rng.choice(list(COLORS)))
        side = int(self._rng.integers(16, 52))
        box = self._place(side, side)
        if box is not None:
            self._draw.rectangle(box, fill=COLORS[color], outline=(0, 0, 0))
            self.items.append(Item("colour", box, color=color))

    def item(self) -> None:
        """A shape, a letter or a digit, small or large."""
        color = str(self._rng.choice([name for name in COLORS if name != "white"]))
        large = bool(self._rng.random() < 0.5)
        side = int(self._rng.integers(*(_LARGE_PX if large else _SMALL_PX)))
        kind = str(self._rng.choice(["shape", "shape", "letter", "digit"]))
        box = self._place(side + 2, side + 2)
        if box is None:
            return
        if kind == "shape":
            text = str(self._rng.choice(SHAPES))
            left, top, right, bottom = box
            if text == "circle":
                self._draw.ellipse(box, fill=COLORS[color])
            elif text == "rectangle":
                self._draw.rectangle(box, fill=COLORS[color])
            else:
                apex = ((left + right) // 2, top)
                self._draw.polygon([apex, (right, bottom), (left, bottom)], fill=COLORS[color])
        else:
            signs = string.ascii_letters if kind == "letter" else string.digits
            text = str(self._rng.choice(list(signs)))
            self._draw.sign(
                ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
                text,
                COLORS[color],
                side + 3,
            )
            self.words.append((Letter(text, *centre(box)),))
        self.items.append(Item(kind, box, text, color, large))

    def dialog(self) -> None:
        """A window with a cross; of two none could be meant."""
        if any(item.kind == "close" for item in self.items):
            return
        width, height = int(self._rng.integers(90, 150)), int(self._rng.integers(50, 90))
        outline = self._place(width, height)
        if outline is None:
            return
        left, top, right, _ = outline
        self._draw.rounded_rectangle(outline, 3, fill=(255, 255, 255), outline=(170, 170, 170))
        self._draw.rectangle((left + 3, top + 3, right - 3, top + 22), fill=(233, 233, 233))
        box = (right - 22, top + 4, right - 5, top + 21)
        self._draw.rectangle(box, fill=(246, 246, 246), outline=(197, 197, 197))
        for start, end in (((5, 5), (12, 12)), ((12, 5), (5, 12))):
            line = [(box[0] + x, box[1] + y) for x, y in (start, end)]
            self._draw.line(line, fill=(60, 60, 60), width=2)
        self._write((left + 8, top + 28), any_text(self._rng), 10)
        self.items.append(Item("close", box))

    def _place(self, width: int, height: int) -> Box | None:
        for _ in range(20):
            if width > WIDTH_PX - 4 or height > HEIGHT_PX - self._top - 4:
                return None
            left = int(self._rng.integers(2, WIDTH_PX - width - 1))
            top = int(self._rng.integers(self._top + 2, HEIGHT_PX - height - 1))
            box = (left, top, left + width, top + height)
            if not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return box
        return None

    def _new_text(self) -> str:
        while (text := any_text(self._rng)).lower() in self._texts:
            pass
        self._texts.add(text.lower())
        return text

    def _size(self, text: str, font_px: int) -> tuple[int, int]:
        return round(drawn_text.font("Regular", font_px).getlength(text)), font_px + 2

    def _font_px(self, end: int) -> int:
        """From 10 up to an end; now and then large: large letters are learnt first."""
        return int(self._rng.integers(*((end, 25) if self._rng.random() < 0.3 else (10, end))))

    def _write(
        self, place: tuple[int, int], text: str, font_px: int, ink: tuple[int, ...] = _INK
    ) -> tuple[int, ...]:
        return self._write_on(self.image, place, text, font_px, ink, (0, 0))

    def _write_on(
        self,
        image: Image.Image,
        place: tuple[int, int],
        text: str,
        font_px: int,
        ink: tuple[int, ...],
        corner: tuple[int, int],
    ) -> tuple[int, ...]:
        """Writes on a picture whose upper left corner is there on the page; each letter's x."""
        left = place[0] + float(self._rng.random()) if self._light else place[0]
        dense = self._density
        at = (left * dense, place[1] * dense)
        middles = drawn_text.write(image, at, text, font_px * dense, ink, light=self._light)
        letters_x = tuple(corner[0] + x // dense for x in middles)
        y = corner[1] + place[1] + round(_MIDDLE * font_px)
        letters = [Letter(sign, x, y) for sign, x in zip(text, letters_x, strict=True)]
        runs = itertools.groupby(letters, key=lambda letter: letter.sign == " ")
        self.words += [tuple(word) for blank, word in runs if not blank]
        return letters_x

    def _new_image(self, size_px: tuple[int, int], fill: tuple[int, ...]) -> Image.Image:
        return Image.new("RGB", (size_px[0] * self._density, size_px[1] * self._density), fill)

    def _pale(self) -> tuple[int, int, int]:
        red, green, blue = (int(level) for level in self._rng.integers(190, 256, 3))
        return red, green, blue


_KINDS = ("button", "link", "checks", "field", "colour", "item", "item", "dialog")


def _overlap(one: Box, other: Box) -> bool:
    gap = 2
    return not (
        one[2] + gap < other[0]
        or other[2] + gap < one[0]
        or one[3] + gap < other[1]
        or other[3] + gap < one[1]
    )
