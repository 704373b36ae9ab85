"""Instructions that name exactly one element of a screen.

By text, by label, by colour and form, or by position. What could also mean another element is not
asked: everything that can be read on the screen counts, and elements that are partly hidden do too.
Colours are read from the pixels, because gradients, opacity and themes hide what a style says.
"""

import colorsys
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import Image

from tools.grounding.screens import Box, Element, Screen

_MAX_NAME_CHARS = 40
_CONTRAST = 120  # sum over red, green and blue
# Kinds that are pointed at by their text alone.
_TEXT_ONLY = frozenset({"cell", "heading", "list item", "item", "option"})
_COLOURED = frozenset({"button", "shape"})
_HUES = (  # degrees; between them no name is sure
    ("red", 350, 372),
    ("orange", 22, 39),
    ("yellow", 47, 64),
    ("green", 95, 155),
    ("blue", 205, 245),
    ("purple", 262, 290),
)
_WORDS = {"text": 0.5, "label": 0.5, "only": 0.12, "colour": 0.3, "position": 0.3}


@dataclasses.dataclass(frozen=True)
class Question:
    """One example of a screen."""

    instruction: str
    box: Box
    kind: str  # of the element
    by: str  # text, label, only, colour or position


def ask(screen: Screen, rng: np.random.Generator, most: int) -> list[Question]:
    """At most so many questions, each about another element, of different kinds where possible."""
    with Image.open(io.BytesIO(screen.png)) as image:
        pixels_hwc = np.asarray(image.convert("RGB"))
    looks = [_look(element, pixels_hwc) for element in screen.elements]
    order = [int(n) for n in rng.permutation(len(screen.elements))]
    by_kind: dict[str, list[Question]] = {}
    for index in order:
        element = screen.elements[index]
        if not element.askable or (
            element.kind == "shape" and not _stands_out(element, pixels_hwc)
        ):
            continue
        phrases = list(_phrases(screen, index, looks))
        if phrases:
            weights = np.array([_WORDS[by] for by, _ in phrases])
            by, options = phrases[int(rng.choice(len(phrases), p=weights / weights.sum()))]
            text = options[int(rng.integers(len(options)))]
            question = Question(text, element.box, element.kind, by)
            by_kind.setdefault(element.kind, []).append(question)
    turns = itertools.zip_longest(*by_kind.values())
    asked = [question for turn in turns for question in turn if question is not None]
    return asked[:most]


def _phrases(
    screen: Screen, index: int, looks: Sequence[str | None]
) -> Iterator[tuple[str, list[str]]]:
    """(by, instructions that mean the same) for one element."""
    element = screen.elements[index]
    peers = [e for n, e in enumerate(screen.elements) if n != index and e.kind == element.kind]
    kind = element.kind
    if _is_name(element.text) and not element.cut and kind != "shape":
        yield from _by_text(screen, element, peers)
    if _is_name(element.label) and _same(element.label, element.text) is False:
        rivals = [*(e.label for e in peers), *(e.text for e in peers)]
        if not any(_same(element.label, other) for other in rivals) and kind not in _TEXT_ONLY:
            name = f'"{element.label}"'
            yield "label", [f"Click the {kind} {name}.", f"Click the {name} {kind}."]
    if kind in _TEXT_ONLY:
        return
    if kind in _COLOURED:
        what = element.shape if kind == "shape" else kind
        if what and looks[index] is not None:
            others = [
                (e.shape or e.kind, look)
                for n, (e, look) in enumerate(zip(screen.elements, looks, strict=True))
                if n != index and e.kind == kind
            ]
            unclear = any(w in (what, "") and look is None for w, look in others)
            if not unclear and (what, looks[index]) not in others:
                yield "colour", [f"Click the {looks[index]} {what}."]
    if kind == "shape":
        if element.shape and not any(e.shape in (element.shape, "") for e in peers):
            yield "only", [f"Click the {element.shape}."]
        return
    if not peers:
        yield "only", [f"Click the {kind}."]
    elif (where := _position(element, peers)) is not None:
        yield "position", [f"Click the {where} {kind}."]


