"""A lease in a storage without locks: an object with a counter, changed by conditional writes.

    leases/learner.lock   {"holder": "process 7 on host-3", "generation": 4, "counter": 181, ...}

Its holder increments `counter` every 10 s. A process that wants it watches the object for 60 s of
its own monotonic clock; if it does not change in that time, its holder is dead or away, and the
process replaces it, conditional on the version it watched. Clocks of hosts are never compared.
A holder whose renewals failed for 40 s of its own clock gives up before another one can take over.
A process that was killed on this host is recognised at once, by its id and start time.

`generation` grows by one with each taking, also after a release. It is the fencing token: what the
holder publishes carries it, and nothing of a lower generation is accepted later. Knows nothing of
buckets: `Versioned` is all that it needs.
"""

import dataclasses
import errno
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol, Self

from uirl_jax.errors import LeaseHeldError
from uirl_jax.log_lines import key_values

logger = logging.getLogger(__name__)


class Versioned(Protocol):
    """What a lease needs of a store; see `interface.Store`."""

    def location(self, name: str = "") -> str: ...

    def read_version(self, name: str, *, is_urgent: bool = False) -> tuple[bytes, str]: ...

    def put_version(
        self, name: str, content: bytes, version: str, *, is_urgent: bool = False
    ) -> str: ...


@dataclasses.dataclass(frozen=True)
class LeaseTimes:
    """In seconds; the holder gives up before another process may take the lease."""

    expiry_s: float = 60.0  # without a change, before another process takes it
    # Without a successful renewal, before the holder gives up. A renewal takes at most six times
    # `request_s`, so one that began just before still fails before the expiry.
    give_up_s: float = 40.0
    request_s: float = 3.0
    look_s: float = 5.0  # between two looks of a process that waits for it
    sight_s: float = 10.0  # between two listings of all leases


@dataclasses.dataclass(frozen=True)
class _Content:
    """The content of a lease; holder "": released."""

    holder: str
    generation: int
    counter: int
    nonce: str  # of one taking
    process: str  # see `_this_process`

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


class CountedLease:
    """A lease that this process has taken. Other threads may call its methods."""

    def __init__(
        self, store: Versioned, name: str, times: LeaseTimes, content: _Content, version: str
    ) -> None:
        self._store, self._name, self._times = store, name, times
        self._content, self._version = content, version
        self._renewed_s = time.monotonic()
        self._lost_to = ""
        self._lock = threading.Lock()

    @classmethod
    def take(cls, store: Versioned, name: str, holder: str, times: LeaseTimes) -> Self:
        """Takes the lease. Waits up to `expiry_s` if its holder may be dead.

        Raises: LeaseHeldError: its holder is alive. OSError: the storage fails.
        """
        watched, since_s = "", 0.0
        while True:
            content, version = store.read_version(name)
            found = _parse(store.location(name), content) if version else None
            now_s = time.monotonic()
            if version != watched:
                if watched and found is not None and found.holder:
                    raise LeaseHeldError(found.holder)
                watched, since_s = version, now_s
            is_free = found is None or not found.holder or _is_dead(found.process)
            if is_free or now_s - since_s >= times.expiry_s:
                generation = (found.generation if found else 0) + 1
                mine = _Content(holder, generation, 0, uuid.uuid4().hex, _this_process())
                started_s = time.monotonic()
                taken = store.put_version(name, mine.to_bytes(), version)
                if taken:
                    lease = cls(store, name, times, mine, taken)
                    lease._renewed_s = started_s
                    return lease
                continue  # another process was faster
            if now_s == since_s:
                line = key_values(
                    "lease_wait",
                    lease=store.location(name),
                    holder=found.holder if found else "",
                    most_s=times.expiry_s,
                )
                logger.warning(line)
            time.sleep(min(times.look_s, max(since_s + times.expiry_s - now_s, 0.0)))

    @property
    def generation(self) -> int:
        return self._content.generation

    def renew(self) -> None:
        """Increments the counter.

        Raises: LeaseHeldError: another process has taken it, or no renewal succeeded for so long
            that another one may. OSError: the storage does not answer.
        """
        with self._lock:
            self._raise_if_lost()
            started_s = time.monotonic()
            wanted = dataclasses.replace(self._content, counter=self._content.counter + 1)
            try:
                version = self._store.put_version(
                    self._name, wanted.to_bytes(), self._version, is_urgent=True
                )
            except OSError:
                # It may have been written, or may be written later: accept our own nonce.
                self._adopt()
                self._raise_if_lost()
                raise
            if not version:
                self._adopt()
                self._raise_if_lost()
                return
            self._content, self._version, self._renewed_s = wanted, version, started_s

    def check(self) -> None:
        """Reads the lease from the storage. Raises: as `renew`."""
        with self._lock:
            self._raise_if_lost()
        # Without the lock: renewals go on while a slow read is tried again, for up to a minute.
        content, version = self._store.read_version(self._name)
        with self._lock:
            self._compare(content, version)
            self._raise_if_lost()

    def release(self) -> None:
        """Lets others take it at once. Its object stays, so that generations keep growing."""
        with self._lock:
            free = dataclasses.replace(self._content, holder="", process="")
            if not self._lost_to:
                self._lost_to = "nobody: it was released"
                try:
                    self._store.put_version(
                        self._name, free.to_bytes(), self._version, is_urgent=True
                    )
                except OSError as error:
                    logger.warning(key_values("lease_not_released", reason=error))

    def _adopt(self) -> None:
        """After a conflict: continues from our own last write, if that is what is there."""
        try:
            content, version = self._store.read_version(self._name, is_urgent=True)
        except OSError:
            return
        self._compare(content, version)

    def _compare(self, content: bytes, version: str) -> None:
        found = _parse(self._store.location(self._name), content) if version else None
        if found is None or found.nonce != self._content.nonce:
            self._lost_to = found.holder if found and found.holder else "nobody: it was deleted"
        elif found.counter >= self._content.counter:  # else a renewal has followed the read
            self._content, self._version = found, version

    def _raise_if_lost(self) -> None:
        away_s = time.monotonic() - self._renewed_s
        if not self._lost_to and away_s > self._times.give_up_s:
            self._lost_to = f"unknown: it was not renewed for {away_s:.0f} s"
        if self._lost_to:
            raise LeaseHeldError(self._lost_to)


