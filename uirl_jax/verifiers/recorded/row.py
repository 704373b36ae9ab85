"""One recorded task as it stands in a set: screens, what was done on each, and where.

`parquet` reads and writes rows, `task` plays them, `rules` judges an action beside a step. All
places are in pixels of the step's own picture, x before y; tools.gui_data converts what the
published sets have.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from uirl_jax.types import Action


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
