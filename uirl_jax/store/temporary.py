"""Temporary folders that are found and removed again where their process was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "held"


class HeldFolder:
    """A new folder. It is this process's until `remove`, or until the process ends."""

    def __init__(self, prefix: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = (self.path / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            self._lock.close()  # `remove_abandoned` of another process was there before the lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned(prefix: str) -> None:
    """Removes the folders of this prefix that no process holds, in this container or another."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # Without a lock it is being made, or another user's; one that is held raises too.
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
