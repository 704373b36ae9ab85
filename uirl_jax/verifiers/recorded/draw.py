"""Which row of a set, and which of its steps, a task's seed stands for.

The ranges of seeds (uirl_jax.seeds) draw from splits of their own, so that an evaluation on
held-out instances really sees rows that no training step saw:

    training     split train, without what tuning takes of it; the seed is random already
    evaluation   split test, shuffled: instance i is row i mod n of it, so n episodes play each
                 row once
    tuning       split validation, shuffled; of a set without one a twentieth of train, by hash

The order is that of the hashes of the rows' numbers: the first rows of a file are of its first
source, and neighbours are questions about one screen.

Of a row with several steps, its hash and the round (i div n) say which: rounds go through them.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from uirl_jax.errors import VerifierError
from uirl_jax.seeds import EVAL_SEEDS, TRAIN_SEEDS, TUNE_SEEDS
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.recorded.row import Row

TRAIN, VALIDATION, TEST = "train", "validation", "test"
TUNING_SHARE = 20  # one in so many rows of train, where there is no split validation


class Rows(Protocol):
    """A set: `parquet.RowFile`, or anything with its rows and the indices of each split."""

    @property
    def splits(self) -> Mapping[str, Sequence[int]]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def sizes(self, index: int, /) -> Sequence[tuple[int, int]]:
        """(width, height) in pixels of each step's picture."""
        ...

    def screen(self, index: int, /) -> bytes:
        """What names the picture of its first step."""
        ...


class Drawn(NamedTuple):
    row: int  # its index in the set
    round: int  # how often an instance of this range had the row before


class Draw:
    """The instances of one set."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        splits = {name: list(rows.splits.get(name, ())) for name in (TRAIN, VALIDATION, TEST)}
        if not splits[VALIDATION]:
            tuning = [index for index in splits[TRAIN] if _hash(index) % TUNING_SHARE == 0]
            taken = set(tuning)
            if len(taken) < len(splits[TRAIN]):  # a handful of rows are all for training
                splits[VALIDATION] = tuning
                splits[TRAIN] = [index for index in splits[TRAIN] if index not in taken]
        self._ranges = (
            (TRAIN_SEEDS, TRAIN, splits[TRAIN]),
            (EVAL_SEEDS, TEST, sorted(splits[TEST], key=_hash)),
            (TUNE_SEEDS, VALIDATION, sorted(splits[VALIDATION], key=_hash)),
        )

    @functools.cached_property
    def training_screens(self) -> tuple[tuple[int, ...], ...]:
        """The rows that training draws from, those of one step about one screen together.

        A row is its place: row p is what the p-th seed of training stands for. A row of several
        steps, which shows one of them, is by itself.
        """
        rows = next(rows for _, split, rows in self._ranges if split == TRAIN)
        found: dict[bytes | int, list[int]] = {}
        for place, row in enumerate(rows):
            alone = len(self._rows.sizes(row)) > 1
            found.setdefault(place if alone else self._rows.screen(row), []).append(place)
        return tuple(map(tuple, found.values()))

    def pick(self, task: TaskSpec) -> Drawn:
        """The row of an instance.

        Raises: VerifierError: a seed of no range, or of one whose split is empty.
        """
        for seeds, split, rows in self._ranges:
            if task.seed not in seeds:
                continue
            if not rows:
                raise VerifierError(
                    f"{task.name}: has no rows of split {split!r}, which seed {task.seed} draws "
                    "from; docs/recorded.md says which split is for what"
                )
            place = task.seed - seeds.start
            return Drawn(rows[place % len(rows)], place // len(rows))
        raise VerifierError(f"{task.name}: seed {task.seed}, expected 0 to {TUNE_SEEDS.stop - 1}")


def pick_step(row: Row, drawn: Drawn) -> int:
    """The index of the step that an episode of one step shows."""
    return (_hash(row.row_id) + drawn.round) % len(row.steps)


def _hash(key: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "little")