class Sightings:
    """Which leases are renewed, by repeated listings: one request for all of them.

    Args:
        list_versions: version by name of all leases.
    """

    def __init__(self, times: LeaseTimes, list_versions: Callable[[], dict[str, str]]) -> None:
        self._times, self._list = times, list_versions
        self._seen: dict[str, tuple[str, float]] = {}  # version, since when this clock sees it
        self._next_s = 0.0
        self._lock = threading.Lock()

    def is_claimed(self, name: str) -> bool:
        """Whether the lease's object changed within `expiry_s`, or was first seen since then."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + self._times.sight_s
                before = self._seen
                self._seen = {
                    key: before[key]
                    if key in before and before[key][0] == version
                    else (version, now_s)
                    for key, version in self._list().items()
                }
            if name not in self._seen:
                return False
            return now_s - self._seen[name][1] < self._times.expiry_s


def _parse(where: str, content: bytes) -> _Content:
    """Raises: OSError: it is not a lease: the workdir may be something else."""
    try:
        fields = json.loads(content)
        types = {field.name: field.type for field in dataclasses.fields(_Content)}
        if fields.keys() == types.keys() and all(
            type(fields[name]) is expected for name, expected in types.items()
        ):
            return _Content(**fields)
    except (ValueError, AttributeError, RecursionError):
        pass
    raise OSError(errno.EINVAL, "is not a lease; delete it if no process uses this workdir", where)


def _this_process() -> str:
    """ "boot, namespace of process ids, id, start time"; "" where this cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        number, _, start = _stat("self")
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {number} {start}"
    except (OSError, IndexError):
        return ""


def _stat(pid: str) -> tuple[str, str, str]:
    """Id, state and start time of a process. Raises: OSError, IndexError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        number, _, rest = file.read().partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return number, fields[0], fields[19]


def _is_dead(process: str) -> bool:
    """Whether a process of this boot and namespace does not exist any more; False if unknown."""
    ours, parts = _this_process().split(), process.split()
    if len(parts) != 4 or parts[:2] != ours[:2] or not parts[2].isdecimal():
        return False
    try:
        _, state, start = _stat(parts[2])
    except (FileNotFoundError, ProcessLookupError):
        return _is_absent(int(parts[2]))
    except (OSError, IndexError):  # of another user, too many open files
        return False
    return state in "ZX" or start != parts[3]  # killed and not waited for yet, or its id used again


def _is_absent(pid: int) -> bool:
    """Asks by a signal that does nothing: `hidepid` hides the processes of others in /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # of another user; not an id of a process
        return False
    return False
