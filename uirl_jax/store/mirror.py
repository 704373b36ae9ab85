"""The local directory of a process whose run is in a bucket, and its copies there.

Files that one process appends to or that others only read later stay in a local directory, which
the file `bucket` links to the run's address: `open_store` of that directory is the bucket's store.
They are copied to the bucket every 10 s at most and at the end, and fetched back when the run goes
on with a fresh directory. The shared files (shards, policies, claims, leases, checkpoints,
config.json) are in the bucket alone. Without a link every function here does nothing.

Copies may be 10 s old after a SIGKILL; metrics.jsonl is copied with each step (`copy_now`).

Each copy is marked with the directory that it is from. A process that is killed after a copy and
before it has noted its version finds a version that it does not know: without the mark it would
take its own older copy for another machine's newer one, and lose what it wrote since.
"""

import contextlib
import dataclasses
import fnmatch
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

from uirl_jax.errors import ConfigError, LeaseHeldError, UirlError
from uirl_jax.log_lines import key_values
from uirl_jax.store import files
from uirl_jax.store.interface import Store, checked_name
from uirl_jax.store.lease import learner_fence

logger = logging.getLogger(__name__)

LINK = "bucket"
_MARK = ".directory"  # the file with the mark of a local directory
EVERY_S = 10.0  # between two copies of one name
BYTES_PER_S = 1e5  # of one name, on average: a log of 3 MB is copied every 30 s
TAIL_BYTES = 64 << 10
WHOLE = "cold_start/model/"  # appears at once, and others need it whole
_UPLOADS: dict[tuple[str, str], threading.Lock] = {}
_LISTED = ".files"  # WHOLE is complete in the bucket once its list is there
# A checkpoint of the cold start appears at once, too. Its list is sent before its files, and it is
# complete in the bucket while all that are listed are there.
_STEP = re.compile(rf"(cold_start/checkpoints/\d+)(/.+|{re.escape(_LISTED)})")


@dataclasses.dataclass(frozen=True)
class Own:
    """The files of one process, as patterns of names ("eval/*": at any depth).

    Attributes:
        who: the role; a process that goes on with it has the same.
        written: what this process writes.
        read: logs of other processes, whose last lines it reads.
        lease: the lease that this process needs for what it writes; empty: none.
    """

    who: str
    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    lease: str = ""


class CopyStore(Store, Protocol):
    """A store that copies whole files without holding them in memory."""

    def upload(self, path: Path, name: str, mark: str) -> str: ...

    def mark(self, name: str) -> str: ...

    def download(self, name: str, path: Path) -> None: ...

    def versions(self, prefix: str) -> dict[str, str]: ...


def link(directory: Path, address: str) -> None:
    """Makes a directory the local one of a run in a bucket.

    Raises: ConfigError: it belongs to another run, or has files already.
    """
    found = linked_address(directory)
    if found == address:
        return
    if found or (directory.is_dir() and any(directory.iterdir())):
        owner = f"is the local directory of {found}" if found else "has files of something else"
        raise ConfigError(f"{directory}: {owner}; give {address} another --local_dir")
    files.write_atomically(directory / LINK, f"{address}\n".encode())


def linked_address(directory: str | os.PathLike[str]) -> str:
    """The address of the bucket; empty for a directory that holds its run itself."""
    try:
        return Path(directory, LINK).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextlib.contextmanager
