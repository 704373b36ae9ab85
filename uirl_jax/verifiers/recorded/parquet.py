"""Rows in a parquet file: written by `tools.prepare_gui_data`, read by the recorded tasks.

A file is a row of `row.Row` a record, its steps nested (`schema`), in row groups of about a
megabyte: whoever wants a row reads its group. The labels are a list of pairs, because not every
reader takes maps. pyarrow reads and writes (`tables`); fastparquet silently returned None for
nested columns.

Files are untrusted. Before a page is read the footer must have our schema, at most so many rows and
bytes, no encoding that repeats values (`tables.ENCODINGS`) and no compression but snappy (at most
22 bytes become of one). A broken row is left out and named in `RowFile.faults`; a broken file is
one RecordError.
"""

import collections
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.checks import (
    MAX_LABELS,
    MAX_ROW_ELEMENTS,
    MAX_STEPS,
    Faults,
    check_row,
)
from uirl_jax.verifiers.recorded.row import Box, Row, Step
from uirl_jax.verifiers.recorded.tables import (
    check_groups,
    open_parquet,
    read_group,
    require_pyarrow,
    write_records,
)

VERSION_KEY, VERSION = b"uirl_jax.recorded", b"1"
_ACTION_TEXTS = ("kind", "text", "keys", "direction")
_ACTION_NUMBERS = ("x", "y", "x2", "y2", "amount")


