"""What became of every episode that an actor started, in a file that survives SIGKILL.

Beside the data path: `host` writes a line before it starts an episode and one when its fate is
known, so that after a restart started = published + env_error + running + lost still adds up, and
what was lost is known. It holds no episode, and the learner does not read it.

    started 12 1        one more episode of group 12
    env_error 12 1      ... ended by the environment
    publishing 12 8     the 8 episodes of group 12 are about to become a shard
    published 12 8      ... and are one
    lost 12 3           3 episodes of group 12 never got that far (killed, cancelled, given up)
    abandoned 12 0      the environment failed group 12 too often: it is not tried again

A line is one write and is not synced: it outlives the process, not a loss of power.
"""

import collections
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from uirl_jax.errors import UirlError

EVENTS = ("started", "env_error", "publishing", "published", "lost", "abandoned")
_LINE = re.compile(rf"({'|'.join(EVENTS)}) (\d{{1,18}}) (\d{{1,9}})")
ACTOR_DIR = "actor"


class Journal:
    """The lines of one actor and run, counted. Raises UirlError where the file cannot be opened.

    While the disk is full, lines wait in memory and are written with the next one that fits.
    """

    def __init__(self, workdir: str | os.PathLike[str], actor_id: str, run_id: str) -> None:
        self.path = Path(workdir) / ACTOR_DIR / f"{actor_id}-{run_id}.journal"
        self.abandoned: set[int] = set()
        self.damaged_lines = 0
        self._publishing: dict[int, int] = {}  # group -> episodes, of lines without an outcome
        self._counts: dict[str, collections.Counter[int]] = {
            event: collections.Counter() for event in EVENTS
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            data = self.path.read_bytes()
        except OSError as error:
            raise UirlError(f"{self.path}: {error.strerror}: cannot count episodes") from None
        # Killed within a line: that one is damaged, the next one must not be.
        self._unwritten = b"\n" if data and not data.endswith(b"\n") else b""
        for line in data.decode("ascii", "replace").splitlines():
            match = _LINE.fullmatch(line)
            if match:
                self._count(match[1], int(match[2]), int(match[3]))
            else:
                self.damaged_lines += 1

    def add(self, event: str, group: int, episodes: int) -> None:
        """One line, in the kernel's hands when this returns (unless the disk is full)."""
        self._count(event, group, episodes)
        self._unwritten += f"{event} {group} {episodes}\n".encode("ascii")
        with contextlib.suppress(OSError):
            while self._unwritten:
                written_bytes = os.write(self._descriptor, self._unwritten)
                self._unwritten = self._unwritten[written_bytes:]

    def total(self, event: str) -> int:
        return self._counts[event].total()

    def settle(self, is_there: Callable[[int], bool]) -> int:
        """After a restart: books what an earlier process left open, and returns how much it lost.

        Args:
            is_there: whether a group's shard is there or was consumed; asked where the process was
                killed between writing a shard and noting that.
        """
        for group, episodes in list(self._publishing.items()):
            if is_there(group):
                self.add("published", group, episodes)
        lost = 0
        for group, started in list(self._counts["started"].items()):
            fates = ("env_error", "published", "lost")
            unaccounted = started - sum(self._counts[fate][group] for fate in fates)
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
        elif event == "abandoned":
            self.abandoned.add(group)
