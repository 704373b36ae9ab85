"""A store in a directory, local or mounted by several hosts.

Names are paths below the root. Directories are created when needed and removed when empty. Files
whose names start with a dot are temporary files of this module and are not listed.
"""

import contextlib
import errno
import fcntl
import io
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from uirl_jax.errors import LeaseHeldError
from uirl_jax.log_lines import key_values
from uirl_jax.store import files
from uirl_jax.store.interface import StoreUnavailableError, checked_name, is_temporary

logger = logging.getLogger(__name__)

# `is_claimed` holds a free lease for a moment; who claims it then tries again.
_CLAIMS = 5
_CLAIM_AGAIN_S = 0.1


class LocalStore:
    """See `interface.Store`. The first write creates the root."""

    poll_s = 0.0
    reads_at_once = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)

    def location(self, name: str = "") -> str:
        return os.path.join(self._root, name) if name else str(self._root)

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        path = self._path(name)
        with self._pruned_if_failed(path.parent), files.replacing(path) as (file,):
            for chunk in (content,) if isinstance(content, bytes) else content:
                file.write(chunk)

    def put_new(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        with self._pruned_if_failed(path.parent):
            return files.write_new(path, content)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_version(self, name: str) -> tuple[bytes, str]:
        try:
            with self.open(name) as file:
                return file.read(), _version(os.fstat(file.fileno()))
        except FileNotFoundError:
            return b"", ""

    def put_version(self, name: str, content: bytes, version: str) -> str:
        path = self._path(name)
        try:
            found = _version(path.stat())
        except FileNotFoundError:
            found = ""
        if found != version:
            return ""
        self.put(name, content)
        return _version(path.stat())

    def open(self, name: str) -> io.BufferedIOBase:
        path = self._path(name)
        # Names may come from untrusted files, and links may lead out of the workdir. Only the first
        # segment may be a link, so that users can put shards/ on a larger disk.
        first = os.path.realpath(self._root / name.split("/")[0])
        if not Path(os.path.realpath(path)).is_relative_to(first):
            raise OSError(errno.EPERM, "is outside the workdir and is not read", str(path))
        try:
            return open(path, "rb")
        except OSError as error:
            if not is_temporary(error):
                raise
            raise StoreUnavailableError(error.errno, error.strerror, str(path)) from error

    def names(self, prefix: str) -> list[str]:
        return sorted(_files_below(self._path(prefix), f"{prefix}/"))

    def sizes(self, prefix: str) -> dict[str, int]:
        found = {}
        for name in self.names(prefix):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[name] = self._path(name).stat().st_size
        return found

    def move(self, name: str, target: str) -> None:
        source, path = self._path(name), self._path(target)
        try:
            files.in_directory(path.parent, lambda: _move(source, path))
        finally:
            self._prune(path.parent)  # empty if `name` does not exist
            self._prune(source.parent)

    def delete(self, *names: str) -> None:
        for path in map(self._path, names):
            path.unlink(missing_ok=True)
            self._prune(path.parent)

    def remove_unfinished(self, prefix: str) -> None:
        # Also directories: earlier releases wrote policies to temporary directories.
        for directory, folders, file_names in os.walk(self._path(prefix)):
            for name in filter(_is_unfinished, file_names):
                Path(directory, name).unlink(missing_ok=True)
            for name in filter(_is_unfinished, folders):
                shutil.rmtree(Path(directory, name), ignore_errors=True)

    def claim(self, name: str, holder: str) -> "LockedFile":
        for _ in range(_CLAIMS - 1):
            with contextlib.suppress(LeaseHeldError):
                return LockedFile(self._path(name), holder)
            time.sleep(_CLAIM_AGAIN_S)
        return LockedFile(self._path(name), holder)

    def is_claimed(self, name: str) -> bool:
        path = self._path(name)
        try:  # for writing: NFS locks no file that is open for reading alone
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            _lock(descriptor, path)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def fence(self, name: str) -> int:
        del name
        return 0

    def _path(self, name: str) -> Path:
        return self._root.joinpath(*checked_name(name).split("/"))

    @contextlib.contextmanager
    def _pruned_if_failed(self, directory: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:  # including the cancellation of an actor
            self._prune(directory)
            raise

    def _prune(self, directory: Path) -> None:
        """Remove empty directories from here up to the root."""
        with contextlib.suppress(OSError):  # not empty, or removed already
            while directory != self._root:
                directory.rmdir()
                directory = directory.parent


class LockedFile:
    """A lease as a file lock (flock), with the holder's name in the file. See `lease`."""

    def __init__(self, path: Path, holder: str) -> None:
        self._path, self._holder = path, holder
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._lock()

    def renew(self) -> None:
        """Checks that the locked file still has its name; otherwise claims the name again."""
        with contextlib.suppress(FileNotFoundError):  # the file was deleted
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                return
        descriptor = self._lock()
        os.close(self._descriptor)
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                _lock(descriptor, self._path)
            except BlockingIOError:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                raise LeaseHeldError(holder or "a process that has just started") from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{self._holder}\n".encode())
        except BaseException:  # the lock would stay with the descriptor
            os.close(descriptor)
            raise
        return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Raises: BlockingIOError: another process has locked the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # the file system has no locks
        logger.warning(key_values("no_lock", path=path, reason=error))


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _files_below(directory: Path, prefix: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name


def _move(source: Path, path: Path) -> None:
    try:
        os.replace(source, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A prefix that the user has put on another disk.
        with open(source, "rb") as read, files.replacing(path) as (file,):
            shutil.copyfileobj(read, file)
        source.unlink()


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(files.TEMPORARY_SUFFIX)