def schema() -> Any:
    """pyarrow.Schema of a file; every field may be null, so that other writers can make one."""
    pa = require_pyarrow()
    box = pa.struct([(side, pa.float64()) for side in Box._fields])
    action = pa.struct(
        [
            *((name, pa.string()) for name in _ACTION_TEXTS),
            *((name, pa.int32()) for name in _ACTION_NUMBERS),
            ("seconds", pa.float64()),
        ]
    )
    step = pa.struct(
        [
            ("image", pa.binary()),
            ("width_px", pa.int32()),
            ("height_px", pa.int32()),
            ("action", action),
            ("box", box),
            ("elements", pa.list_(box)),
            ("instruction", pa.string()),
        ]
    )
    label = pa.struct([("name", pa.string()), ("value", pa.string())])
    return pa.schema(
        [
            ("row_id", pa.string()),
            ("source", pa.string()),
            ("split", pa.string()),
            ("instruction", pa.string()),
            ("steps", pa.list_(step)),
            ("labels", pa.list_(label)),
        ],
        metadata={VERSION_KEY: VERSION},
    )


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Writes a file whole: it appears when the last row is in it. Returns how many there are.

    Args:
      rows: read one by one; a row group of them is held in memory.
    Raises: RecordError: a row that `check_row` refuses, or an id that was there before. UirlError:
      the disk is full or the directory not writable. The path is unchanged then.
    """
    ids: set[str] = set()

    def checked() -> Iterator[dict[str, Any]]:
        for row in rows:
            try:
                check_row(row)
                if row.row_id in ids:
                    raise RecordError("there was a row with this id before")
            except RecordError as error:
                raise RecordError(f"{path}: row {len(ids)} ({row.row_id!r}): {error}") from None
            ids.add(row.row_id)
            yield to_record(row)

    write_records(path, schema(), checked())
    return len(ids)


def to_record(row: Row) -> dict[str, Any]:
    """The row as `schema` has it, in plain objects."""
    return {
        "row_id": row.row_id,
        "source": row.source,
        "split": row.split,
        "instruction": row.instruction,
        "steps": [
            {
                **{"image": step.image, "width_px": step.width_px, "height_px": step.height_px},
                **{"action": vars(step.action), "instruction": step.instruction},
                "box": step.box._asdict() if step.box else None,
                "elements": [box._asdict() for box in step.elements],
            }
            for step in row.steps
        ],
        "labels": [{"name": name, "value": value} for name, value in row.labels.items()],
    }


def _record(table: Any) -> dict[str, Any]:
    """The plain objects of a table of one row.

    Raises: RecordError: a list is too long. Of a null in it, which takes no byte of the file,
      Python makes an object for every field.
    """

    def total(lists: Any) -> int:
        return sum(length or 0 for length in lists.value_lengths().to_pylist())

    steps, labels = (table[name].combine_chunks() for name in ("steps", "labels"))
    for name, lists, most in (("steps", steps, MAX_STEPS), ("labels", labels, MAX_LABELS)):
        if (length := total(lists)) > most:
            raise RecordError(f"{length} {name}, at most {most} are allowed")
    elements = total(steps.flatten().field("elements"))
    if elements > MAX_ROW_ELEMENTS:
        raise RecordError(f"{elements} elements, at most {MAX_ROW_ELEMENTS} are allowed in a row")
    return table.to_pylist()[0]


def from_record(record: Mapping[str, Any]) -> Row:
    """The row of a record.

    Raises: RecordError: a value is missing. Values are not checked: that is `check_row`'s.
    """
    steps = []
    for number, step in enumerate(record["steps"] or []):
        if step is None or step["action"] is None or step["image"] is None:
            raise RecordError(f"step {number}: the step, its action or its picture is missing")
        steps.append(
            Step(
                image=step["image"],
                width_px=step["width_px"],
                height_px=step["height_px"],
                action=Action(**step["action"]),
                box=_box(step["box"]) if step["box"] is not None else None,
                elements=tuple(_box(box) for box in step["elements"] or ()),
                instruction=step["instruction"] or "",
            )
        )
    labels: dict[str, str] = {}
    for label in record["labels"] or []:
        if label is None or label["name"] in labels:
            raise RecordError("a label is missing, or there twice")
        labels[label["name"]] = label["value"]
    texts = {name: record[name] for name in ("row_id", "source", "split", "instruction")}
    return Row(**texts, steps=tuple(steps), labels=labels)


def _box(sides: Mapping[str, Any] | None) -> Box:
    if sides is None or None in sides.values():
        raise RecordError("a box without a side")
    return Box(**sides)


class RowFile:
    """The rows of a file, by number. Threads may share it.

    Opening reads all columns, of the pictures the headers: about a gigabyte a second. What stays in
    memory is each row's place, split, sizes, and a hash of its first picture.

    Args:
      kept_bytes: so much of the latest row groups stays in memory, and always one.

    Attributes:
      faults: the rows that were left out. Numbers count the others.

    Raises: RecordError: no parquet file, or not one of rows. ConfigError: pyarrow is missing.
    """

    def __init__(self, path: str | Path, *, kept_bytes: int = 64 * 2**20) -> None:
        self._path = Path(path)
        self.faults = Faults()
        self._lock = threading.Lock()
        self._kept_bytes = kept_bytes
        self._groups: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._file = open_parquet(self._path)
        self._check_schema()
        check_groups(self._path, self._file.metadata)
        self._places: list[tuple[int, int]] = []  # row group, row in it
        self._splits: list[str] = []
        self._sizes: list[tuple[tuple[int, int], ...]] = []
        self._screens: list[bytes] = []
        self._index()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        """Raises: RecordError: the file was changed."""
        group, place = self._places[index]
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._read(group)
                kept_bytes = sum(table.nbytes for table in self._groups.values())
                while kept_bytes > self._kept_bytes and len(self._groups) > 1:
                    kept_bytes -= self._groups.popitem(last=False)[1].nbytes
            self._groups.move_to_end(group)
            table = self._groups[group].slice(place, 1)
        try:
            row = from_record(_record(table))
            check_row(row)
        except RecordError as error:
            raise RecordError(f"{self._path}: row {index}: {error}") from None
        return row

    @property
    def splits(self) -> dict[str, list[int]]:
        """The numbers of the rows by split; a split without a row is not in it."""
        found: dict[str, list[int]] = {}
        for number, split in enumerate(self._splits):
            found.setdefault(split, []).append(number)
        return found

    def sizes(self, index: int) -> tuple[tuple[int, int], ...]:
        """(width, height) in pixels of the picture of each step."""
        return self._sizes[index]

    def screen(self, index: int) -> bytes:
        """What names the picture of the first step; rows about one screen have the same."""
        return self._screens[index]

    def _check_schema(self) -> None:
        found, wanted = self._file.schema_arrow, schema()
        version = (found.metadata or {}).get(VERSION_KEY, VERSION)
        if version != VERSION:
            raise RecordError(
                f"{self._path}: rows of version {printable(repr(version), 20)}, this reader knows "
                f"{VERSION.decode()}; prepare the set again (tools.prepare_gui_data)"
            )
        for field in wanted:
            index = found.get_field_index(field.name)
            if index < 0 or found.field(index).type != field.type:
                got = "missing" if index < 0 else printable(str(found.field(index).type), 80)
                raise RecordError(
                    f"{self._path}: column {field.name} is {got}, so these are no rows of "
                    "tools.prepare_gui_data; convert the file with it"
                )

    def _index(self) -> None:
        """Reads every group once, and keeps what is asked of rows without reading them."""
        alike: dict[Any, Any] = {}  # equal splits and sizes are kept once
        ids: set[str] = set()
        number = 0
        for group in range(self._file.metadata.num_row_groups):
            table = self._read(group)
            for place in range(table.num_rows):
                row_id = None
                try:
                    record = _record(table.slice(place, 1))
                    row_id = record["row_id"]
                    row = from_record(record)
                    check_row(row)
                    if row.row_id in ids:
                        raise RecordError("there was a row with this id before")
                except (RecordError, UnicodeDecodeError) as error:
                    self.faults.add(f"{self._path}: row {number} ({row_id!r})", error)
                else:
                    ids.add(row.row_id)
                    self._places.append((group, place))
                    self._splits.append(alike.setdefault(row.split, row.split))
                    sizes = tuple((step.width_px, step.height_px) for step in row.steps)
                    self._sizes.append(alike.setdefault(sizes, sizes))
                    screen = hashlib.blake2b(row.steps[0].image, digest_size=8).digest()
                    self._screens.append(alike.setdefault(screen, screen))
                number += 1

    def _read(self, group: int) -> Any:
        names = [field.name for field in schema()]
        return read_group(self._path, self._file, group, names)
