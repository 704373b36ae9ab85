"""What is asked about a drawn page (`drawn_pages`): instructions that mean one thing on it.

Most name what they mean. Others need a look at the page first: which word describes the figure
that is shown, which field is the second. `page_answers` writes how they are answered.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tools.grounding import words
from tools.page_model import drawn_pages
from tools.page_model.drawn_pages import FIGURES, Box, Item, Page

_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th")
_IN_ORDER = 0.2  # of the questions about a text name others to be clicked after it
_FITTING = 0.75  # of the questions, where a word on the page fits the figure that is shown
_CALLED_BY_TEXT = ("button", "link", "check", "radio")
_FOR_THE_KIND = (
    "Click on the word that says what the figure is.",
    "Click what describes the figure.",
    "Press the word for the figure.",
)
_FOR_THE_COLOR = ("Click on the word for the color.", "Press the color of the figure.")


@dataclasses.dataclass(frozen=True)
class Question:
    instruction: str
    box: Box
    shown: Box | None = None  # what to look at first: the figure that a word describes


def ask(page: Page, rng: np.random.Generator, most: int) -> list[Question]:
    """Questions about one thing of the page each; the same thing may be asked for again.

    Where several are named, the first is meant: what is to be clicked now.
    """
    fitting = _describing(page.items)
    askable = [(item, phrases) for item in page.items if (phrases := _phrases(item, page.items))]
    questions = []
    for _ in range(most if askable else 0):
        if fitting and rng.random() < _FITTING:
            questions.append(fitting[int(rng.integers(len(fitting)))])
            continue
        item, phrases = askable[int(rng.integers(len(askable)))]
        later = [other.text for other, _ in askable if other is not item and not other.is_look]
        if later and item.kind in _CALLED_BY_TEXT and rng.random() < _IN_ORDER:
            phrases = _in_order(item.text, [str(text) for text in rng.permutation(later)[:3]])
        questions.append(Question(phrases[int(rng.integers(len(phrases)))], item.box))
    return questions


def to_type(rng: np.random.Generator) -> tuple[str, str]:
    """An instruction to type a text that it quotes, maybe one of two; and the text."""
    one, other = drawn_pages.any_text(rng), drawn_pages.any_text(rng)
    if rng.random() < 0.4:
        return f'Type "{one}".', one
    first, second = (str(name).lower() for name in rng.choice(words.NOUNS, 2, replace=False))
    named, text = ((first, one), (second, other))[int(rng.integers(2))]
    return f'The {first} is "{one}" and the {second} is "{other}". Type the {named}.', text


def _phrases(item: Item, items: Sequence[Item]) -> list[str]:
    """Instructions that mean this thing and no other."""
    peers = [other for other in items if other is not item]
    same_text = [other for other in peers if other.text.lower() == item.text.lower()]
    text = item.text
    if item.kind in FIGURES:
        return [f"Click on a {look}" for look in _looks(item, peers)]
    if item.kind == "colour":
        if any(other.color == item.color and other.kind == "colour" for other in peers):
            return []
        return [
            phrase
            for color in drawn_pages.color_names(item.color)
            for phrase in (f"Click on the {color} colored box.", f"Click on the {color} box.")
        ]
    if item.kind == "close":
        return ['Close the dialog box by clicking the "x".', "Close the dialog."]
    if item.kind == "field":
        return [*_of_field(item, [o for o in peers if o.kind == "field"])]
    if same_text or not text:
        return []
    if item.kind == "button":
        return [
            f'Click on the "{text}" button.',
            f"Click button {text}.",
            f'Click the button labeled "{text}".',
            f'Click on "{text}".',
        ]
    if item.kind == "link":
        return [f'Click on the link "{text}".', f'Click on "{text}".']
    return [f"Select {text}.", f'Click on the {item.kind} "{text}".', f'Click on "{text}".']


def _describing(items: Sequence[Item]) -> list[Question]:
    """Questions for the word on a page that says what its only figure is, or its colour."""
    figures = [item for item in items if item.kind in FIGURES]
    if len(figures) != 1:
        return []
    kinds = drawn_pages.kind_words(figures[0])
    colors = [name.capitalize() for name in drawn_pages.color_names(figures[0].color)]
    questions = []
    for names, phrases in ((kinds, _FOR_THE_KIND), (colors, _FOR_THE_COLOR)):
        fitting = [item for item in items if item.text in names]
        if len(fitting) == 1:
            questions += [
                Question(phrase, fitting[0].box, shown=figures[0].box) for phrase in phrases
            ]
    return questions


def _in_order(first: str, later: Sequence[str]) -> list[str]:
    """Instructions to click on several texts, one after the other."""
    *middle, last = later
    return [
        f"Select {', '.join((first, *middle))} and click {last}.",
        f"Select {', '.join((first, *later))}.",
        f"Click on {first}, then click on {later[0]}.",
    ]


def _of_field(item: Item, peers: Sequence[Item]) -> list[str]:
    phrases = []
    if item.text and not any(o.text == item.text for o in peers):
        phrases += [f"Focus into the {item.text} field.", f'Click on the field "{item.text}".']
    if not peers:
        phrases.append("Focus into the textbox.")
    place = sum(other.box[1] < item.box[1] for other in peers)
    rows = {other.box[1] for other in (item, *peers)}
    if peers and len(rows) == len(peers) + 1 and place < len(_ORDINALS):
        phrases.append(f"Focus into the {_ORDINALS[place]} input textbox.")
    return phrases


def _looks(item: Item, peers: Sequence[Item]) -> list[str]:
    """Descriptions by size, colour and form that no other thing fits."""
    drawn = [other for other in peers if other.kind in FIGURES]
    nouns: list[tuple[str, Callable[[Item], bool]]] = [("item", lambda other: True)]
    if item.kind == "shape":
        nouns.append((item.text, lambda other: other.text == item.text))
        nouns.append(("shape", lambda other: other.kind == "shape"))
    else:
        nouns.append((item.kind, lambda other: other.kind == item.kind))
        nouns.append((item.text, lambda other: other.text == item.text))
    found = []
    for noun, fits in nouns:
        for by_size in (False, True):
            for by_color in (False, True):
                rivals = [
                    other
                    for other in drawn
                    if fits(other)
                    and (not by_size or other.large == item.large)
                    and (not by_color or other.color == item.color)
                ]
                if not rivals:
                    size = ("large " if item.large else "small ") if by_size else ""
                    colors = (
                        [f"{name} " for name in drawn_pages.color_names(item.color)]
                        if by_color
                        else [""]
                    )
                    found += [f"{size}{color}{noun}" for color in colors]
    return found
