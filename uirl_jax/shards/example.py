"""The wire format of `tf.train.Example`, limited to bytes lists and int64 lists.

Used by `record`, so that any TFRecord tool can open the shards. Parsing and writing are protobuf's;
TensorFlow is not needed here. The decoder is strict: an unknown field is an error. The data sets of
others are read by `tools.gui_data.examples`.

`Fields` reads the decoded features, including arrays, with type checks.

Source: tensorflow/core/example/{example,feature}.proto.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from uirl_jax.errors import RecordError

Feature = Sequence[bytes] | Sequence[int]

_DTYPES = {"<i4": 4, "<i8": 8, "<f4": 4, "<f8": 8}
_MAX_ITEMS = 2**26  # per dimension of an array, also if another dimension is 0


def _example_class(*, is_map: bool = False) -> type[Any]:
    """The message class of an Example, with the numbers and types of the source.

    Two differences change no byte. Entries are a list and not a map, and the lists of a feature
    are not a oneof: so `decode` sees a name that comes twice, and a feature with two lists. And
    all fields say whether they were there, which proto3's do not.

    Args:
      is_map: entries are a map, as in the source: a few are found without touching the others.
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="uirl_jax/example.proto", syntax="proto2")
    messages = {
        "BytesList": [("value", 1, field.TYPE_BYTES)],
        "Int64List": [("value", 1, field.TYPE_INT64)],
        "Feature": [("bytes_list", 1, "BytesList"), ("int64_list", 3, "Int64List")],
        "Entry": [("key", 1, field.TYPE_BYTES), ("value", 2, "Feature")],
        "Features": [("feature", 1, "Entry")],
        "Example": [("features", 1, "Features")],
    }
    for name, fields in messages.items():
        described = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            repeated = name.endswith("List") or name == "Features"
            added = described.field.add(
                name=field_name,
                number=number,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
            if isinstance(kind, str):
                added.type, added.type_name = field.TYPE_MESSAGE, f".{kind}"
            else:
                added.type = kind
            if kind == field.TYPE_INT64:
                added.options.packed = True
    if is_map:
        _make_map(file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def _make_map(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Turns the list of entries into a map; protobuf wants its entry inside the message."""
    features = next(one for one in file.message_type if one.name == "Features")
    entry = features.nested_type.add()
    entry.CopyFrom(next(one for one in file.message_type if one.name == "Entry"))
    entry.name = "FeatureEntry"
    entry.field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING  # of a map, no bytes
    entry.options.map_entry = True
    features.field[0].type_name = "FeatureEntry"


_Example = _example_class()
_MapExample = _example_class(is_map=True)


def encode(features: Mapping[str, Feature]) -> bytes:
    """The Example's bytes, features sorted by name: equal features give equal bytes.

    An empty list is written as an empty bytes list. Raises RecordError for a list of mixed types.
    """
    example = _Example()
    example.features.SetInParent()
    for name in sorted(features):
        values = features[name]
        feature = example.features.feature.add(key=name.encode()).value
        if all(isinstance(value, bytes) for value in values):
            feature.bytes_list.SetInParent()  # also without a value
            feature.bytes_list.value.extend(values)
        elif all(isinstance(value, int) for value in values):
            feature.int64_list.value.extend(values)
        else:
            raise RecordError(f"feature {name!r} mixes types, expected all bytes or all int")
    return example.SerializeToString()


def decode(payload: bytes) -> dict[str, list[bytes] | list[int]]:
    """The features of an Example. Raises RecordError for an invalid one or unknown fields."""
    try:
        example = _Example.FromString(payload)
    except message.DecodeError as error:
        raise RecordError(f"not a tf.train.Example: {error}") from None
    # What protobuf would pass over in silence changes the size: fields that it does not know, and
    # parts that it joined to one.
    example.DiscardUnknownFields()
    if example.ByteSize() != len(payload):
        raise RecordError(
            f"{len(payload)} bytes hold an Example of {example.ByteSize()}, expected no others"
        )
    features: dict[str, list[bytes] | list[int]] = {}
    for entry in example.features.feature:
        try:
            name = entry.key.decode()
        except UnicodeDecodeError as error:
            raise RecordError(f"feature name is not UTF-8: {error.reason}") from None
        if name in features:
            raise RecordError(f"feature {name!r} appears twice")
        feature = entry.value
        of_bytes, of_int64 = feature.HasField("bytes_list"), feature.HasField("int64_list")
        if of_bytes == of_int64:
            raise RecordError(f"feature {name!r} has {2 * of_bytes} lists, expected one")
        features[name] = list((feature.bytes_list if of_bytes else feature.int64_list).value)
    return features


def decode_some(payload: bytes, names: Sequence[str]) -> dict[str, list]:
    """The features of these names alone, for lists of many records; the others are not checked.

    Raises RecordError for what is no Example.
    """
    try:
        features = _MapExample.FromString(payload).features.feature
    except message.DecodeError as error:
        raise RecordError(f"not a tf.train.Example: {error}") from None
    found: dict[str, list] = {}
    for name in names:
        if name in features:  # reading a map of protobuf adds what is not there
            feature = features[name]
            found[name] = list(feature.bytes_list.value or feature.int64_list.value)
    return found


class Fields:
    """The features that `decode` returned; each is read once, and `finish` raises for the rest."""

    def __init__(self, features: dict[str, Any], kind: str) -> None:
        self._features = features
        got = self.text("kind")
        if got != kind:
            raise RecordError(f"kind is {got[:32]!r}, expected {kind!r}")

    def _take(self, name: str, item_type: type, count: int | None) -> list[Any]:
        if name not in self._features:
            raise RecordError(f"{name} is missing")
        values = self._features.pop(name)
        if values and not isinstance(values[0], item_type):  # a list is of one type
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