def copied(directory: Path, open_store: Callable[[Path], Store], own: Own) -> Iterator[None]:
    """Fetches what is missing here, then copies the files of this process until the block ends.

    Raises: OSError: the bucket cannot be read.
    """
    if not linked_address(directory):
        yield
        return
    copies = Copies(directory, cast(CopyStore, open_store(directory)), own)
    copies.fetch()
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(1.0):
            copies.try_once()

    thread = threading.Thread(target=run, name="copies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        copies.try_once(is_last=True)


def copy_now(directory: Path, open_store: Callable[[Path], Store], name: str) -> None:
    """Copies one file of the learner, which must not be older there than what is written next.

    Raises: OSError. RestartError: this learner has lost its lease.
    """
    if linked_address(directory):
        store = cast(CopyStore, open_store(directory))
        with _uploads(directory, name):
            learner_fence(store)
            store.upload(directory / name, name, _mark_of(directory))


def interval_s(size_bytes: int) -> float:
    """Seconds between two copies of a name of that size."""
    return max(EVERY_S, size_bytes / BYTES_PER_S)


def fetch_directory(directory: Path, open_store: Callable[[Path], Store], name: str) -> None:
    """Fetches a directory that was copied whole by its writer, unless it is here or not there.

    Several processes may share the local directory (`--actors=N`): one fetches, the others wait.

    Raises: OSError.
    """
    target = directory / name
    if target.is_dir() or not linked_address(directory):
        return
    store = cast(CopyStore, open_store(directory))
    try:
        listed = json.loads(store.read(f"{name}{_LISTED}"))
    except FileNotFoundError:
        return
    with files.alone(target):
        if target.is_dir():
            return  # another process with this directory has fetched it
        _download_whole(store, name, listed, target)


def _download_whole(store: CopyStore, name: str, parts: Iterable[str], target: Path) -> None:
    with files.new_directory(target) as fresh:
        for part in parts:
            path = fresh / checked_name(part)
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download(f"{name}/{part}", path)


class Copies:
    """The copies of one process. See `copied`."""

    def __init__(self, directory: Path, store: CopyStore, own: Own) -> None:
        self._directory, self._store = directory, store
        self._mark = _mark_of(directory)
        self._owned, self._read, self._lease = own.written, own.read, own.lease
        self._is_lost = False
        self._state_path = directory / f".copies-{own.who}.json"
        try:
            state = json.loads(self._state_path.read_bytes())
        except (OSError, ValueError):
            state = {"versions": {}, "tails": {}}
        # In the bucket, by name: of the files that are equal here, and of the read ends of logs.
        self._versions: dict[str, str] = state["versions"]
        self._tails: dict[str, str] = state["tails"]
        self._sent: dict[str, tuple[int, int]] = {}  # mtime and size when a file was last copied
        self._due_s: dict[str, float] = {}
        self._read_due_s = 0.0
        self._failed = False

    def fetch(self) -> None:
        """Gets the names that another process wrote since this directory last copied them."""
        for prefix in sorted({pattern.partition("/")[0] for pattern in self._owned}):
            there = self._there(prefix)
            for name, version in there.items():
                path = self._directory / name
                if not self._owns(name) or name.startswith(WHOLE) or _step_of(name):
                    continue
                if path.exists() and self._is_of_here(name, version):
                    self._versions[name] = version
                    continue  # what is here is equal, or newer
                self._store.download(name, path)
                self._note(name, path, version)
            self._fetch_steps({name: there[name] for name in there if self._owns(name)})
        if self._owns(WHOLE) and not (self._directory / WHOLE).is_dir():
            fetch_directory(self._directory, lambda _: self._store, WHOLE.rstrip("/"))
            for name, version in self._there(WHOLE.rstrip("/")).items():
                if (self._directory / name).is_file():
                    self._note(name, self._directory / name, version)
        self._save()

    def _is_of_here(self, name: str, version: str) -> bool:
        """Whether what is in the bucket was copied from this directory."""
        return self._versions.get(name) == version or self._store.mark(name) == self._mark

    def _fetch_steps(self, there: Mapping[str, str]) -> None:
        """Gets the complete checkpoints; what is in the bucket of others is deleted there later."""
        for folder, parts in self._steps(there).items():
            target = self._directory / folder
            names = [name for name in there if name.startswith(f"{folder}/")]
            is_of_here = target.is_dir() and all(self._is_of_here(n, there[n]) for n in names)
            if parts and not is_of_here:
                shutil.rmtree(target, ignore_errors=True)
                _download_whole(self._store, folder, parts, target)
            elif not target.is_dir():
                reason = "its copy is incomplete"
                logger.warning(key_values("not_fetched", name=folder, reason=reason))
            # What has no list is sent again, with one; what is not here is deleted there.
            is_sent = (parts or is_of_here) and f"{folder}{_LISTED}" in there
            for name in names:
                self._versions[name] = there[name]
                if is_sent and (self._directory / name).is_file():
                    self._note(name, self._directory / name, there[name])
            self._versions[f"{folder}{_LISTED}"] = ""

    def _steps(self, there: Mapping[str, str]) -> dict[str, list[str]]:
        """The checkpoints in the bucket: what to get of each; nothing of an incomplete one."""
        found = {folder: list[str]() for name in there if (folder := _step_of(name))}
        unlisted = [folder for folder in found if f"{folder}{_LISTED}" not in there]
        for folder in found:
            if folder not in unlisted:
                parts = json.loads(self._store.read(f"{folder}{_LISTED}"))
                is_complete = all(f"{folder}/{part}" in there for part in parts)
            else:
                # Of an older release. The newest may be incomplete: it is not read if it is the
                # only one, because a run without an undamaged checkpoint does not start.
                parts = [n.removeprefix(f"{folder}/") for n in there if n.startswith(f"{folder}/")]
                is_complete = len(unlisted) > 1
            found[folder] = parts if is_complete else []
        return found

    def try_once(self, *, is_last: bool = False) -> None:
        """Copies what has changed; a failure is logged and tried again later. Raises nothing.

        Nothing is copied by a process that has lost its lease: the next holder writes these names.
        """
        if self._is_lost:
            return
        try:
            self._send(is_last)
            if not is_last:
                self._read_tails()
            self._failed = False
        except LeaseHeldError as error:
            logger.warning(key_values("not_copied", reason=f"the lease was lost to {error}"))
            self._is_lost = True
        except (OSError, UirlError) as error:  # UirlError: the local disk is full
            if not self._failed:
                logger.warning(key_values("not_copied", reason=error))
            self._failed = True
        except Exception:  # it would end all copies, or hide the error that ends the run
            if not self._failed:
                logger.exception("event=not_copied")
            self._failed = True

    def _send(self, is_last: bool) -> None:
        now_s, changed = time.monotonic(), False
        here, listed = set(), set()
        for name, path in self._here():
            here.add(name)
            if folder := _step_of(name):
                here.add(f"{folder}{_LISTED}")
            stamp = _stamp(path)
            if self._sent.get(name) == stamp:
                continue
            if not is_last and now_s < self._due_s.get(name, 0.0):
                continue
            if not changed:
                self._fence()
            if folder and folder not in listed:
                self._list_step(folder)
                listed.add(folder)
            with _uploads(self._directory, name):
                stamp = _stamp(path)
                self._versions[name] = self._store.upload(path, name, self._mark)
            self._sent[name], changed = stamp, True  # as it was before: it may have grown since
            self._due_s[name] = now_s + interval_s(stamp[1])
        self._list_whole()
        gone = [name for name in self._versions if name not in here and self._owns(name)]
        if gone:
            self._fence()
            lists = [name for name in gone if _step_of(name) and name.endswith(_LISTED)]
            self._store.delete(*(name for name in gone if name not in lists))
            self._store.delete(*lists)  # last: files without a list are of an older release
            for name in gone:
                del self._versions[name]
                self._sent.pop(name, None)
        if changed or gone:
            self._save()

    def _fence(self) -> None:
        """Raises: LeaseHeldError: the next holder of the lease writes these names."""
        if self._lease:
            self._store.fence(self._lease)

    def _note(self, name: str, path: Path, version: str) -> None:
        self._versions[name], self._sent[name] = version, _stamp(path)

    def _list_step(self, folder: str) -> None:
        """Says in the bucket which files a checkpoint has; they are sent after it."""
        name = f"{folder}{_LISTED}"
        names = [name for name, _ in self._here() if _step_of(name) == folder]
        parts = [name.removeprefix(f"{folder}/") for name in names]
        self._store.put(name, json.dumps(parts).encode())
        self._versions[name] = ""

    def _list_whole(self) -> None:
        """Says in the bucket that WHOLE is complete there; it was renamed into place here."""
        name = f"{WHOLE.rstrip('/')}{_LISTED}"
        parts = sorted(key.removeprefix(WHOLE) for key in self._sent if key.startswith(WHOLE))
        if parts and name not in self._due_s:
            self._fence()
            self._store.put(name, json.dumps(parts).encode())
            self._due_s[name] = 0.0

    def _read_tails(self) -> None:
        """Gets the last lines of other processes' logs; the whole logs are in the bucket."""
        if not self._read or time.monotonic() < self._read_due_s:
            return
        self._read_due_s = time.monotonic() + 3 * EVERY_S
        for prefix in sorted({pattern.partition("/")[0] for pattern in self._read}):
            for name, version in self._there(prefix).items():
                is_read = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._read)
                if not is_read or self._owns(name) or self._tails.get(name) == version:
                    continue
                if name not in self._tails and (self._directory / name).exists():
                    continue  # of another process with the same directory
                with contextlib.suppress(FileNotFoundError), self._store.open(name) as file:
                    size_bytes = file.seek(0, os.SEEK_END)
                    file.seek(max(size_bytes - TAIL_BYTES, 0))
                    files.write_atomically(self._directory / name, file.read())
                    self._tails[name] = version

    def _owns(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._owned)

    def _here(self) -> Iterator[tuple[str, Path]]:
        """What this process writes. Raises: OSError: a directory cannot be listed."""

        def refuse(error: OSError) -> None:
            # What is in it is not gone: its copies would be deleted. A folder may have been.
            if not isinstance(error, FileNotFoundError) or not self._directory.is_dir():
                raise error

        for folder, folders, names in os.walk(self._directory, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file_name in sorted(names):
                path = Path(folder, file_name)
                name = path.relative_to(self._directory).as_posix()
                if not file_name.startswith(".") and self._owns(name):
                    yield name, path

    def _there(self, prefix: str) -> dict[str, str]:
        if "." in prefix:  # a name at the top, not a directory
            _, version = self._store.read_version(prefix)
            return {prefix: version} if version else {}
        return self._store.versions(prefix)

    def _save(self) -> None:
        state = {"versions": self._versions, "tails": self._tails}
        files.write_atomically(self._state_path, json.dumps(state).encode())


def _uploads(directory: Path, name: str) -> threading.Lock:
    """Held from reading a file to its arrival in the bucket.

    `copy_now` and the thread of `copied` send metrics.jsonl; without it the thread's older content
    could arrive last, and a checkpoint's step would lack its line.
    """
    return _UPLOADS.setdefault((os.path.abspath(directory), name), threading.Lock())


def _step_of(name: str) -> str:
    """The checkpoint of the cold start that a file belongs to, or its list; empty: to none."""
    match = _STEP.fullmatch(name)
    return match[1] if match else ""


def _mark_of(directory: Path) -> str:
    """What names a local directory in its copies; made when it is first asked for."""
    files.write_new(directory / _MARK, uuid.uuid4().hex.encode())
    return (directory / _MARK).read_text(encoding="ascii")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
