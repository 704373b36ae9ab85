"""The interface of a store: names with contents, as in a bucket.

A name is a relative path with forward slashes ("shards/a0/x.tfrecord"). There are no directories,
appends, links or locks, because buckets have none.

All methods raise OSError, with `strerror` set, if the storage fails (disk full, no permission) or a
name is invalid, FileNotFoundError if a name does not exist, and StoreUnavailableError if the
storage does not answer at present. Callers convert these to their own errors, which say what to do.
"""

import errno
import io
from collections.abc import Iterable
from typing import Protocol

from uirl_jax.errors import RestartError

# Of the machine, the mount or the network, and not of the content: it may be as good as before.
_TEMPORARY = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.ECONNABORTED, errno.ENOTCONN, errno.EPIPE),
    }
)


class StoreUnavailableError(OSError):
    """The storage did not answer, after all retries; nothing is known about the content.

    A write may or may not have been applied. Trying again later may help.
    """


def is_temporary(error: BaseException) -> bool:
    """Whether an error says nothing of the content, as of too many open files or a mount away."""
    if isinstance(error, StoreUnavailableError):
        return True
    return isinstance(error, OSError) and error.errno in _TEMPORARY


def restart_error(where: str, error: OSError) -> RestartError:
    """What a learner ends with when a storage does not answer while it writes."""
    return RestartError(
        f"{where}: {error.strerror}; the storage does not answer: run the same command again"
    )


def checked_name(name: str) -> str:
    """The name. Raises: OSError: it is empty, absolute, hidden or has ".." in it."""
    segments = name.split("/")
    if "\0" in name or any(not part or part.startswith(".") for part in segments):
        raise OSError(errno.EINVAL, "invalid name in a workdir", name)
    return name


class Lease(Protocol):
    """An exclusive right of one process, held until `release` or until the process dies."""

    def renew(self) -> None:
        """Keep the lease. Raises: LeaseHeldError: another process has taken it."""
        ...

    def release(self) -> None: ...


class Store(Protocol):
    """Named contents below one root, the workdir.

    Attributes:
        poll_s: least seconds between two looks of one process for what others wrote; 0 where
            looking costs nothing. A bucket's listing is paid for.
      reads_at_once: contents that one process reads at a time. A bucket answers each after tens of
        milliseconds, however many are asked for.
    """

    poll_s: float
    reads_at_once: int

    def location(self, name: str = "") -> str:
        """The path or URL of a name, or of the whole store; for messages only."""
        ...

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write or replace a content.

        The write is atomic, and survives a power failure once this returns.

        Args:
            content: bytes, or an iterable of chunks to save memory. If the iterator raises,
                nothing is written.
        """
        ...

    def put_new(self, name: str, content: bytes) -> bool:
        """`put` if the name does not exist; if two processes call it, one succeeds.

        Returns: whether this call wrote it.
        """
        ...

    def read(self, name: str) -> bytes: ...

    def read_version(self, name: str) -> tuple[bytes, str]:
        """A content and its version, for `put_version`; (b"", "") if the name does not exist."""
        ...

    def put_version(self, name: str, content: bytes, version: str) -> str:
        """`put` if the content still has the version; version "": if the name does not exist.

        In a bucket this is atomic. A directory compares and replaces in two steps: there the lease,
        a lock, excludes other writers.

        Returns: the new version; "" if the content has another version, and nothing was written.
        """
        ...

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a content for reading in parts: `read`, `seek` and `tell`."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Sorted names below `prefix` (whole path segments)."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each name below `prefix`, sorted by name."""
        ...

    def move(self, name: str, target: str) -> None:
        """Rename a content, replacing the target.

        A process killed during the call may leave the content under both names, but not lose it.
        """
        ...

    def delete(self, *names: str) -> None:
        """Delete names; names that do not exist are ignored."""
        ...

    def remove_unfinished(self, prefix: str) -> None:
        """Delete the unfinished writes of killed processes below `prefix`.

        Only for a prefix where no other process writes: its unfinished writes would be deleted too.
        """
        ...

    def claim(self, name: str, holder: str) -> Lease:
        """Take a lease; see `lease`.

        Args:
            holder: name of this process, shown to other processes that claim the same name.
        Raises: LeaseHeldError: another process holds it; the message is its holder.
        """
        ...

    def is_claimed(self, name: str) -> bool:
        """Whether a process holds the lease. In a bucket it may be late by a minute."""
        ...

    def fence(self, name: str) -> int:
        """How often the lease was taken so far, while this process holds it; see `lease`.

        Asks the storage. A greater number belongs to a later holder. 0 in a directory, whose lock
        cannot be lost by a pause, and for a lease that this process has never claimed.

        Raises: LeaseHeldError: this process has lost the lease, or released it.
        """
        ...
