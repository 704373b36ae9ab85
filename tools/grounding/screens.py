"""What is known of a screen once it was drawn and read. No browser is imported here."""

import dataclasses
from typing import NamedTuple

from tools.grounding.sources import Plan

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels of the screen; half open


@dataclasses.dataclass(frozen=True)
class Element:
    """Something visible that can be named or pointed at."""

    kind: str  # "button", "link", ...
    box: Box
    text: str  # that it shows; for a field its value
    label: str  # what stands beside it, or its accessible name
    shape: str  # of kind shape: "circle", ...
    askable: bool  # wholly visible, on top, enabled and large enough to be pointed at
    cut: bool  # not all of its text can be read


class Word(NamedTuple):
    """A run of letters that stands on a screen, without a blank."""

    text: str
    letters: tuple[tuple[int, int], ...]  # (x, y) in pixels: the middle, were it a small one


@dataclasses.dataclass(frozen=True)
class Screen:
    """A drawn plan."""

    plan: Plan
    png: bytes
    elements: tuple[Element, ...]
    texts: tuple[str, ...]  # all that can be read
    words: tuple[Word, ...] = ()  # those of which the place of each letter is known
    unread: tuple[Box, ...] = ()  # where there may be others
