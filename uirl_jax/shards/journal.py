"""The learner's list of every shard it has noticed, in the order in which it noticed them.

Kept by `queue.ShardQueue` and durable before a record of a noticed shard is handed out. A
checkpoint's data cursor counts in its lines: after a crash the learner reads the same shards in the
same order, however many came since. One process writes it, and it only grows (about 150 bytes a
shard).

    journal/0000000000.jsonl    lines 0 to 99, folded
    journal/0000000100.jsonl    what one poll of the queue noticed: lines 100 and 101
    journal/0000000102.jsonl    ... and the next one
    shards/journal.jsonl        the first lines of a run that release 0.1.0 began: it appended

A store cannot append, so each poll that notices shards writes a small object of its own, named by
the number of its first line: one write, however long the run. One object rewritten at every poll
would cost megabytes each time in a long run, and a bucket takes about one write a second and name.
So that a restart need not read an object per poll, FOLD of them are written again as one, under the
name of the first, and the others deleted. A process killed in between leaves objects whose lines
are known already, which are passed over.
"""

import contextlib
import dataclasses
import json
import re

from uirl_jax.errors import ShardError
from uirl_jax.store import Store

JOURNAL = "journal"
APPENDED_JOURNAL = "shards/journal.jsonl"
FOLD = 100

_NAME = re.compile(rf"{JOURNAL}/\d{{10}}\.jsonl")


@dataclasses.dataclass(frozen=True)
class Line:
    """One shard: its path under shards/, how many records it was published with, and its fate."""

    shard: str  # "a0/a0-<boot>-00000007-v3.tfrecord"
    records: int
    quarantined: bool


class Journal:
    """The lines so far. Raises ShardError if one is damaged or missing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lines: list[Line] = []
        # Names of the objects since the last folded one, and of those that folding left behind.
        self._unfolded: list[str] = []
        self._redundant: list[str] = []
        try:
            self._read_appended()
            for name in filter(_NAME.fullmatch, store.names(JOURNAL)):
                self._read(name)
        except OSError as error:
            raise ShardError(
                f"{store.location(JOURNAL)}: {error.strerror}: cannot read the list of shards"
            ) from None

    def append(self, lines: list[Line]) -> None:
        """Add lines, durable when this returns; all or, with ShardError (disk full), none."""
        name = _name(len(self.lines))
        try:
            is_new = self._store.put_new(name, _to_bytes(lines))
        except OSError as error:
            raise ShardError(
                f"{self._store.location(name)}: {error.strerror}: cannot note new shards"
            ) from None
        if not is_new:
            raise ShardError(
                f"{self._store.location(name)}: another learner has written it; a workdir has one "
                "learner at a time: stop the other one"
            )
        self.lines += lines
        self._unfolded.append(name)
        if len(self._unfolded) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        first, *others = self._unfolded
        # The lines are safe already: if the disk is full now, the next append tries again.
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
                f"{where}: holds lines {first} to {first + len(lines)} of the journal and {known} "
                "are known before it: put the missing file back, or start in a new workdir"
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
        # Killed while appending: no record of a torn last line was used.
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
                f"{where}: line {number} is damaged, and without it shards cannot be counted "
                "exactly once: start in a new workdir"
            )
        lines.append(Line(**fields))
    return lines
