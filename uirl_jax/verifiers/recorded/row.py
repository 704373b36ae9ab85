"""One recorded task as it stands in a set: screens, what was done on each, and where.

`parquet` reads and writes rows, `task` plays them, `rules` judges an action beside a step. All
places are in pixels of the step's own picture, x before y; tools.gui_data converts what the
published sets have.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from uirl_jax.types import Action

Size = tuple[int, int]  # (width, height) in pixels


class Box(NamedTuple):
    """A rectangle in pixels of a picture; its edges belong to it. Coordinates may be fractions."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def centre(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def contains(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def scaled(self, old: Size, new: Size) -> "Box":
        """The box on the same picture in another size."""
        return Box(*(at * to / px for at, px, to in zip(self, old * 2, new * 2, strict=True)))


@dataclasses.dataclass(frozen=True)
class Step:
    """A screen and what was done on it.

    Attributes:
      image: the screen as an encoded PNG, JPEG or WebP.
      action: in pixels of that picture.
      box: what the action's point is on, where the set says it.
      elements: other boxes of the screen that the set marks; AITW's matching reads them.
      instruction: of this step alone ("tap the search bar"), where the set has one.
    """

    image: bytes
    width_px: int
    height_px: int
    action: Action
    box: Box | None = None
    elements: tuple[Box, ...] = ()
    instruction: str = ""

    def resized(self, size: Size, image: bytes) -> "Step":
        """The step on its picture in another size, which is `image`."""
        old = (self.width_px, self.height_px)
        return dataclasses.replace(
            self,
            image=image,
            width_px=size[0],
            height_px=size[1],
            action=scale_action(self.action, old, size),
            box=None if self.box is None else self.box.scaled(old, size),
            elements=tuple(box.scaled(old, size) for box in self.elements),
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One recorded task.

    Attributes:
      row_id: unlike that of any other row of the set.
      source: the set that it comes from, "screenspot_v2".
      split: "train", "validation" or "test".
      labels: what tables are made by: platform, ui_type, application.
    """

    row_id: str
    source: str
    split: str
    instruction: str
    steps: tuple[Step, ...]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


def scale_action(action: Action, old: Size, new: Size) -> Action:
    """The action on the same picture in another size: pixels stay those that the places lie in."""
    changed: dict[str, int] = {}
    for name, axis in (("x", 0), ("y", 1), ("x2", 0), ("y2", 1)):
        at = getattr(action, name)
        if at is not None:
            changed[name] = min((2 * at + 1) * new[axis] // (2 * old[axis]), new[axis] - 1)
    if action.amount is not None:
        axis = 1 if action.direction in ("up", "down") else 0
        changed["amount"] = max(1, round(action.amount * new[axis] / old[axis]))
    return dataclasses.replace(action, **changed)
