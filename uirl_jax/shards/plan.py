"""Where every token and screenshot of a step goes: decided from lengths, before any pixel is read.

`batching` cuts records into pieces -> here: pieces into rows, rows into batches, screenshots into
rows of the vision tower -> `batching.assemble` builds the arrays, on several hosts each its own
rows. A plan names records by their number in the step, so that it can be sent to other hosts as
JSON. numpy is not needed, no pixels and no weights are known here.

A mesh cuts the rows of a batch, of text and of images alike, over its data axis: between slices of
TPUs, or between hosts. A row of text reads only screenshots of its own part, so that no visual
token crosses; a screenshot that rows of two parts read is placed, and computed, in both:

    parts                 0       1         8 rows of text, 4 of images, mesh.data=2
    rows of text          0 1 2 3 4 5 6 7
    screenshots, by row   a a b b b c c -
    rows of images        a b     b c
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from uirl_jax.errors import ConfigError
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.shards import packing


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The fixed shapes that a batch may have; of each ascending tuple the smallest that fits.

    With `pack`, sequences share rows; with `share_prompts`, also what they begin with: the members
    of a group read one screenshot and one instruction, questions of a recorded set about one screen
    the screenshot alone, and a row then holds that once. That pays where an episode is one short
    turn: for a group of 8 behind 1,000 visual tokens a quarter of the
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
    # A group's prompt stands in a row once, and a screenshot that several prompts begin with; for
    # episodes of one turn.
    share_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("row_lengths", "sampled_lengths", "image_rows", "patch_lengths"):
            sizes = getattr(self, name)
            wrong = sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes)))
            if wrong or not (sizes or name == "sampled_lengths"):
                raise ConfigError(f"learner.batch.{name} is {sizes}, expected ascending sizes")
        if self.rows < 1:
            raise ConfigError(f"learner.batch.rows is {self.rows}, expected at least 1")
        if self.share_prompts and not self.pack:
            raise ConfigError(
                "learner.batch.share_prompts needs learner.batch.pack: a row holds them all"
            )


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
    data_parts: int  # equal parts of the rows; a row reads only its part's screenshots
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
    *,
    inputs: Inputs,
    cfg: BatchConfig,
    parts: tuple[int, int] = (1, 1),
) -> list[BatchPlan]:
    """Plans of the batches that hold all pieces.

    Args:
        screens: by key; only their numbers of patches are read.
        parts: sizes of the mesh's axes data and fsdp, which cut a batch's rows. A row reads
            screenshots of its own part of the data axis alone. Inside of that part, filled rows are
            spread over fsdp, and a screenshot goes to the first row that reads it, so that hosts
            have equal work and read few records twice. Data parts that do not divide cfg.rows are
            taken as one: every device then holds all rows.
    Raises: ConfigError: a sequence, a screenshot or their number exceeds the config's shapes.
    """
    data = data_parts(cfg, parts[0])
    fsdp = math.prod(parts) // data
    row_length, filled = packing.fill_rows(
        pieces,
        rows=cfg.rows,
        row_lengths=cfg.row_lengths,
        most_screens=screens_of_a_part(cfg.image_rows[-1], data),
        pack=cfg.pack,
        share_prompts=cfg.share_prompts,
    )
    for length in cfg.patch_lengths:
        inputs.row_tokens(length)
    return [
        _plan_batch(row_length, rows, screens, cfg, fsdp)
        for rows in _cut_batches(filled, cfg, data)
    ]


def _plan_batch(
    row_length: int,
    filled: list[list[packing.Row]],
    screens: Mapping[str, Screen],
    cfg: BatchConfig,
    fsdp: int,
) -> BatchPlan:
    """Args: filled: the rows of each part of the data axis."""
    parts = len(filled)
    size = cfg.rows // parts
    rows: dict[int, packing.Row] = {}
    readers = []
    for part, part_rows in enumerate(filled):
        at = _spread(len(part_rows), size, fsdp)
        readers.append(_first_readers(part_rows, at))
        rows |= {part * size + number: row for number, row in zip(at, part_rows, strict=True)}
    image_rows = _image_rows(max(map(len, readers)), cfg.image_rows, parts)
    placed = []
    for part, first in enumerate(readers):
        own = part_images(part, parts, image_rows)
        at = _place_screens([row for row, _ in first.values()], size, len(own), fsdp)
        placed += [
            PlannedScreen(key, record, own[row])
            for (key, (_, record)), row in zip(first.items(), at, strict=True)
        ]
    largest = max((screens[screen.key].patches for screen in placed), default=0)
    counts = [sum(_sampled(span) for span in row.spans) for row in rows.values()]
    sizes = (*cfg.sampled_lengths, row_length)
    return BatchPlan(
        row_length,
        next(size for size in sizes if size >= max(counts, default=0)),
        image_rows,
        _patch_length(largest, cfg.patch_lengths),
        parts,
        {number: tuple(_planned(span) for span in row.spans) for number, row in rows.items()},
        tuple(placed),
    )


def data_parts(cfg: BatchConfig, data: int) -> int:
    """Parts of the rows that read only their own screenshots; data: size of the mesh's axis."""
    return 1 if cfg.rows % data else data


