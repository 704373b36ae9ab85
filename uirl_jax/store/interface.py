"""What a store offers: a flat space of names with whole contents, as a bucket has it.

A name is a relative path with forward slashes ("shards/a0/x.tfrecord"). There are no directories to
make or remove, no append, no link and no lock: a bucket has none of these.

Every method raises OSError, with `strerror` set, if the storage fails (disk full, no permission),
FileNotFoundError if the name does not exist, and OSError for an invalid name. Callers turn it into
an error of their own that says what to do.
"""

import io
from collections.abc import Iterable
from typing import Protocol


class Lease(Protocol):
    """The right to be the one process that does something, held until `release` or until the
    process dies."""

    def renew(self) -> None:
        """Keep the lease. Raises LeaseHeldError if another process has it now."""
        ...

    def release(self) -> None: ...


class Store(Protocol):
    """Named contents below one root, which is the workdir."""

    def location(self, name: str = "") -> str:
        """Where a name, or the whole store, is; for messages only."""
        ...

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write a content, replacing any that is there.

        It appears whole or not at all, and survives a power cut once this returns.

        Args:
            content: bytes, or chunks of them, so that memory need not hold all of it. If the
                iterator raises, nothing is written.
        """
        ...

    def put_new(self, name: str, content: bytes) -> bool:
        """`put`, if the name does not exist; of two processes one succeeds.

        Returns: whether it was written.
        """
        ...

    def read(self, name: str) -> bytes: ...

    def open(self, name: str) -> io.BufferedIOBase:
        """A content to read in parts: `read`, `seek` and `tell`."""
        ...

    def names(self, prefix: str, after: str = "") -> list[str]:
        """Every name below `prefix` (whole path segments) that sorts after `after`, ascending."""
        ...

    def move(self, name: str, target: str) -> None:
        """Give a content another name, replacing what is there.

        A process that is killed meanwhile may leave it under both names, never under none.
        """
        ...

    def delete(self, *names: str) -> None:
        """Delete names; those that do not exist are passed over."""
        ...

    def remove_unfinished(self, prefix: str) -> None:
        """Free what killed processes left of unfinished writes below `prefix`.

        Only for a prefix below which no other process writes: it would lose what it is writing.
        """
        ...

    def claim(self, name: str, holder: str) -> Lease:
        """Take a lease; see `lease`.

        Args:
            holder: this process, as told to others that claim the same name.
        Raises: LeaseHeldError, with the holder.
        """
        ...
