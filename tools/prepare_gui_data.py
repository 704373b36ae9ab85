"""Makes a set of recorded screens and steps from a published one, from JSON lines, or from nothing.

    python -m tools.prepare_gui_data --kind=demo --rows=100 --out=demo
    python -m tools.prepare_gui_data mine.jsonl --kind=jsonl --out=mine
    python -m tools.prepare_gui_data grounding grounding-test --kind=grounding --out=pointing
    python -m tools.prepare_gui_data aitw/general --kind=aitw --splits=general.json --out=general

--out gets rows.parquet, which tasks `recorded/<set>` play, verl/<split>.parquet for verl's
RLHFDataset, left_out.jsonl with every row that was left out and why, and summary.json. It is
renamed into place when it is whole. Nothing is downloaded. docs/gui_data.md.
"""

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

from tools.gui_data import demo, sets
from tools.gui_data.pictures import look, shrink
from tools.gui_data.source import ROW_ERRORS, Draft, LeftOut, Source
from tools.gui_data.splitting import Splitter
from uirl_jax.errors import ConfigError, RecordError, UirlError
from uirl_jax.store.files import new_directory, write_atomically
from uirl_jax.verifiers.recorded import verl
from uirl_jax.verifiers.recorded.checks import SPLITS, check_row
from uirl_jax.verifiers.recorded.parquet import RowFile, write_rows
from uirl_jax.verifiers.recorded.row import Row
from uirl_jax.verifiers.recorded.tables import require_pyarrow

ROWS, LEFT_OUT, SUMMARY, VERL = "rows.parquet", "left_out.jsonl", "summary.json", "verl"
_PROGRESS_S = 5.0

_KIND = flags.DEFINE_enum("kind", None, sets.KINDS, "of the source")
_OUT = flags.DEFINE_string("out", None, "folder for the set; it must not exist")
_IMAGES = flags.DEFINE_string("images", None, "folder of the pictures, if not the published one")
_SPLITS = flags.DEFINE_string("splits", None, "JSON table of splits, if not the published one")
_LIMIT = flags.DEFINE_integer("limit", None, "stop after so many rows", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest_px", None, "shrink larger pictures", lower_bound=16)
_TEST = flags.DEFINE_float("test_share", 0.1, "of a set without splits", 0, 1)
_VALIDATION = flags.DEFINE_float("validation_share", 0.0, "of a set without splits", 0, 1)
_VERL = flags.DEFINE_boolean("verl", True, "also files for verl")
_ROWS = flags.DEFINE_integer("rows", 90, "of --kind=demo", 1, 1_000_000)
_SEED = flags.DEFINE_integer("seed", 0, "of --kind=demo")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to make of the drafts."""

    limit: int | None = None
    longest_px: int | None = None
    validation_share: float = 0.0
    test_share: float = 0.1
    has_verl: bool = True


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
                left_out.add("row of verl", fault.where, fault.reason)
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
    for draft in drafts:
        progress.tell(len(ids), left_out.counts["row"], draft.where)
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
    split = splitter.assign(row.split, [look(step.image).digest for step in row.steps])
    steps = row.steps
    if wanted.longest_px is not None:
        steps = tuple(shrink(step, wanted.longest_px) for step in steps)
    row = dataclasses.replace(row, split=split, steps=steps)
    check_row(row)
    return row


def _drafts(kind: str, paths: list[str], left_out: LeftOut) -> Iterator[Draft]:
    """Raises: ConfigError: sources that do not fit the kind."""
    if kind == sets.DEMO:
        if paths:
            raise ConfigError(f"--kind=demo draws its screens and takes no source, got {paths[0]}")
        return demo.read(_ROWS.value, _SEED.value)
    sets.refuse_online(kind)
    if not paths:
        raise ConfigError(f"--kind={kind} needs a source: the folder of the set, or a file of it")
    sources = [
        Source(
            Path(path),
            images=Path(_IMAGES.value) if _IMAGES.value else None,
            splits=Path(_SPLITS.value) if _SPLITS.value else None,
            left_out=left_out,
        )
        for path in paths
    ]
    return itertools.chain.from_iterable(sets.READERS[kind](source) for source in sources)


def _run(paths: list[str]) -> None:
    if not _KIND.value or not _OUT.value:
        raise ConfigError("--kind or --out is missing; e.g. mine.jsonl --kind=jsonl --out=mine")
    if _TEST.value + _VALIDATION.value > 1:
        raise ConfigError("--test_share and --validation_share are more than everything")
    require_pyarrow()
    out = Path(_OUT.value)
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give another, or delete it")
    wanted = Wanted(
        _LIMIT.value, _LONGEST.value, _VALIDATION.value, _TEST.value, has_verl=_VERL.value
    )
    try:
        with new_directory(out) as folder, (folder / LEFT_OUT).open("wb") as file:
            left_out = LeftOut(file)
            summary = prepare(_drafts(_KIND.value, paths, left_out), left_out, folder, wanted)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UirlError(f"--out={out}: {error.strerror or error}") from error
    _tell(out, summary, left_out)


def _tell(out: Path, summary: dict[str, Any], left_out: LeftOut) -> None:
    splits = ", ".join(f"{split} {count}" for split, count in summary["splits"].items())
    print(f"{out / ROWS}: {summary['rows']} rows ({splits}), {summary['steps']} steps")
    if left_out.counts:
        counts = ", ".join(f"{count} {what}" for what, count in summary["left_out"].items())
        print(f"warning: left out: {counts}; {out / LEFT_OUT} names them")
        print(f"the first: {left_out.first}")
    if shared := summary["screens_in_two_splits"]:
        print(f"warning: {shared} screens are in two splits of the source's own")
    if len(summary["splits"]) == 1:
        print(f"warning: every row is in split {splits.split()[0]}")
    print(f"to play it: --recorded-set=NAME={out / ROWS}, and the task recorded/NAME")


def main(argv: list[str]) -> int:
    try:
        _run(argv[1:])
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    app.run(main)
