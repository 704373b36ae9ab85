"""A folder with a set, of the drafts of its sources: rows, splits, files for verl, a summary."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gui_data import demo, sets
from tools.gui_data.pictures import look, shrink
from tools.gui_data.source import ROW_ERRORS, Draft, LeftOut, Source
from tools.gui_data.splitting import Splitter
from uirl_jax.errors import ConfigError, RecordError, UirlError
from uirl_jax.store.files import new_directory, write_atomically
from uirl_jax.verifiers.recorded import verl
from uirl_jax.verifiers.recorded.checks import SPLITS, check_row
from uirl_jax.verifiers.recorded.parquet import RowFile, write_rows
from uirl_jax.verifiers.recorded.row import Row, Step
from uirl_jax.verifiers.recorded.rules import TOUCHES
from uirl_jax.verifiers.recorded.tables import require_pyarrow

ROWS, LEFT_OUT, SUMMARY, VERL = "rows.parquet", "left_out.jsonl", "summary.json", "verl"
_PROGRESS_S = 5.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to make of a source.

    Attributes:
      images, splits: as in `Source`.
      limit: rows after which reading stops.
      longest_px: larger pictures are shrunk to it.
      validation_share, test_share: of the screens, where the source has no splits.
      demo_rows, demo_seed: of the demo set.
    """

    images: Path | None = None
    splits: Path | None = None
    limit: int | None = None
    longest_px: int | None = None
    validation_share: float = 0.0
    test_share: float = 0.1
    has_verl: bool = True
    demo_rows: int = 90
    demo_seed: int = 0


def make_set(
    kind: str, paths: Sequence[str], out: Path, wanted: Wanted
) -> tuple[dict[str, Any], LeftOut]:
    """Makes the folder `out`, whole; what its summary.json says, and what was left out.

    Raises: ConfigError: sources that do not fit the kind, or pyarrow is missing. RecordError: no
      row is left. UirlError: it cannot be written, or a source not be read. `out` is not there
      then.
    """
    if wanted.test_share + wanted.validation_share > 1:
        raise ConfigError("--test_share and --validation_share are more than everything")
    require_pyarrow()
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give another, or delete it")
    try:
        with new_directory(out) as folder, (folder / LEFT_OUT).open("wb") as file:
            left_out = LeftOut(file)
            drafts = _drafts(kind, paths, wanted, left_out)
            summary = prepare(drafts, left_out, folder, wanted)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UirlError(f"--out={out}: {error.strerror or error}") from error
    return summary, left_out


def _drafts(kind: str, paths: Sequence[str], wanted: Wanted, left_out: LeftOut) -> Iterator[Draft]:
    sets.refuse_online(kind)
    sets.refuse_unread(
        kind, has_images=wanted.images is not None, has_splits=wanted.splits is not None
    )
    if kind == sets.DEMO:
        if paths:
            raise ConfigError(f"--kind=demo draws its screens and takes no source, got {paths[0]}")
        return demo.read(wanted.demo_rows, wanted.demo_seed)
    if not paths:
        raise ConfigError(f"--kind={kind} needs a source: the folder of the set, or a file of it")
    sources = []
    for number, path in enumerate(map(Path, paths)):
        with _reading(path):
            sources.append(
                Source(
                    path,
                    images=wanted.images,
                    splits=wanted.splits,
                    left_out=left_out,
                    number=number,
                )
            )
    return _of_sources(kind, sources)


def _of_sources(kind: str, sources: Sequence[Source]) -> Iterator[Draft]:
    for source in sources:
        source.left_out.source = f"{source.path}: " if len(sources) > 1 else ""
        with _reading(source.path):
            yield from sets.READERS[kind](source)


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """What cannot be read is named: whoever writes the set would take it for a fault of its own."""
    try:
        yield
    except OSError as error:
        raise UirlError(f"{error.filename or source}: {error.strerror or error}") from error


