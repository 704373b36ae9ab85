"""The outcome of every episode that an actor started, in a file that survives SIGKILL.

`host` writes a line before it starts an episode and one when its outcome is known, so that after a
restart started = published + env_error + running + lost holds and the lost episodes are counted. It
contains no episodes, and the learner does not read it.

    started 12 1        one more episode of group 12 was started
    env_error 12 1      one episode of group 12 ended as env_error
    publishing 12 8     the 8 episodes of group 12 are about to be written as a shard
    published 12 8      their shard is written
    lost 12 3           3 episodes of group 12 were not published (killed, cancelled, abandoned)
    abandoned 12 0      group 12 had too many env_errors; `claims` keeps it from being tried again

Each line is one write, without fsync: it survives the process, but not a power failure.
"""

import collections
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from uirl_jax.errors import UirlError
from uirl_jax.store import Store

EVENTS = ("started", "env_error", "publishing", "published", "lost", "abandoned")
_LINE = re.compile(rf"({'|'.join(EVENTS)}) (\d{{1,18}}) (\d{{1,9}})")
ACTOR_DIR = "actor"


class Journal:
    """Counts the journal lines of one actor and run. Raises UirlError if it cannot be opened.

    If the disk is full, lines stay in memory and are written with a later line.
    """

    def __init__(self, workdir: str | os.PathLike[str], actor_id: str, run_id: str) -> None:
        self.path = Path(workdir) / ACTOR_DIR / f"{actor_id}-{run_id}.journal"
        self.damaged_lines = 0
        self._publishing: dict[int, int] = {}  # group -> episodes, until published or lost
        self._counts: dict[str, collections.Counter[int]] = {
            event: collections.Counter() for event in EVENTS
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            data = self.path.read_bytes()
        except OSError as error:
            raise UirlError(f"{self.path}: {error.strerror}: cannot count episodes") from None
        # If the process was killed while writing a line, the next line must start on its own.
        self._unwritten = b"\n" if data and not data.endswith(b"\n") else b""
        for line in _parse(data):
            if line is None:
                self.damaged_lines += 1
            else:
                self._count(*line)

    def add(self, event: str, group: int, episodes: int) -> None:
        """Writes one line, without fsync; keeps it in memory if the disk is full."""
        self._count(event, group, episodes)
        self._unwritten += f"{event} {group} {episodes}\n".encode("ascii")
        with contextlib.suppress(OSError):
            while self._unwritten:
                written_bytes = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written_bytes:]

    def total(self, event: str) -> int:
        return self._counts[event].total()

    def settle(self, is_there: Callable[[int], bool]) -> int:
        """After a restart: records the outcome of an earlier process's open episodes.

        Args:
            is_there: whether a group's shard exists or was consumed; called for groups whose
                process was killed between "publishing" and "published".
        Returns: the number of lost episodes.
        """
        for group, episodes in list(self._publishing.items()):
            if is_there(group):
                self.add("published", group, episodes)
        lost = 0
        for group, started in list(self._counts["started"].items()):
            outcomes = ("env_error", "published", "lost")
            unaccounted = started - sum(self._counts[outcome][group] for outcome in outcomes)
            if unaccounted > 0:
                self.add("lost", group, unaccounted)
                lost += unaccounted
        return lost

    def close(self) -> None:
        os.close(self._descriptor)

    def _count(self, event: str, group: int, episodes: int) -> None:
        self._counts[event][group] += episodes
        if event == "publishing":
            self._publishing[group] = episodes
        elif event in ("published", "lost"):
            self._publishing.pop(group, None)


def run_totals(stores: Iterable[Store], run_id: str) -> collections.Counter[str]:
    """Episodes by event, over the journals of a run's actors. Raises OSError.

    Args:
        stores: where they are. A bucket has copies, 10 s old at most while their actor plays.
    """
    contents: dict[str, bytes] = {}
    for store in stores:
        for name in store.names(ACTOR_DIR):
            if name.endswith(f"-{run_id}.journal"):
                # Lines are only added: of a journal and its copy, the longer one is the newer.
                contents[name] = max(contents.get(name, b""), store.read(name), key=len)
    totals: collections.Counter[str] = collections.Counter()
    for content in contents.values():
        for line in _parse(content):
            if line is not None:
                totals[line[0]] += line[2]
    return totals


def _parse(data: bytes) -> Iterator[tuple[str, int, int] | None]:
    """Event, group and episodes of each line; None for a damaged line."""
    for line in data.decode("ascii", "replace").splitlines():
        match = _LINE.fullmatch(line)
        yield (match[1], int(match[2]), int(match[3])) if match else None
