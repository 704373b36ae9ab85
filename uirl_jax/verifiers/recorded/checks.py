"""What a row must be, and the list of those that are not.

`parquet` checks every row that it writes and reads, `tools.prepare_gui_data` every row that it
converts, so a task never meets a picture of another size than its row says, a box outside of it or
an action that no policy could take. Pictures are checked by their headers; whether their pixels can
be decoded is the converter's to know (`tools.gui_data`), which looks once.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from uirl_jax.actions import kinds
from uirl_jax.errors import ActionError, ImageError, RecordError
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.client.image_header import image_size
from uirl_jax.verifiers.recorded.row import Box, Row, Step

SPLITS = ("train", "validation", "test")
MAX_STEPS = 200
MAX_ELEMENTS = 5000
MAX_ROW_ELEMENTS = 200_000  # of all its steps
MAX_LABELS = 32
MAX_NAME_CHARS = 300  # of ids, sources and labels
MAX_TEXT_CHARS = 10_000  # of instructions
MAX_IMAGE_BYTES = 32 * 2**20
MAX_PIXELS = 32_000_000  # the largest screens of ScreenSpot-Pro have 6016x3384, 20.4 million
MAX_ROW_BYTES = 128 * 2**20  # of a row's pictures together
_KEPT = 1000  # faults that are kept word by word; all are counted


class Fault(NamedTuple):
    """A row that was left out: where it stands in the source, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Faults:
    """The rows that were left out: all are counted, the first thousand are named."""

    def __init__(self) -> None:
        self._kept: list[Fault] = []
        self.count = 0

    def add(self, where: str, reason: object) -> None:
        self.count += 1
        if len(self._kept) < _KEPT:
            self._kept.append(Fault(printable(where, 200), printable(str(reason), 300)))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._kept)

    def __getitem__(self, index: int) -> Fault:
        return self._kept[index]


def check_row(row: Row) -> None:
    """Raises RecordError with the reason for a row that cannot be played."""
    for name in ("row_id", "source"):
        _check_name(name, getattr(row, name))
    if row.split not in SPLITS:
        raise RecordError(f"split={kinds.quote(row.split)} is none of {', '.join(SPLITS)}")
    _check_text("instruction", row.instruction)
    if not row.instruction.strip():
        raise RecordError("instruction is empty")
    if not 1 <= len(row.steps) <= MAX_STEPS:
        raise RecordError(f"{len(row.steps)} steps, expected 1 to {MAX_STEPS}")
    if (elements := sum(len(step.elements) for step in row.steps)) > MAX_ROW_ELEMENTS:
        raise RecordError(f"{elements} elements, at most {MAX_ROW_ELEMENTS} are allowed in a row")
    if len(row.labels) > MAX_LABELS:
        raise RecordError(f"{len(row.labels)} labels, at most {MAX_LABELS} are allowed")
    for name, value in row.labels.items():
        _check_name("the name of a label", name)
        _check_text(f"label {name}", value, MAX_NAME_CHARS)
    for number, step in enumerate(row.steps):
        try:
            _check_step(step)
        except (RecordError, ActionError, ImageError) as error:
            raise RecordError(f"step {number}: {error}") from None
    if (total := sum(len(step.image) for step in row.steps)) > MAX_ROW_BYTES:
        raise RecordError(f"pictures of {total} bytes, at most {MAX_ROW_BYTES} are allowed a row")


def _check_step(step: Step) -> None:
    size = (step.width_px, step.height_px)
    for name, side in zip(("width_px", "height_px"), size, strict=True):
        if not isinstance(side, int) or isinstance(side, bool) or side < 1:
            raise RecordError(f"{name}={kinds.quote(side)}, expected a whole number from 1 on")
    if size[0] * size[1] > MAX_PIXELS:
        raise RecordError(f"a screen of {size[0]}x{size[1]}, at most {MAX_PIXELS} pixels")
    if len(step.image) > MAX_IMAGE_BYTES:
        raise RecordError(f"a picture of {len(step.image)} bytes, at most {MAX_IMAGE_BYTES}")
    found = image_size(step.image, max_pixels=MAX_PIXELS)
    if found != size:
        raise RecordError(
            f"the picture has {found[0]}x{found[1]} pixels, the row says {size[0]}x{size[1]}"
        )
    kinds.validate(step.action, size)
    _check_text("step instruction", step.instruction)
    if len(step.elements) > MAX_ELEMENTS:
        raise RecordError(f"{len(step.elements)} elements, at most {MAX_ELEMENTS} are allowed")
    for box in (*((step.box,) if step.box else ()), *step.elements):
        check_box(box, size)


def check_box(box: Box, size: tuple[int, int]) -> None:
    """Raises RecordError for a box that is no rectangle inside a picture of (width, height)."""
    left, top, right, bottom = box
    shown = ", ".join(f"{side:g}" if isinstance(side, float) else repr(side) for side in box)
    if not all(isinstance(side, int | float) and math.isfinite(side) for side in box):
        raise RecordError(f"box ({shown}) is not made of finite numbers")
    if not (left < right and top < bottom):
        raise RecordError(f"box ({shown}) is empty or turned: expected left < right, top < bottom")
    if left < 0 or top < 0 or right > size[0] or bottom > size[1]:
        raise RecordError(f"box ({shown}) is outside of a screen of {size[0]}x{size[1]}")


def _check_text(name: str, value: object, max_chars: int = MAX_TEXT_CHARS) -> None:
    if not isinstance(value, str):
        raise RecordError(f"{name} is a {type(value).__name__}, expected text")
    if len(value) > max_chars:
        raise RecordError(f"{name} has {len(value)} characters, at most {max_chars} are allowed")
    if any("\ud800" <= char <= "\udfff" or char == "\0" for char in value):
        raise RecordError(f"{name} holds a lone surrogate or a NUL")


def _check_name(name: str, value: object) -> None:
    _check_text(name, value, MAX_NAME_CHARS)
    if not value or printable(str(value), MAX_NAME_CHARS) != value:
        raise RecordError(f"{name}={kinds.quote(value)}: expected printable text on one line")
