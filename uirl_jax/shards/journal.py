"""The learner's list of every shard it has noticed, in the order in which it noticed them.

Kept by `reader.ShardQueue` as `workdir/shards/journal.jsonl`, one line per shard, synced before a
record of it is handed out. A checkpoint's data cursor counts in it: after a crash the learner reads
the same shards in the same order, however many came since. One process writes it, and it only grows
(about 150 bytes a shard).
"""

import dataclasses
import json
import os
from pathlib import Path

from uirl_jax.errors import ShardError


@dataclasses.dataclass(frozen=True)
class Line:
    """One shard: its path under shards/, how many records it was published with, and its fate."""

    shard: str  # "a0/a0-<boot>-00000007-v3.tfrecord"
    records: int
    quarantined: bool


class Journal:
    """The lines so far. Raises ShardError for a line that is none, save a torn last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[Line] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b") as file:
                file.seek(0)
                data = file.read()
                whole_bytes = data.rfind(b"\n") + 1
                if whole_bytes < len(data):  # killed while appending: no record of it was used
                    file.truncate(whole_bytes)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}: cannot keep the list of shards") from None
        for number, line in enumerate(data[:whole_bytes].splitlines(), start=1):
            self.lines.append(self._parse(number, line))

    def append(self, lines: list[Line]) -> None:
        """Add lines, on disk when this returns; all or, with ShardError (disk full), none."""
        text = "".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines)
        try:
            with open(self._path, "ab") as file:
                size_bytes = file.tell()
                try:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self._path, size_bytes)
                    raise
        except OSError as error:
            raise ShardError(f"{self._path}: {error.strerror}: cannot note new shards") from None
        self.lines += lines

    def _parse(self, number: int, line: bytes) -> Line:
        try:
            fields = json.loads(line)
            if (
                fields.keys() == {"shard", "records", "quarantined"}
                and isinstance(fields["shard"], str)
                and type(fields["records"]) is int
                and type(fields["quarantined"]) is bool
            ):
                return Line(**fields)
        except (ValueError, AttributeError):
            pass
        raise ShardError(
            f"{self._path}: line {number} is damaged, and without it shards cannot be counted "
            "exactly once: start in a new workdir"
        )
