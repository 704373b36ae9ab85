"""How what is asked about a drawn page is answered, in a model's own action format.

`drawn_pages` knows pages, `page_questions` what is asked, and neither a model; `make_page_model`
and `page_pointing` train on the pairs that are made here.
"""

import numpy as np

from tools.make_base_model import Setting
from tools.page_model import drawn_pages, page_questions
from tools.page_model.drawn_pages import Page
from tools.page_model.page_questions import Question
from uirl_jax.actions.formats import format_action
from uirl_jax.families.border import Screen
from uirl_jax.types import Action

TYPING = 0.25  # of the pages have a question that is answered by typing


def drawn(
    rng: np.random.Generator, level: int, most: int, questions: int, density: int = 1
) -> tuple[Page, list[Question]]:
    """A page of a level with at most so many things, of which some can be asked for.

    Args: density: see drawn_pages.draw_page.
    """
    asked: list[Question] = []
    while not asked:
        page = drawn_pages.draw_page(rng, level, most, density)
        asked = page_questions.ask(page, rng, questions)
    return page, asked


class Answers:
    """Writes answers about one page, of which the model sees `screen`."""

    def __init__(self, setting: Setting, page: Page, screen: Screen) -> None:
        self._form = setting.chat.action_format
        self._size, self._seen_px = page.image.size, screen.seen_px

    def written(self, action: Action) -> str:
        return format_action(action, self._size, self._form, image_size=self._seen_px)

    def click(self, box: drawn_pages.Box) -> str:
        x, y = drawn_pages.centre(box)
        return self.written(Action("click", x=x, y=y))

    def column(self, x: int) -> str:
        """The x of a click alone."""
        return self.written(Action("click", x=x, y=0)).partition("<y")[0]

    def to(self, questions: list[Question], rng: np.random.Generator) -> list[tuple[str, str]]:
        """Pairs of instruction and answer; a text to type may take the last one's place."""
        asked = [(question.instruction, self.click(question.box)) for question in questions]
        if rng.random() < TYPING:
            instruction, text = page_questions.to_type(rng)
            asked[-1] = instruction, self.written(Action("type", text=text))
        return asked
