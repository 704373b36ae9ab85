"""Small recorded sets in memory, for tests of the recorded verifier."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.row import Box, Row, Step

SIZE = (100, 200)
BOX = Box(20, 40, 60, 80)  # its centre is (40, 60), half its sides 20


def picture(size: tuple[int, int] = SIZE, shade: int = 0, image_format: str = "PNG") -> bytes:
    """A picture of one shade with a gradient: no two shades are alike."""
    across = np.arange(size[0]) % 64
    pixels = np.broadcast_to(across[None, :, None], (size[1], size[0], 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels + np.uint8(shade)).save(buffer, image_format)
    return buffer.getvalue()


def step(
    action: Action,
    box: Box | None = None,
    *,
    size: tuple[int, int] = SIZE,
    elements: Sequence[Box] = (),
    instruction: str = "",
    image: bytes | None = None,
    shade: int = 0,
) -> Step:
    data = picture(size, shade) if image is None else image
    return Step(data, *size, action, box, tuple(elements), instruction)


def click(x: int = 40, y: int = 60, box: Box | None = BOX, **options) -> Step:
    return step(Action("click", x=x, y=y), box, **options)


def row(
    number: int, steps: Sequence[Step], split: str = "train", labels: dict[str, str] | None = None
) -> Row:
    return Row(f"r{number}", "made_here", split, f"Do task {number}", tuple(steps), labels or {})


class InMemory:
    """Rows with the protocol of parquet.RowFile."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self.splits: dict[str, list[int]] = {}
        for index, each in enumerate(rows):
            self.splits.setdefault(each.split, []).append(index)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def sizes(self, index: int) -> list[tuple[int, int]]:
        return [(step.width_px, step.height_px) for step in self._rows[index].steps]

    def screen(self, index: int) -> bytes:
        return self._rows[index].steps[0].image


def grounding_set(train: int = 12, test: int = 4, **options) -> InMemory:
    """One click each."""
    splits = ["train"] * train + ["test"] * test
    return InMemory([row(n, [click(shade=n, **options)], split) for n, split in enumerate(splits)])


def walk_row(number: int = 0, split: str = "train") -> Row:
    """As in verl's GUI agent example: click, type, end."""
    return row(
        number,
        [
            click(shade=1),
            step(Action("type", text="Musk"), shade=2),
            step(Action("terminate", text="success"), shade=3),
        ],
        split,
    )