def _by_text(
    screen: Screen, element: Element, peers: Sequence[Element]
) -> Iterator[tuple[str, list[str]]]:
    name, kind = element.text, element.kind
    if any(_same(name, other) for e in peers for other in (e.text, e.label)):
        return
    # Anything else on the screen with this text, such as a heading above the button.
    rivals = [e for e in screen.elements if e is not element]
    texts = sum(name.casefold() in text.casefold() for text in screen.texts)
    alone = texts <= 1 and not any(_same(name, o) for e in rivals for o in (e.text, e.label))
    options = []
    if alone:
        options += [f'Click "{name}".', f'Click on "{name}".']
    if kind not in _TEXT_ONLY:
        shown = f'with the text "{name}"' if kind in ("text field", "text area") else f'"{name}"'
        options.append(f"Click the {kind} {shown}.")
        if kind in ("button", "link", "tab", "menu item"):
            options += [f'Click the "{name}" {kind}.'] * 2
    if options:
        yield "text", options


def _is_name(text: str) -> bool:
    """Short, printable, more than a symbol, and without what would end the quotation."""
    plain = text.isprintable() and '"' not in text and any(map(str.isalnum, text))
    return 0 < len(text) <= _MAX_NAME_CHARS and plain


def _same(one: str, other: str) -> bool:
    return one.casefold().strip(" :*") == other.casefold().strip(" :*")


def _position(element: Element, peers: Sequence[Element]) -> str | None:
    """topmost, bottommost, leftmost or rightmost, where it is clear of all others of its kind."""
    left, top, right, bottom = element.box
    # The middle of it beyond their edges: boxes may touch or overlap a little.
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    clear: dict[str, Callable[[Box], bool]] = {
        "topmost": lambda box: bottom <= box[1] + 1 and middle_y < box[1],
        "bottommost": lambda box: top >= box[3] - 1 and middle_y > box[3],
        "leftmost": lambda box: right <= box[0] + 1 and middle_x < box[0],
        "rightmost": lambda box: left >= box[2] - 1 and middle_x > box[2],
    }
    for name, is_clear in clear.items():
        if all(is_clear(peer.box) for peer in peers):
            return name
    return None


def _look(element: Element, pixels_hwc: np.ndarray) -> str | None:
    """The name of its colour; None where no name is sure."""
    if element.kind not in _COLOURED:
        return None
    left, top, right, bottom = element.box
    if element.kind == "shape":  # its middle: the corners of a circle are not its own
        x, y = (left + right) // 2, (top + bottom) // 2
        part = pixels_hwc[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2]
    else:
        part = pixels_hwc[max(top + 2, 0) : bottom - 2, max(left + 2, 0) : right - 2]
    levels_c = (part.reshape(-1, 3) // 8).astype(np.int64) @ (1024, 32, 1)  # 32 of each channel
    counts = np.bincount(levels_c, minlength=1)
    if counts.max() < 0.4 * max(len(levels_c), 1):
        return None
    level = int(counts.argmax())
    return colour_name(*(part * 8 + 4 for part in (level // 1024, level // 32 % 32, level % 32)))


def _stands_out(element: Element, pixels_hwc: np.ndarray) -> bool:
    """Whether the middle of a shape has another colour than what is around it."""
    left, top, right, bottom = element.box
    height, width, _ = pixels_hwc.shape
    middle = pixels_hwc[(top + bottom) // 2, (left + right) // 2].astype(int)
    corners = [(top - 2, left - 2), (top - 2, right + 1), (bottom + 1, left - 2)]
    around = [pixels_hwc[y, x] for y, x in corners if 0 <= y < height and 0 <= x < width]
    return all(int(np.abs(middle - pixel).sum()) >= _CONTRAST for pixel in around)


def colour_name(red: int, green: int, blue: int) -> str | None:
    """The name of a colour (0 to 255 each); None where people would hesitate."""
    hue, saturation, value = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    if value < 0.14:
        return "black"
    if saturation < 0.06:
        return "grey" if 0.4 <= value <= 0.8 else None
    if saturation < 0.5 or value < 0.4:
        return None
    degrees = hue * 360
    for name, low, high in _HUES:
        if low <= degrees <= high or low <= degrees + 360 <= high:
            return name
    return None