def part_images(part: int, parts: int, image_rows: int) -> range:
    """The image rows that lie inside one of `parts` equal parts: of five, 0 1 and 3 4 in two."""
    return range(-(-part * image_rows // parts), (part + 1) * image_rows // parts)


def screens_of_a_part(image_rows: int, parts: int) -> int:
    """Screenshots that every one of the parts holds."""
    return min(len(part_images(part, parts, image_rows)) for part in range(parts))


def _sampled(span: packing.Span) -> int:
    return int((span.piece.completion_mask[span.start : span.stop] > 0).sum())


def _planned(span: packing.Span) -> PlannedSpan:
    piece = span.piece
    return PlannedSpan(piece.trajectory, piece.sequence, *span[1:])


def _cut_batches(
    rows: list[packing.Row], cfg: BatchConfig, parts: int
) -> list[list[list[packing.Row]]]:
    """Rows in their order, as batches of data parts, with no more screenshots than a part holds.

    A row goes to the part where it adds the fewest screenshots; of equal ones to the emptiest.
    """
    size, most = cfg.rows // parts, screens_of_a_part(cfg.image_rows[-1], parts)
    batches: list[list[list[packing.Row]]] = [[[] for _ in range(parts)]]
    seen: list[set[str]] = [set() for _ in range(parts)]
    for row in rows:
        fitting = [
            part
            for part, filled in enumerate(batches[-1])
            if not filled or (len(filled) < size and len(seen[part] | row.screens) <= most)
        ]
        if not fitting:
            batches.append([[] for _ in range(parts)])
            seen = [set() for _ in range(parts)]
            fitting = list(range(parts))
        part = min(fitting, key=lambda n: (len(row.screens - seen[n]), len(batches[-1][n])))
        batches[-1][part].append(row)
        seen[part] |= row.screens
    return batches


def _spread(count: int, rows: int, parts: int) -> list[int]:
    """The rows of a batch that `count` filled rows take: the parts in turn.

    Four filled rows of eight, in two parts: 0 4 1 5.
    """
    if rows % parts:  # every device then holds all rows
        return list(range(count))
    return [index % parts * (rows // parts) + index // parts for index in range(count)]


def _first_readers(rows: list[packing.Row], at: list[int]) -> dict[str, tuple[int, int]]:
    """Screenshot -> the first row that reads it, and the record by which it does, in row order."""
    first: dict[str, tuple[int, int]] = {}
    for number, row in zip(at, rows, strict=True):
        for span in row.spans:
            for key in span.piece.image_keys:
                first.setdefault(key, (number, span.piece.trajectory))
    return first


def _place_screens(first_rows: list[int], rows: int, image_rows: int, parts: int) -> list[int]:
    """The row of each screenshot: in the part of its first row, or in the emptiest if that is full.

    Args: rows, image_rows, parts: of one part of the data axis.
    """
    if image_rows % parts or rows % parts:
        return list(range(len(first_rows)))
    size, used = image_rows // parts, collections.Counter[int]()
    placed = []
    for row in first_rows:
        part = row // (rows // parts)
        if used[part] == size:
            part = min(range(parts), key=lambda other: used[other])
        placed.append(part * size + used[part])
        used[part] += 1
    return placed


def _image_rows(needed: int, sizes: tuple[int, ...], parts: int) -> int:
    """Args: needed: the most screenshots of a part."""
    for size in sizes:
        if needed <= screens_of_a_part(size, parts):
            return size
    where = f" in each of the {parts} parts of mesh.data" if parts > 1 else ""
    raise ConfigError(
        f"{needed} distinct screenshots of a sequence, learner.batch.image_rows={sizes} accepts at "
        f"most {screens_of_a_part(sizes[-1], parts)}{where}: add a larger one, e.g. "
        f"{needed * parts}"
    )


def _patch_length(needed: int, sizes: tuple[int, ...]) -> int:
    """Args: needed: patches of the largest screenshot."""
    for size in sizes:
        if needed <= size:
            return size
    raise ConfigError(
        f"{needed} patches of a screenshot, learner.batch.patch_lengths={sizes} accepts at most "
        f"{sizes[-1]}: add a larger one"
    )
