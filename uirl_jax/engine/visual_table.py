"""Which rows of the table of visual tokens hold which screenshot. Host side, no array but indices.

A screenshot that was encoded stays until its rows are needed, the one used longest ago first; those
that a prefill still reads (`take` until `give_back`) never go. The table itself is on the device
and belongs to `rounds`.
"""

import collections
import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass
class _Entry:
    rows_m: np.ndarray  # int32, of the table
    readers: int = 0
    encoded: bool = False


class VisualTable:
    """The bookkeeping of a table with a fixed number of rows, one a visual token."""

    def __init__(self, rows: int) -> None:
        self._free: list[int] = list(range(rows))
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()

    def take(self, tokens: Mapping[str, int]) -> dict[str, np.ndarray] | None:
        """Rows for all of these screenshots, or None where they do not fit beside what is read.

        Args:
          tokens: by the screenshot's key, how many visual tokens it has.
        """
        for key in tokens:
            if key in self._entries:
                self._entries.move_to_end(key)
        missing = {key: count for key, count in tokens.items() if key not in self._entries}
        needed = sum(missing.values())
        idle = [
            key for key, entry in self._entries.items() if not entry.readers and key not in tokens
        ]
        room = len(self._free) + sum(len(self._entries[key].rows_m) for key in idle)
        if needed > room:
            return None
        while needed > len(self._free):
            self._drop(idle.pop(0))
        for key, count in missing.items():
            rows, self._free = self._free[:count], self._free[count:]
            self._entries[key] = _Entry(np.array(rows, np.int32))
        for key in tokens:
            self._entries[key].readers += 1
        return {key: self._entries[key].rows_m for key in tokens}

    def give_back(self, keys: Mapping[str, int]) -> None:
        """The reader of `take` is through; what was never encoded goes with its last reader."""
        for key in keys:
            entry = self._entries[key]
            entry.readers -= 1
            if not entry.readers and not entry.encoded:
                self._drop(key)

    def holds(self, key: str) -> bool:
        """Its tokens; any thread may ask, and the answer is soon old."""
        entry = self._entries.get(key)
        return entry is not None and entry.encoded

    def is_encoded(self, key: str) -> bool:
        return self._entries[key].encoded

    def rows_of(self, key: str) -> np.ndarray:
        return self._entries[key].rows_m

    def set_encoded(self, key: str) -> None:
        self._entries[key].encoded = True

    def forget(self) -> None:
        """Nothing that was encoded holds any more: rows that are read are encoded again."""
        for key in [key for key, entry in self._entries.items() if not entry.readers]:
            self._drop(key)
        for entry in self._entries.values():
            entry.encoded = False

    def _drop(self, key: str) -> None:
        self._free += self._entries.pop(key).rows_m.tolist()
