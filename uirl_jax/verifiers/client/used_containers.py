"""Which containers were used: in the dialects g2a, g2b and g3 a container holds a single session.

Such a container cannot be reset and tells only when it was started. A client marks it as used with
that time. The marks of a run lie in its workdir, so that a restarted actor, or another one, does
not take a container whose page an earlier episode has already changed:

    used_containers/<hash of address and start time>
"""

import hashlib
from typing import Protocol

from uirl_jax.store import Store

USED = "used_containers"


class UsedContainers(Protocol):
    """Marks of containers, by their address and start time."""

    def mark(self, base_url: str, start_time: str) -> bool:
        """Marks a container as used; returns False if it was marked before. Raises OSError."""
        ...

    def unmark(self, base_url: str, start_time: str) -> None:
        """Takes a mark back: nothing has happened in the container. Raises OSError."""
        ...


class InMemory:
    """Marks of this process."""

    def __init__(self) -> None:
        self._marked: set[tuple[str, str]] = set()

    def mark(self, base_url: str, start_time: str) -> bool:
        is_new = (base_url, start_time) not in self._marked
        self._marked.add((base_url, start_time))
        return is_new

    def unmark(self, base_url: str, start_time: str) -> None:
        self._marked.discard((base_url, start_time))


class InStore:
    """Marks of all processes of a run."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def mark(self, base_url: str, start_time: str) -> bool:
        return self._store.put_new(_name(base_url, start_time), b"")

    def unmark(self, base_url: str, start_time: str) -> None:
        self._store.delete(_name(base_url, start_time))


def _name(base_url: str, start_time: str) -> str:
    key = f"{base_url}\n{start_time}".encode()
    return f"{USED}/{hashlib.sha256(key).hexdigest()[:32]}"