def prepare(
    drafts: Iterator[Draft], left_out: LeftOut, out: Path, wanted: Wanted
) -> dict[str, Any]:
    """Fills a folder with the set; what summary.json says.

    Raises: RecordError: no row is left. UirlError: it cannot be written.
    """
    splitter = Splitter(wanted.validation_share, wanted.test_share)
    rows = _rows(drafts, left_out, splitter, wanted)
    first = next(rows, None)
    if first is None:
        reason = f"; the first: {left_out.first}" if left_out.first else ": the source is empty"
        raise RecordError(f"no row is left{reason}")
    write_rows(out / ROWS, itertools.chain([first], rows))
    written = RowFile(out / ROWS)
    of_split = {split: numbers for split in SPLITS if (numbers := written.splits.get(split))}
    if wanted.has_verl:
        for split, numbers in of_split.items():
            unsaid = verl.write_verl(
                out / VERL / f"{split}.parquet", (written[number] for number in numbers)
            )
            for fault in unsaid:
                left_out.add("verl row", fault.where, fault.reason)
    summary = {
        "rows": len(written),
        "steps": sum(len(written.sizes(number)) for number in range(len(written))),
        "splits": {split: len(numbers) for split, numbers in of_split.items()},
        "left_out": dict(sorted(left_out.counts.items())),
        "screens_in_two_splits": splitter.shared_screens,
    }
    write_atomically(out / SUMMARY, json.dumps(summary, indent=1).encode() + b"\n")
    return summary


def _rows(
    drafts: Iterator[Draft], left_out: LeftOut, splitter: Splitter, wanted: Wanted
) -> Iterator[Row]:
    """The rows that are right, each with its split."""
    ids, progress = set[str](), _Progress()

    def tell(where: str) -> None:
        progress.tell(len(ids), left_out.counts["row"], where)

    left_out.on_add = tell  # a reader may leave out a million rows before it yields a draft
    for draft in drafts:
        tell(draft.where)
        try:
            row = _row(draft, splitter, wanted)
            if row.row_id in ids:
                raise RecordError(f"there was a row with the id {row.row_id!r} before")
        except ROW_ERRORS as error:
            left_out.add("row", draft.where, error)
            continue
        ids.add(row.row_id)
        yield row
        if len(ids) == wanted.limit:
            return


def _row(draft: Draft, splitter: Splitter, wanted: Wanted) -> Row:
    """Raises one of ROW_ERRORS."""
    row = draft.make()
    check_row(dataclasses.replace(row, split=row.split or SPLITS[0]))
    for number, step in enumerate(row.steps):
        _check_touch(step, number)
    split = splitter.assign(row.split, [look(step.image).digest for step in row.steps])
    steps = row.steps
    if wanted.longest_px is not None:
        steps = tuple(shrink(step, wanted.longest_px) for step in steps)
    row = dataclasses.replace(row, split=split, steps=steps)
    check_row(row)
    return row


def _check_touch(step: Step, number: int) -> None:
    """Raises RecordError where a touch is not in its own box: one of the two places is wrong.

    A pixel beside it is allowed, because sets round points and boxes differently.
    """
    action, box = step.action, step.box
    if box is None or action.kind not in TOUCHES:
        return
    assert action.x is not None and action.y is not None  # of every valid touch
    left, top, right, bottom = box
    off_px = max(left - action.x, action.x - right, top - action.y, action.y - bottom)
    if off_px > 1:
        raise RecordError(
            f"step {number}: the {action.kind} at ({action.x}, {action.y}) is outside of its box "
            f"({left:g}, {top:g}, {right:g}, {bottom:g})"
        )


class _Progress:
    """A line on stderr every few seconds: sets are of unknown length."""

    def __init__(self) -> None:
        self._started_s = self._told_s = time.monotonic()

    def tell(self, rows: int, left_out: int, where: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _PROGRESS_S:
            self._told_s = now_s
            speed = rows / (now_s - self._started_s)
            print(
                f"prepare_gui_data: rows={rows} left_out={left_out} rows_per_s={speed:.1f} "
                f"at={where}",
                file=sys.stderr,
                flush=True,
            )
