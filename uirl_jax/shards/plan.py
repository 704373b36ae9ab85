"""Where every token and screenshot of a step goes: decided from lengths, before any pixel is read.

`batching` cuts records into pieces -> here: pieces into rows, rows into batches, screenshots into
rows of the vision tower -> `batching.assemble` builds the arrays, on several hosts each its own
rows. A plan names records by their number in the step, so that it can be sent to other hosts as
JSON. numpy is not needed, no pixels and no weights are known here.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from uirl_jax.errors import ConfigError
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.shards import packing


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The fixed shapes that a batch may have; of each ascending tuple the smallest that fits.

    With `pack`, sequences share rows; with `share_prompts`, also what they begin with: the members
    of a group read one screenshot and one instruction, and a row then holds them once. That pays
    where an episode is one short turn: for a group of 8 behind 1,000 visual tokens a quarter of the
    time (v5e, by the planner); with ten turns the same time and three times the memory.
    """

    # B: how many go through at once; a step takes as many batches as it needs.
    rows: int = dataclasses.field(default=64, metadata={"min": 1, "max": 65_536})
    # T.
    row_lengths: tuple[int, ...] = dataclasses.field(
        default=(128, 256, 512), metadata={"min": 1, "max": 1_000_000}
    )
    # S, sampled tokens of a row; after these, T.
    sampled_lengths: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"min": 1, "max": 1_000_000}
    )
    # I, one distinct screenshot per row.
    image_rows: tuple[int, ...] = dataclasses.field(
        default=(8, 16, 32, 64), metadata={"min": 1, "max": 65_536}
    )
    # P of a row; `Inputs.row_tokens` refuses some.
    patch_lengths: tuple[int, ...] = dataclasses.field(
        default=(256,), metadata={"min": 1, "max": 1_000_000}
    )
    pack: bool = True  # several sequences in a row; else one each
    share_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("row_lengths", "sampled_lengths", "image_rows", "patch_lengths"):
            sizes = getattr(self, name)
            wrong = sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes)))
            if wrong or not (sizes or name == "sampled_lengths"):
                raise ConfigError(f"batching.{name} is {sizes}, expected ascending sizes")
        if self.rows < 1:
            raise ConfigError(f"batching.rows is {self.rows}, expected at least 1")
        if self.share_prompts and not self.pack:
            raise ConfigError("batching.share_prompts needs batching.pack: a row holds them all")


class PlannedSpan(NamedTuple):
    """Tokens [start, stop) of a record's sequence, from `column` of a row on."""

    record: int  # its number in the step
    sequence: int  # of the record (batching.sequences)
    start: int
    stop: int
    column: int
    segment: int
    prefix_segment: int


class PlannedScreen(NamedTuple):
    """A screenshot's row in the arrays of the vision tower."""

    key: str
    record: int  # one that holds it
    row: int


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """One batch: its shapes, the spans of each filled row, the rows of its screenshots."""

    row_length: int  # T
    sampled_length: int  # S
    image_rows: int  # I
    patch_length: int  # P
    rows: Mapping[int, tuple[PlannedSpan, ...]]
    screens: tuple[PlannedScreen, ...]

    def records(self, rows: Collection[int], image_rows: Collection[int]) -> set[int]:
        """Numbers of the records that building these rows needs."""
        needed = {span.record for row in self.rows.keys() & set(rows) for span in self.rows[row]}
        return needed | {screen.record for screen in self.screens if screen.row in image_rows}

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"rows": {str(row): spans for row, spans in self.rows.items()}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        rows = {
            int(row): tuple(PlannedSpan(*span) for span in spans)
            for row, spans in content["rows"].items()
        }
        screens = tuple(PlannedScreen(*screen) for screen in content["screens"])
        return cls(**{**content, "rows": rows, "screens": screens})


