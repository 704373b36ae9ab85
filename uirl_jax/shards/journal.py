"""The learner's list of all shards it has noticed, in order.

Written by `queue.ShardQueue`, durably, before the queue returns a record of a noticed shard. The
data cursor of a checkpoint is a line number of the journal: after a crash the learner reads the
same shards in the same order, even if more have arrived. One process writes it, and it only grows
(about 150 bytes per shard).

    journal/0000000000.jsonl    lines 0 to 99, folded
    journal/0000000100.jsonl    lines 100 and 101: the shards noticed by one poll of the queue
    journal/0000000102.jsonl    the shards noticed by the next poll
    shards/journal.jsonl        the first lines of a run started by release 0.1.0, which appended

A store cannot append. Each poll that notices shards therefore writes a new small object, named by
the number of its first line: the cost does not grow with the run. Rewriting one object at each poll
would cost megabytes per poll in a long run, and a bucket allows about one write per second and
name. So that a restart need not read one object per poll, FOLD objects are merged into one under
the first one's name, and the others are deleted. If the process is killed in between, objects with
known lines remain; they are ignored.
"""

import contextlib
import dataclasses
import json
import re

from uirl_jax.errors import ShardError
from uirl_jax.store import Store, StoreUnavailableError, restart_error

JOURNAL = "journal"
APPENDED_JOURNAL = "shards/journal.jsonl"
FOLD = 100

_NAME = re.compile(rf"{JOURNAL}/\d{{10}}\.jsonl")


@dataclasses.dataclass(frozen=True)
class Line:
    """One shard: its path below shards/, its number of records, whether it is quarantined."""

    shard: str  # "a0/a0-<boot>-00000007-v3.tfrecord"
    records: int
    quarantined: bool


class Journal:
    """The lines so far.

    Raises: ShardError: one is damaged or missing. StoreUnavailableError: the storage does not
      answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lines: list[Line] = []
        # Names of the objects since the last fold, and of objects that an interrupted fold left.
        self._unfolded: list[str] = []
        self._redundant: list[str] = []
        try:
            self._read_appended()
            for name in filter(_NAME.fullmatch, store.names(JOURNAL)):
                self._read(name)
        except StoreUnavailableError:  # a restart helps
            raise
        except OSError as error:
            raise ShardError(
                f"{store.location(JOURNAL)}: {error.strerror}: cannot read the list of shards"
            ) from None

    def append(self, lines: list[Line]) -> None:
        """Add lines durably.

        Raises: ShardError: the disk is full; then no line was added. RestartError: the storage does
            not answer.
        """
        name = _name(len(self.lines))
        try:
            is_new = self._store.put_new(name, _to_bytes(lines))
        except StoreUnavailableError as error:  # written or not: a restart reads what is there
            raise restart_error(self._store.location(name), error) from None
        except OSError as error:
            raise ShardError(
                f"{self._store.location(name)}: {error.strerror}: cannot write the list of shards"
            ) from None
        if not is_new:
            raise ShardError(
                f"{self._store.location(name)}: written by another learner; a workdir can have "
                "only one learner: stop the other one"
            )
        self.lines += lines
        self._unfolded.append(name)
        if len(self._unfolded) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        first, *others = self._unfolded
        # The lines are already durable. If the disk is full now, a later append folds.
        with contextlib.suppress(OSError):
            self._store.put(first, _to_bytes(self.lines[_first_line(first) :]))
            self._store.delete(*others, *self._redundant)
            self._unfolded, self._redundant = [], []

    def _read(self, name: str) -> None:
        where = self._store.location(name)
        lines = _parse_lines(where, self._store.read(name))
        first, known = _first_line(name), len(self.lines)
        if first > known or not lines or first < known < first + len(lines):
            raise ShardError(
                f"{where}: has lines {first} to {first + len(lines)} of the journal, but {known} "
                "lines precede it: restore the missing file, or start in a new workdir"
            )
        if first < known:
            self._redundant.append(name)
            return
        self.lines += lines
        self._unfolded = [] if len(lines) >= FOLD else [*self._unfolded, name]

    def _read_appended(self) -> None:
        try:
            data = self._store.read(APPENDED_JOURNAL)
        except FileNotFoundError:
            return
        # A torn last line is dropped: no record of its shard was used before the kill.
        whole = data[: data.rfind(b"\n") + 1]
        self.lines = _parse_lines(self._store.location(APPENDED_JOURNAL), whole)


def _name(first_line: int) -> str:
    return f"{JOURNAL}/{first_line:010d}.jsonl"


def _first_line(name: str) -> int:
    return int(name.removeprefix(f"{JOURNAL}/").removesuffix(".jsonl"))


def _to_bytes(lines: list[Line]) -> bytes:
    return "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines).encode()


def _parse_lines(where: str, data: bytes) -> list[Line]:
    lines = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not (
            isinstance(fields, dict)
            and fields.keys() == {"shard", "records", "quarantined"}
            and isinstance(fields["shard"], str)
            and type(fields["records"]) is int
            and type(fields["quarantined"]) is bool
        ):
            raise ShardError(
                f"{where}: line {number} is damaged, so shards cannot be counted exactly once: "
                "start in a new workdir"
            )
        lines.append(Line(**fields))
    return lines
