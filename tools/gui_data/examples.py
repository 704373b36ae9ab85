"""`tf.train.Example` as others wrote it: the features that a reader names, and nothing else.

The wire format is walked here and not by protobuf, which decodes all of a message first: of 256 MB
of numbers, one a byte, that makes gigabytes. Features without a reader cost nothing, and the counts
of all others are bounded. Unknown fields are skipped, and lists of numbers may be packed or not.

Source: tensorflow/core/example/{example,feature}.proto; protobuf.dev, "Encoding".
"""

import struct
from collections.abc import Iterator, Sequence

from uirl_jax.errors import RecordError
from uirl_jax.shards.example import decode_text

MAX_FIELDS = 100_000  # of a message: features, or values of a list
MAX_NUMBERS = 200_000  # of a list; AITW has four for each of a screen's elements
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # fields of a Feature

Feature = list[bytes] | list[int] | list[float]


def decode(payload: bytes, names: Sequence[str]) -> dict[str, Feature]:
    """The features of these names that are there. One without a list, or with an empty one, is [].

    Raises: RecordError: no Example, a name that is not UTF-8 or comes twice, and of the named
      features one with two lists or more values than may be.
    """
    found: dict[str, Feature] = {}
    seen: set[str] = set()
    for entry in _messages(memoryview(payload), 1, 1):  # Example.features, Features.feature
        keys = list(_messages(entry, 1))
        name = decode_text(bytes(keys[-1]) if keys else b"", "feature name")
        if name in seen:
            raise RecordError(f"feature {name[:64]!r} appears twice")
        seen.add(name)
        if len(seen) > MAX_FIELDS:
            raise RecordError(f"has more than {MAX_FIELDS} fields")
        if name in names:
            try:
                found[name] = _feature(_joined(list(_messages(entry, 2))))
            except RecordError as error:
                raise RecordError(f"feature {name[:64]!r} {error}") from None
    return found


def _feature(value: memoryview) -> Feature:
    lists: dict[int, list[memoryview]] = {}
    for number, wire, part in _fields(value):
        if wire == _LENGTH and number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            lists.setdefault(number, []).append(part)
    if len(lists) > 1:
        raise RecordError(f"has {len(lists)} lists, expected one")
    for number, parts in lists.items():
        joined = _joined(parts)
        if number == _BYTES_LIST:
            return [bytes(part) for part in _messages(joined, 1)]
        return _floats(joined) if number == _FLOAT_LIST else _integers(joined)
    return []


def _joined(parts: list[memoryview]) -> memoryview:
    """A message that came in parts: protobuf joins them."""
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _floats(numbers: memoryview) -> list[float]:
    parts = [
        part
        for number, wire, part in _fields(numbers)
        if number == 1 and wire in (_LENGTH, _FIXED32)
    ]
    count = sum(map(len, parts)) // 4
    _check_count(count)
    if any(len(part) % 4 for part in parts):
        raise RecordError("holds a float that was cut")
    return list(struct.unpack(f"<{count}f", b"".join(parts)))


def _integers(numbers: memoryview) -> list[int]:
    found: list[int] = []
    for number, wire, part in _fields(numbers):
        at = 0
        while number == 1 and wire in (_LENGTH, _VARINT) and at < len(part):
            value, at = _varint(part, at)
            found.append(value - 2**64 if value >= 2**63 else value)
            _check_count(len(found))
    return found


def _check_count(count: int) -> None:
    if count > MAX_NUMBERS:
        raise RecordError(f"has more than {MAX_NUMBERS} numbers")


def _messages(data: memoryview, *path: int) -> Iterator[memoryview]:
    """The values of a field in the fields of a message. Args: path: numbers of the fields."""
    for number, wire, value in _fields(data):
        if number == path[0] and wire == _LENGTH:
            if len(path) == 1:
                yield value
            else:
                yield from _messages(value, *path[1:])


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(number, wire type, value) of the fields of a message; a varint stays encoded."""
    at = 0
    for _ in range(MAX_FIELDS):
        if at == len(data):
            return
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _LENGTH:
            size, at = _varint(data, at)
        elif wire == _VARINT:
            size = _varint(data, at)[1] - at
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise RecordError(f"not a tf.train.Example: wire type {wire}")
        if number == 0 or size > len(data) - at:
            raise RecordError("not a tf.train.Example: it was cut, or is none")
        yield number, wire, data[at : at + size]
        at += size
    if at != len(data):
        raise RecordError(f"has more than {MAX_FIELDS} fields")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that starts there, and where the next value starts."""
    number = 0
    for shift in range(0, 70, 7):
        if at == len(data):
            break
        byte = data[at]
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return number & (2**64 - 1), at
    raise RecordError("not a tf.train.Example: a number was cut")
