"""Splits of sets that have none: by a hash of the screen, so that no screen is in two.

A screen is its pixels. A row goes where its first screen was put before, else where that screen's
hash says; all screens of the row are then of that split. A row whose screens are of two splits by
then is left out. Sets that have splits of their own keep them; how many of their screens are in two
is counted.
"""

import hashlib
from collections.abc import Sequence

from uirl_jax.errors import RecordError
from uirl_jax.verifiers.recorded.checks import SPLITS

TRAIN, VALIDATION, TEST = SPLITS
_NUMBERS = {name: number for number, name in enumerate(SPLITS)}


class Splitter:
    """Args: validation_share, test_share: of the screens, between 0 and 1 together."""

    def __init__(self, validation_share: float, test_share: float) -> None:
        self._shares = ((TEST, test_share), (VALIDATION, validation_share))
        self._split_of: dict[bytes, int] = {}  # digest of a screen -> its split, where it has one
        self._shared: set[bytes] = set()

    @property
    def shared_screens(self) -> int:
        """How many screens are in two splits of the source's own."""
        return len(self._shared)

    def assign(self, own: str, digests: Sequence[bytes]) -> str:
        """The split of a row.

        Args:
          own: of its source; empty: it has none.
          digests: of the pixels of its screens.

        Raises: RecordError: the source has none, and the row's screens are of two already.
        """
        there = {self._split_of[one] for one in digests if one in self._split_of}
        if own:
            number = _NUMBERS.get(own)
            if number is None:
                raise RecordError(f"split={own!r} is none of {', '.join(SPLITS)}")
            self._shared.update(d for d in digests if self._split_of.get(d, number) != number)
        elif len(there) > 1:
            names = " and ".join(SPLITS[number] for number in sorted(there))
            raise RecordError(f"its screens are in {names} already")
        else:
            number = there.pop() if there else _NUMBERS[self._by_hash(digests[0])]
        for digest in digests:
            self._split_of.setdefault(digest, number)
        return SPLITS[number]

    def _by_hash(self, digest: bytes) -> str:
        # Hashed again: a source may have chosen its rows by a digest too.
        drawn = int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=b"split").digest())
        point = drawn / 2**64
        for name, share in self._shares:
            if point < share:
                return name
            point -= share
        return TRAIN
