"""TFRecord files of others, gzipped or not, a record at a time.

The framing is that of our shards; the limit of a record is higher, because an episode of
AndroidControl holds all its screenshots and accessibility trees. What the compression makes of a
file is never in memory at once.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gui_data import examples
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards.example import decode_text
from uirl_jax.shards.framing import stream_frames

MAX_RECORD_BYTES = 256 * 2**20
_GZIP = b"\x1f\x8b"


def payloads(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, payload) of the records. Raises RecordError where the file is damaged or cut."""
    number = -1
    try:
        with path.open("rb") as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP
            file = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            for number, payload in enumerate(stream_frames(file, MAX_RECORD_BYTES)):
                yield number, payload
    except (ShardError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = "the file was cut" if isinstance(error, EOFError) else str(error)
        raise RecordError(f"behind record {number}: {reason}" if number >= 0 else reason) from None


def features(payload: bytes, names: Sequence[str]) -> "Features":
    """The features of these names. Raises RecordError for what is no tf.train.Example."""
    return Features(examples.decode(payload, names))


class Features:
    """The features of an Example, each checked for its type when it is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def all(self, name: str, kind: type) -> list[Any]:
        """The list of a name. Raises RecordError: missing, or of another type."""
        if name not in self._values:
            raise RecordError(f"{name} is missing")
        values = self._values[name]
        if values and not isinstance(values[0], kind):  # a list is of one type
            raise RecordError(
                f"{name} is a list of {type(values[0]).__name__}, not {kind.__name__}"
            )
        return values

    def one(self, name: str, kind: type) -> Any:
        values = self.all(name, kind)
        if len(values) != 1:
            raise RecordError(f"{name} has {len(values)} values, expected one")
        return values[0]

    def text(self, name: str) -> str:
        return decode_text(self.one(name, bytes), name)

    def texts(self, name: str) -> list[str]:
        return [decode_text(one, name) for one in self.all(name, bytes)]
