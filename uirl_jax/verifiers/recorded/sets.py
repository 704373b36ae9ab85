"""The recorded sets of a process: names, their rows, and a session of a task `recorded/<name>`.

Rows are read in a thread, and the latest are kept: the members of a group play the same row.
"""

import asyncio
import collections
from collections.abc import Mapping
from pathlib import Path

from uirl_jax.errors import ConfigError, UirlError, VerifierError
from uirl_jax.log_lines import key_values
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.recorded.draw import Draw, Rows
from uirl_jax.verifiers.recorded.rewards import PREFIX
from uirl_jax.verifiers.recorded.row import Row
from uirl_jax.verifiers.recorded.task import RecordedTask, walks
from uirl_jax.verifiers.tasks import variants

KEPT_ROWS, KEPT_BYTES = 64, 128 * 2**20  # of each set, and always one; a row may hold 128 MiB


class _Set:
    def __init__(self, rows: Rows) -> None:
        self.rows, self.draw = rows, Draw(rows)
        self.kept: collections.OrderedDict[int, Row] = collections.OrderedDict()
        self.lock = asyncio.Lock()  # a file is read by one thread at a time

    async def row(self, index: int) -> Row:
        if index not in self.kept:
            async with self.lock:
                if index not in self.kept:
                    self.kept[index] = await asyncio.to_thread(self.rows.__getitem__, index)
                    while len(self.kept) > 1 and (
                        len(self.kept) > KEPT_ROWS
                        or sum(map(_picture_bytes, self.kept.values())) > KEPT_BYTES
                    ):
                        self.kept.popitem(last=False)
        row = self.kept[index]
        self.kept.move_to_end(index)
        return row


def _picture_bytes(row: Row) -> int:
    return sum(len(step.image) for step in row.steps)


class RecordedSets:
    """Args: sets: rows by name."""

    def __init__(self, sets: Mapping[str, Rows]) -> None:
        self._sets = {PREFIX + name: _Set(rows) for name, rows in sets.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks: recorded/<name>."""
        return tuple(self._sets)

    def sizes(self) -> set[tuple[int, int]]:
        """(width, height) of all pictures."""
        rows = [each.rows for each in self._sets.values()]
        return {size for each in rows for index in range(len(each)) for size in each.sizes(index)}

    def training_screens(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Of a task by its name, as draw.Draw has them; empty: it is none of these."""
        return self._sets[name].draw.training_screens if name in self._sets else ()

    def shown(self, task: TaskSpec) -> tuple[int, int]:
        """The row of a task, and a number of its step: two seeds with equal ones show the same.

        Raises: VerifierError: no such set or variant, or no rows for its seed.
        """
        found = self._find(task)
        drawn = found.draw.pick(task)
        steps = 1 if walks(task) else len(found.rows.sizes(drawn.row))
        return drawn.row, drawn.round % steps

    async def open(self, task: TaskSpec) -> RecordedTask:
        """Starts a task.

        Raises: VerifierError: no such set or variant, no rows for its seed, or a broken row.
        """
        found = self._find(task)
        drawn = found.draw.pick(task)
        try:
            row = await found.row(drawn.row)
        except (OSError, UirlError) as error:
            raise VerifierError(f"{task.name}: row {drawn.row} cannot be read: {error}") from error
        return RecordedTask(task, row, drawn)

    def _find(self, task: TaskSpec) -> _Set:
        found = self._sets.get(task.name)
        if found is None:
            near = variants.nearest(task.name, self._sets) if self._sets else ""
            raise VerifierError(
                f"unknown task {task.name!r}{near}; recorded sets are named in "
                "verifier.recorded.sets, or with --recorded-set=NAME=FILE of a server"
            )
        return found


def load(paths: Mapping[str, str]) -> RecordedSets:
    """Opens the files of sets, and says how many of their rows are broken and left out.

    Raises: ConfigError: files that are missing or are no sets; all at once.
    """
    if not paths:
        return RecordedSets({})
    from uirl_jax.verifiers.recorded import parquet  # needs an optional package

    sets: dict[str, Rows] = {}
    faults = []
    for name, path in paths.items():
        try:
            sets[name] = rows = parquet.RowFile(Path(path))
            if rows.faults:
                first = str(rows.faults[0])
                print(
                    key_values(
                        "recorded_rows_left_out", set=name, rows=len(rows.faults), first=first
                    ),
                    flush=True,
                )
        except (OSError, UirlError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise ConfigError("recorded sets: " + "; ".join(faults))
    return RecordedSets(sets)