def plan_batches(
    pieces: list[packing.Piece],
    screens: Mapping[str, Screen],
    holders: Mapping[str, int],
    *,
    inputs: Inputs,
    cfg: BatchConfig,
    parts: int = 1,
) -> list[BatchPlan]:
    """Plans of the batches that hold all pieces.

    Args:
        screens: by key; only their numbers of patches are read.
        holders: a record that holds each screenshot.
        parts: equal parts that the mesh cuts a batch's rows into. Filled rows are spread over
            them, and a screenshot goes to the part of the first row that reads it, so that the
            hosts of these parts have equal work and read few records twice.
    Raises: ConfigError: a sequence, a screenshot or their number exceeds the config's shapes.
    """
    row_length, filled = packing.fill_rows(
        pieces,
        rows=cfg.rows,
        row_lengths=cfg.row_lengths,
        pack=cfg.pack,
        share_prompts=cfg.share_prompts,
    )
    for length in cfg.patch_lengths:
        inputs.row_tokens(length)
    plans = []
    for batch_rows in _cut_batches(filled, cfg):
        at = _spread(len(batch_rows), cfg.rows, parts)
        keys = _first_rows(batch_rows, at)
        image_rows = _smallest(len(keys), cfg.image_rows, "distinct screenshots", "image_rows")
        largest = max((screens[key].patches for key in keys), default=0)
        placed = _place_screens(keys, cfg.rows, image_rows, parts)
        counts = [sum(_sampled(span) for span in row.spans) for row in batch_rows]
        sizes = (*cfg.sampled_lengths, row_length)
        plans.append(
            BatchPlan(
                row_length,
                next(size for size in sizes if size >= max(counts, default=0)),
                image_rows,
                _smallest(largest, cfg.patch_lengths, "patches of a screenshot", "patch_lengths"),
                {
                    row: tuple(_planned(span) for span in batch_row.spans)
                    for row, batch_row in zip(at, batch_rows, strict=True)
                },
                tuple(PlannedScreen(key, holders[key], row) for key, row in placed.items()),
            )
        )
    return plans


def _sampled(span: packing.Span) -> int:
    return int((span.piece.completion_mask[span.start : span.stop] > 0).sum())


def _planned(span: packing.Span) -> PlannedSpan:
    piece = span.piece
    return PlannedSpan(piece.trajectory, piece.sequence, *span[1:])


def _cut_batches(rows: list[packing.Row], cfg: BatchConfig) -> list[list[packing.Row]]:
    """Rows in their order, at most cfg.rows to a batch and no more screenshots than it holds."""
    batches: list[list[packing.Row]] = [[]]
    seen: set[str] = set()
    for row in rows:
        keys = {key for span in row.spans for key in span.piece.image_keys}
        full = len(batches[-1]) == cfg.rows or len(seen | keys) > cfg.image_rows[-1]
        if full and batches[-1]:
            batches.append([])
            seen = set()
        batches[-1].append(row)
        seen |= keys
    return batches


def _spread(count: int, rows: int, parts: int) -> list[int]:
    """The rows of a batch that `count` filled rows take: the parts in turn.

    Four filled rows of eight, in two parts: 0 4 1 5.
    """
    if rows % parts:  # every device then holds all rows
        return list(range(count))
    return [index % parts * (rows // parts) + index // parts for index in range(count)]


def _first_rows(rows: list[packing.Row], at: list[int]) -> dict[str, int]:
    """Screenshot -> the first of the batch's rows that reads it, in the order of the rows."""
    first: dict[str, int] = {}
    for number, row in zip(at, rows, strict=True):
        for span in row.spans:
            for key in span.piece.image_keys:
                first.setdefault(key, number)
    return first


def _place_screens(
    first_rows: Mapping[str, int], rows: int, image_rows: int, parts: int
) -> dict[str, int]:
    """Screenshot -> its row, in the part of its first row, or in the emptiest if that is full."""
    if image_rows % parts or rows % parts:
        return {key: row for row, key in enumerate(first_rows)}
    size, used = image_rows // parts, collections.Counter[int]()
    placed = {}
    for key, row in first_rows.items():
        part = row // (rows // parts)
        if used[part] == size:
            part = min(range(parts), key=lambda other: used[other])
        placed[key] = part * size + used[part]
        used[part] += 1
    return placed


def _smallest(needed: int, sizes: tuple[int, ...], what: str, name: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ConfigError(f"{needed} {what}, {name} accepts at most {sizes[-1]}: add a larger one")
