"""Screens of `make_grounding_data` as pages to learn reading and pointing from: `--screens`.

`drawn_pages` draws letters nearly as Chromium does; these are Chromium's own. What stands on them
is known for texts alone, and not for all of them (`Page.unread`); forms and colours are learnt from
drawn pages.
"""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from tools.grounding import questions as grounding_questions
from tools.grounding.dataset import read_layouts
from tools.grounding.screens import Element, Screen
from tools.grounding.sources import MINIWOB
from tools.page_model import drawn_pages, page_questions
from tools.page_model.drawn_pages import Item, Letter, Page
from tools.page_model.page_questions import Question
from uirl_jax.errors import ConfigError

SHARE = 0.5  # of the pages, where there are screens
_KINDS = {
    "checkbox": "check",
    "radio button": "radio",
    "text field": "field",
    "number field": "field",
    "text area": "field",
}
_NOT_NAMED = frozenset({"shape", "slider", "dropdown", "switch", "heading", "list item"})
_TRIES = 1000
_LONGEST = 20  # letters of what is asked for: a question spells it


class Screens:
    """The screens of a folder."""

    def __init__(self, folder: Path, density: int = 1) -> None:
        """Raises ConfigError: no such data in the folder, or of another size than drawn pages.

        Args: density: of those pages, see drawn_pages.draw_page.
        """
        self._screens = [screen for screen in read_layouts(folder) if _items(screen)]
        self._density = density
        size_px = (drawn_pages.WIDTH_PX * density, drawn_pages.HEIGHT_PX * density)
        for screen in self._screens[:1]:
            with Image.open(io.BytesIO(screen.png)) as image:
                if image.size != size_px:
                    raise ConfigError(
                        f"{folder}: screens of {image.width}x{image.height}, expected "
                        f"{size_px[0]}x{size_px[1]}: make them with --size=160x210 and "
                        f"--density={density}"
                    )
        if not self._screens:
            raise ConfigError(f"{folder}: on none of its screens is a text that can be clicked")

    def page(self, rng: np.random.Generator) -> Page:
        """Any of them."""
        return _page(self._any(rng))

    def asked(self, rng: np.random.Generator, most: int) -> tuple[Page, list[Question]]:
        """One of them with at most so many questions, of which each means one thing on it.

        Raises: ConfigError: no such question in a thousand tries.
        """
        for _ in range(_TRIES):
            screen = self._any(rng)
            page = _page(screen)
            questions = [*_told(screen, page, rng, most), *self._named(screen, page, rng, most)]
            if questions:
                chosen = rng.permutation(len(questions))[:most]
                return page, [questions[int(number)] for number in chosen]
        raise ConfigError(f"no question has one answer on any of {_TRIES} screens")

    def _any(self, rng: np.random.Generator) -> Screen:
        return self._screens[int(rng.integers(len(self._screens)))]

    def _named(
        self, screen: Screen, page: Page, rng: np.random.Generator, most: int
    ) -> list[Question]:
        """In the words of `page_questions`, of texts that stand on the screen once."""
        below = [
            word.text for word in screen.words if not self._in_band(screen, word.letters[0][1])
        ]
        said = f" {' '.join(below)} ".lower()
        fields = [element for element in screen.elements if _KINDS.get(element.kind) == "field"]
        all_fields = len(fields) == sum(item.kind == "field" for item in page.items)
        items = tuple(
            item
            for item in page.items
            if (item.kind == "field" and all_fields) or said.count(item.text.lower()) == 1
        )
        return page_questions.ask(Page(page.image, items), rng, most)

    def _in_band(self, screen: Screen, y: int) -> bool:
        """Whether a text is in the instruction of a MiniWoB++ page, which names what is on it."""
        return (
            screen.plan.component.startswith(f"{MINIWOB}/")
            and y < drawn_pages.BAND_PX * self._density
        )


def _told(screen: Screen, page: Page, rng: np.random.Generator, most: int) -> list[Question]:
    """Of `grounding.questions`, those that name a text or a label."""
    boxes = {item.box for item in page.items}
    return [
        Question(question.instruction, question.box)
        for question in grounding_questions.ask(screen, rng, most)
        if question.by in ("text", "label") and question.box in boxes
    ]


def _page(screen: Screen) -> Page:
    words = tuple(
        tuple(Letter(sign, x, y) for sign, (x, y) in zip(word.text, word.letters, strict=True))
        for word in screen.words
    )
    with Image.open(io.BytesIO(screen.png)) as image:
        return Page(image.convert("RGB"), _items(screen), words, screen.unread, is_whole=False)


def _items(screen: Screen) -> tuple[Item, ...]:
    """What can be asked for by a text or a label, no two with the same box."""
    found = {
        element.box: Item(_KINDS.get(element.kind, element.kind), element.box, _name(element))
        for element in screen.elements
        if element.askable and not element.cut and element.kind not in _NOT_NAMED
    }
    return tuple(item for item in found.values() if 0 < len(item.text) <= _LONGEST)


def _name(element: Element) -> str:
    return element.label if element.kind in _KINDS else element.text
