"""A source that is being read, and what of it was left out.

A reader yields drafts: where a row stands, and a function that makes it. Whatever a row has wrong
is raised in there, named in `left_out.jsonl` and counted; the reader goes on with the next one. A
file that cannot be read further costs its own rest.
"""

import collections
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tools.gui_data.pictures import Pictures
from tools.gui_data.reading import splits_of
from uirl_jax.errors import ActionError, ConfigError, ImageError, RecordError, ShardError
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Row

NO_SPLIT = ""  # of a row whose source has no splits
ROW_ERRORS = (RecordError, ActionError, ImageError, ShardError)
MAX_FILES = 1_000_000
MAX_LINES = 100_000  # of a kind in left_out.jsonl: some bytes of a hostile file make a line each


class Draft(NamedTuple):
    """A row to be.

    Attributes:
      where: the file and the place in it, for messages.
      make: raises one of ROW_ERRORS where the row is broken. Its split may be NO_SPLIT.
    """

    where: str
    make: Callable[[], Row]


class UnsayableError(RecordError):
    """A step that is right, and that no action of ours can say: it is left out of its row."""


class LeftOut:
    """What was left out: a line each in a file, counts and the first one here.

    Args: file: takes the lines; None: nothing does.

    Attributes:
      counts: of each kind. The file has at most MAX_LINES of a kind.
      source: stands before every place, where several sources have files of equal names.
      on_add: is told each place.
      notes: of the sources, for whoever reads what the command prints.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self.counts: collections.Counter[str] = collections.Counter()
        self.source = ""
        self.on_add: Callable[[str], None] = lambda where: None
        self.notes: list[str] = []
        self._first: dict[str, str] = {}

    @property
    def first(self) -> str:
        """The first row or file that was left out; without one the first of the others."""
        return next(
            (self._first[what] for what in ("row", "file", *self._first) if what in self._first), ""
        )

    def add(self, what: str, where: str, reason: object) -> None:
        """what: row, step, element or file."""
        self.counts[what] += 1
        where, text = printable(self.source + where, 200), printable(str(reason), 300)
        self._first.setdefault(what, f"{where}: {text}")
        if self._file is not None and self.counts[what] <= MAX_LINES:
            line = {"what": what, "where": where, "reason": text}
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self.on_add(where)


class Source:
    """The folder or file of a set.

    Args:
      images: where the pictures are, if not in the places that the set is published with.
      splits: a JSON table of splits, if not the one that the set is published with.
      number: of this source among those of one set, whose files may have equal names.
    """

    def __init__(
        self,
        path: Path,
        *,
        images: Path | None = None,
        splits: Path | None = None,
        left_out: LeftOut | None = None,
        number: int = 0,
    ) -> None:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        if images is not None and not images.is_dir():
            raise ConfigError(f"--images={images}: there is no such folder")
        if splits is not None and not splits.is_file():
            raise ConfigError(f"--splits={splits}: there is no such file")
        self.path, self.left_out = path, left_out or LeftOut()
        # Absolute: a folder made of it stays where it is when it is joined with it again, and the
        # folder of "." has a name and a parent.
        self.folder = (path if path.is_dir() else path.parent).resolve()
        self._images, self._splits, self._number = images, splits, number

    def row_id(self, path: Path, number: int) -> str:
        """The id of a row that has none: by its place in a file of this source."""
        of_source = f"{self._number + 1}-" if self._number else ""
        return f"{of_source}{path.stem}-{number}"

    def files(self, *patterns: str) -> list[Path]:
        """The source itself, or the files of a folder by glob patterns, in order of their names.

        Raises: ConfigError: there is none.
        """
        if not self.path.is_dir():
            return [self.path]
        found = sorted({file for p in patterns for file in self.path.glob(p) if file.is_file()})
        if not found or len(found) > MAX_FILES:
            raise ConfigError(
                f"{self.path}: {len(found) or 'no'} files like {', '.join(patterns)}; give the "
                "folder of the set as it was published, or a file of it"
            )
        return sorted(found, key=_by_number)

    def pictures(self, *folders: str | Path) -> Pictures:
        """Pictures in --images; else in these folders of the source, as far as they are there."""
        if self._images is not None:
            return Pictures((self._images,))
        roots = [self.folder / name for name in folders] + [self.folder]
        return Pictures(tuple(root for root in roots if root.is_dir()))

    def splits(self, *names: str) -> dict[str, str] | None:
        """Which split each episode is in: from --splits, or the first of these files that is there.

        Raises: RecordError: not such a table.
        """
        there = [self.folder / name for name in names if (self.folder / name).is_file()]
        path = self._splits or (there[0] if there else None)
        if path is None:
            self.left_out.notes.append(
                f"{self.path} has no table of splits ({' or '.join(names)}), and --splits names "
                "none: a hash of the screens decides, and rows of the published test split may "
                "be trained on"
            )
        return None if path is None else splits_of(path)

    def over(
        self, files: Iterable[Path], read: Callable[[Path], Iterator[Draft]]
    ) -> Iterator[Draft]:
        """The drafts of all files. One that cannot be read further is named; the next follows."""
        for file in files:
            try:
                yield from read(file)
            except (*ROW_ERRORS, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                self.left_out.add("file", str(file), f"{reason or error}; what follows is left out")

    def step_left_out(self, where: str, reason: object) -> None:
        self.left_out.add("step", where, reason)


def split_of(splits: dict[str, str] | None, key: str) -> str:
    """Raises RecordError for an episode that a table of splits does not have."""
    if splits is None:
        return NO_SPLIT
    if key not in splits:
        raise RecordError(f"episode {printable(key)!r} is in no split")
    return splits[key]


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    """10.json after 9.json."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(1, int(p), "") if p.isdigit() and len(p) < 19 else (0, 0, p) for p in parts]
