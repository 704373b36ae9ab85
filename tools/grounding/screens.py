"""What is known of a screen once it was drawn and read. No browser is imported here."""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class Screen:
    """A drawn plan."""

    plan: Plan
    png: bytes
    elements: tuple[Element, ...]
    texts: tuple[str, ...]  # all that can be read
