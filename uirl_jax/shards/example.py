"""The wire format of `tf.train.Example`, limited to bytes lists and int64 lists.

Used by `record`, so that any TFRecord tool can open the shards; TensorFlow is not needed here. The
decoder is strict: an unknown field is an error.

    Example  {1: Features}
    Features {1: entry {1: name, 2: Feature}}, one entry per feature
    Feature  {1: BytesList {1: bytes, ...}} or {3: Int64List {1: varint, ...}}

`Fields` reads the decoded features, including arrays, with type checks.

Source: tensorflow/core/example/{example,feature}.proto and the protocol buffer encoding guide.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from uirl_jax.errors import RecordError

Feature = Sequence[bytes] | Sequence[int]

_DTYPES = {"<i4": 4, "<i8": 8, "<f4": 4, "<f8": 8}
_MAX_ITEMS = 2**26  # per dimension of an array, also if another dimension is 0
_VARINT, _LENGTH_DELIMITED = 0, 2
_BYTES_LIST, _INT64_LIST = 1, 3


def encode(features: Mapping[str, Feature]) -> bytes:
    """The Example's bytes, features sorted by name: equal features give equal bytes.

    An empty list is written as an empty bytes list.
    """
    entries = bytearray()
    for name in sorted(features):
        entry = _field(1, name.encode()) + _field(2, _encode_feature(name, features[name]))
        entries += _field(1, entry)
    return _field(1, bytes(entries))


def decode(payload: bytes) -> dict[str, list[bytes] | list[int]]:
    """The features of an Example. Raises RecordError for an invalid one or unknown fields."""
    features: dict[str, list[bytes] | list[int]] = {}
    for features_view in _messages(memoryview(payload), 1, "Example"):
        for entry_view in _messages(features_view, 1, "Features"):
            fields = dict(_fields(entry_view))
            if set(fields) != {1, 2} or not all(isinstance(v, memoryview) for v in fields.values()):
                raise RecordError(f"feature entry has fields {sorted(fields)}, expected 1 and 2")
            try:
                name = bytes(fields[1]).decode()
            except UnicodeDecodeError as error:
                raise RecordError(f"feature name is not UTF-8: {error.reason}") from None
            if name in features:
                raise RecordError(f"feature {name!r} appears twice")
            features[name] = _decode_feature(name, fields[2])
    return features


class Fields:
    """The features of one Example; each is read once, and `finish` raises for the rest."""

    def __init__(self, features: dict[str, Any], kind: str) -> None:
        self._features = features
        got = self.text("kind")
        if got != kind:
            raise RecordError(f"kind is {got[:32]!r}, expected {kind!r}")

    def _take(self, name: str, item_type: type, count: int | None) -> list[Any]:
        if name not in self._features:
            raise RecordError(f"{name} is missing")
        values = self._features.pop(name)
        if not all(isinstance(value, item_type) for value in values):
            raise RecordError(f"{name} is not a list of {item_type.__name__}")
        if count is not None and len(values) != count:
            raise RecordError(f"{name} has {len(values)} values, expected {count}")
        return values

    def items(self, name: str, count: int | None = None) -> list[bytes]:
        return self._take(name, bytes, count)

    def integer(self, name: str) -> int:
        return self._take(name, int, 1)[0]

    def text(self, name: str) -> str:
        return decode_text(self.items(name, 1)[0], name)

    def array(self, name: str, dtype: str, ndim: int, count: int | None = None) -> np.ndarray:
        """A copy of the array in native byte order; `count`: its expected first dimension."""
        data = self.items(name, 1)[0]
        got = self.text(f"{name}/dtype")
        if got not in _DTYPES:
            raise RecordError(f"{name} has the unknown dtype {got[:32]!r}")
        if got != dtype:
            raise RecordError(f"{name} has dtype {got}, expected {dtype}")
        shape = self._take(f"{name}/shape", int, ndim)
        # Python integers do not overflow, so a huge shape cannot match the number of bytes.
        if min(shape) < 0 or math.prod(shape) * _DTYPES[dtype] != len(data):
            raise RecordError(f"{name} has shape {shape} and {len(data)} bytes of {dtype}")
        if max(shape) > _MAX_ITEMS or (count is not None and shape[0] != count):
            raise RecordError(f"{name} has shape {shape}, expected first dimension {count}")
        array = np.frombuffer(data, dtype).reshape(shape)
        return array.astype(array.dtype.newbyteorder("="))

    def finish(self) -> None:
        if self._features:
            raise RecordError(f"unknown features {sorted(self._features)[:5]}")


def decode_text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"{name} is not UTF-8 at byte {error.start}") from None


def _encode_feature(name: str, values: Sequence[Any]) -> bytes:
    if all(isinstance(value, bytes) for value in values):
        return _field(_BYTES_LIST, b"".join(_field(1, value) for value in values))
    if all(isinstance(value, int) for value in values):
        packed = b"".join(_varint(value & 0xFFFFFFFFFFFFFFFF) for value in values)
        return _field(_INT64_LIST, _field(1, packed))
    raise RecordError(f"feature {name!r} mixes types, expected all bytes or all int")


def _decode_feature(name: str, view: Any) -> list[bytes] | list[int]:
    fields = list(_fields(view))
    if len(fields) != 1 or not isinstance(fields[0][1], memoryview):
        raise RecordError(f"feature {name!r} has {len(fields)} values, expected one list")
    (number, list_view), *_ = fields
    if number == _BYTES_LIST:
        return [bytes(value) for value in _messages(list_view, 1, name)]
    if number != _INT64_LIST:
        raise RecordError(f"feature {name!r}: field {number} is not a bytes list or int64 list")
    integers: list[int] = []
    for inner, value in _fields(list_view):
        if inner != 1:
            raise RecordError(f"feature {name!r} has field {inner} in its int64 list, expected 1")
        if isinstance(value, int):  # unpacked, as older writers encode it
            integers.append(_signed(value))
            continue
        position = 0
        while position < len(value):
            integer, position = _read_varint(value, position)
            integers.append(_signed(integer))
    return integers


def _messages(view: Any, number: int, where: str) -> Iterator[memoryview]:
    for found, value in _fields(view):
        if found != number or not isinstance(value, memoryview):
            raise RecordError(f"{where!r} has field {found}, expected bytes in field {number}")
        yield value


def _fields(view: Any) -> Iterator[tuple[int, int | memoryview]]:
    position = 0
    while position < len(view):
        tag, position = _read_varint(view, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _read_varint(view, position)
            yield number, value
        elif wire_type == _LENGTH_DELIMITED:
            length, position = _read_varint(view, position)
            if length > len(view) - position:
                raise RecordError(f"field of {length} bytes, the message has fewer left")
            yield number, view[position : position + length]
            position += length
        else:
            raise RecordError(f"wire type {wire_type} in field {number}, expected 0 or 2")


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):  # ten bytes hold any 64-bit number
        if position >= len(view):
            break
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise RecordError("a varint is truncated or longer than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
