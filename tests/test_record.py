import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample_trajectories import LAYOUT, assert_same, make_trajectory
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import example, framing, record
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.record import TokenLayout
from uirl_jax.types import Action, Trajectory, Turn


def tensorflow_example_class() -> type:
    """tf.train.Example as in tensorflow/core/example/*.proto, for protobuf's own parser."""
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    repeated, optional = field.LABEL_REPEATED, field.LABEL_OPTIONAL

    def message(parent, name, *fields):
        added = parent.add(name=name)
        for number, (field_name, label, kind, type_name) in fields:
            added.field.add(
                name=field_name, number=number, label=label, type=kind, type_name=type_name
            )
        return added

    message(file.message_type, "BytesList", (1, ("value", repeated, field.TYPE_BYTES, None)))
    message(file.message_type, "FloatList", (1, ("value", repeated, field.TYPE_FLOAT, None)))
    message(file.message_type, "Int64List", (1, ("value", repeated, field.TYPE_INT64, None)))
    lists = ("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")
    feature = message(
        file.message_type,
        "Feature",
        *(
            (number, (name, optional, field.TYPE_MESSAGE, f".tensorflow.{kind}"))
            for number, (name, kind) in enumerate(lists, start=1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    for member in feature.field:
        member.oneof_index = 0
    entry_type = ".tensorflow.Features.FeatureEntry"
    features = message(
        file.message_type, "Features", (1, ("feature", repeated, field.TYPE_MESSAGE, entry_type))
    )
    entry = message(
        features.nested_type,
        "FeatureEntry",
        (1, ("key", optional, field.TYPE_STRING, None)),
        (2, ("value", optional, field.TYPE_MESSAGE, ".tensorflow.Feature")),
    )
    entry.options.map_entry = True
    message(
        file.message_type,
        "Example",
        (1, ("features", optional, field.TYPE_MESSAGE, ".tensorflow.Features")),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


EXAMPLE = tensorflow_example_class()

FEATURES = st.dictionaries(
    st.text(max_size=8),
    st.lists(st.binary(max_size=200), max_size=4)
    | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    max_size=5,
)


def values_of(feature) -> list:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []


# ---------------------------------------------------------------- tf.train.Example


@settings(deadline=None)
@given(FEATURES)
def test_example_encoded_is_read_by_protobuf(features):
    parsed = EXAMPLE.FromString(example.encode(features))
    assert {name: values_of(parsed.features.feature[name]) for name in features} == features
    assert len(parsed.features.feature) == len(features)


@settings(deadline=None)
@given(FEATURES)
def test_example_written_by_protobuf_is_decoded(features):
    message = EXAMPLE()
    for name, values in features.items():
        feature = message.features.feature[name]
        of_bytes = not values or isinstance(values[0], bytes)
        (feature.bytes_list if of_bytes else feature.int64_list).value.extend(values)
        feature.bytes_list.SetInParent() if of_bytes else feature.int64_list.SetInParent()
    assert example.decode(message.SerializeToString()) == features


def test_example_with_a_feature_twice_raises_record_error():
    once = example.encode({"a": [1]})
    entry = once[2:]  # without the tag and length of Features
    with pytest.raises(RecordError, match="'a' appears twice"):
        example.decode(bytes([0x0A, 2 * len(entry)]) + entry * 2)


def with_unknown_field(data: bytes) -> bytes:
    return data + bytes([0x7A, 1, 0])  # field 15, one byte


def floats(data: bytes) -> bytes:
    message = EXAMPLE.FromString(data)
    message.features.feature["b"].float_list.value.append(0.5)
    return message.SerializeToString()


def in_two_parts(data: bytes) -> bytes:
    """Two Features one after the other, which protobuf joins."""
    return data + example.encode({"b": [2]})


def without_a_list(data: bytes) -> bytes:
    """A Feature of nothing."""
    del data
    message = EXAMPLE()
    message.features.feature["a"].SetInParent()
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_unknown_field, "bytes hold an Example of"),
        (floats, "bytes hold an Example of"),
        (in_two_parts, "bytes hold an Example of"),
        (without_a_list, "'a' has 0 lists, expected one"),
        (lambda data: data[:-1], "not a tf.train.Example"),
    ],
)
def test_example_with_what_protobuf_would_pass_over_raises_record_error(change, reason):
    whole = example.encode({"a": [1, 2]})
    assert example.decode(whole) == {"a": [1, 2]}
    with pytest.raises(RecordError, match=reason):
        example.decode(change(whole))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_example_of_any_bytes_raises_only_record_error(data):
    with contextlib.suppress(RecordError):
        example.decode(data)


def test_example_truncated_anywhere_raises_or_loses_whole_features():
    whole = example.encode({"name": [b"0123456789"], "number": [5, -1]})
    for size in range(1, len(whole)):
        with pytest.raises(RecordError):
            example.decode(whole[:size])


# ---------------------------------------------------------------- framing


def crc32c_bit_by_bit(data: bytes) -> int:
    """Castagnoli's polynomial, reflected; an oracle in eight lines."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_frame_is_tfrecord_by_an_independent_crc(payload):
    framed = framing.frame(payload)
    length = struct.pack("<Q", len(payload))

    def masked(data: bytes) -> bytes:
        crc = crc32c_bit_by_bit(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)

    assert framed == length + masked(length) + payload + masked(payload)


def test_frame_crc_of_a_published_value_matches():
    # The check value of CRC-32C; zlib's crc32 of the same bytes is another (0xCBF43926).
    assert crc32c_bit_by_bit(b"123456789") == 0xE3069283
    assert zlib.crc32(b"123456789") == 0xCBF43926
    crc = 0xE3069283
    assert framing.masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_frame_of_absurd_length_is_refused_before_reading(tmp_path):
    length = struct.pack("<Q", 2**62)
    head = length + struct.pack("<I", framing.masked_crc(length))
    path = tmp_path / "absurd"
    path.write_bytes(head + bytes(100))
    with open(path, "rb") as file, pytest.raises(ShardError, match="at most 67108864"):
        framing.read_frame(file, 2**63)
    with open(path, "rb") as file, pytest.raises(ShardError):
        list(framing.iterate_frames(file, 112))


# ---------------------------------------------------------------- header and footer

HEADER = record.Header("run", "a0", "base", 3, 5, 2, LAYOUT)


def test_header_and_footer_round_trip():
    assert record.decode_header(record.encode_header(HEADER)) == HEADER
    footer = record.Footer(3, 2**33, 2**32 - 1)
    assert record.decode_footer(record.encode_footer(footer)) == footer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema 1, this reader knows 2"),
        ({"records": 0}, "0 records"),
        ({"records": 2**60}, "records"),
    ],
)
def test_header_that_cannot_be_used_raises_shard_error(change, message):
    with pytest.raises(ShardError, match=message):
        record.decode_header(record.encode_header(dataclasses.replace(HEADER, **change)))


def test_header_in_place_of_a_footer_raises_shard_error():
    with pytest.raises(ShardError, match="not a footer"):
        record.decode_footer(record.encode_header(HEADER))
    with pytest.raises(RecordError, match="kind is 'header'"):
        record.decode(record.encode_header(HEADER))


# ---------------------------------------------------------------- trajectory


def test_trajectory_round_trip_keeps_every_field():
    for versions in ((), (0,), (-1, -1), (3, 4, 4)):
        expected = make_trajectory(versions=versions)
        assert_same(record.decode(record.encode(expected, LAYOUT), LAYOUT), expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@st.composite
def trajectories(draw) -> Trajectory:
    base = make_trajectory(versions=())
    images = {hashlib.sha256(d).hexdigest(): d for d in draw(st.lists(st.binary(), max_size=3))}
    side = st.integers(1, 4096)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    turns = []
    for _ in range(draw(st.integers(0, 3))):
        an_id = st.integers(0, 2**31 - 1)
        ids = st.lists(an_id, max_size=6)
        token_ids = np.array(draw(st.lists(an_id, min_size=1, max_size=6)), np.int32)
        one_each = functools.partial(st.lists, min_size=len(token_ids), max_size=len(token_ids))
        logprob = st.floats(max_value=0, allow_infinity=False, width=32)

        keys = draw(st.lists(st.sampled_from(sorted(images)), max_size=3)) if images else ()
        optional = st.none() | st.integers(-(2**40), 2**40)
        turns.append(
            Turn(
                context_ids=np.array(draw(ids), np.int32),
                token_ids=token_ids,
                logprobs=np.array(draw(one_each(logprob)), np.float32),
                full_logprobs=np.array(draw(one_each(logprob)), np.float32),
                policy_versions=np.array(draw(one_each(an_id)), np.int32),
                image_keys=tuple(keys),
                text=draw(st.text(max_size=5)),
                action=draw(
                    st.none()
                    | st.builds(
                        Action, st.text(), x=optional, text=st.none() | st.text(), seconds=finite
                    )
                ),
                error=draw(st.text(max_size=5)),
                reward=draw(finite),
                progress=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=3)),
            )
        )
    return dataclasses.replace(
        base,
        turns=tuple(turns),
        images=images,
        image_tokens={key: draw(side) for key in images},
        instruction=draw(st.text()),
        reward=draw(finite),
        success=draw(st.booleans()),
    )


@settings(deadline=None)
@given(trajectories())
def test_trajectory_round_trip_of_anything_valid(trajectory):
    payload = record.encode(trajectory)
    assert_same(record.decode(payload), trajectory)
    assert record.encode(record.decode(payload)) == payload


def test_trajectory_is_read_by_protobuf_with_the_documented_features():
    trajectory = make_trajectory(versions=(3, 4))
    parsed = EXAMPLE.FromString(record.encode(trajectory)).features.feature
    assert values_of(parsed["episode_id"]) == [b"e0"]
    ids = np.frombuffer(
        values_of(parsed["turns/token_ids"])[0], values_of(parsed["turns/token_ids/dtype"])[0]
    )
    assert ids.tolist() == [*trajectory.turns[0].token_ids, *trajectory.turns[1].token_ids]
    assert values_of(parsed["turns/token_ids/shape"]) == [5]
    assert values_of(parsed["images/data"]) == list(trajectory.images.values())


def changed_turn(**changes) -> Trajectory:
    trajectory = make_trajectory(versions=(0,))
    turn = dataclasses.replace(trajectory.turns[0], **changes)
    return dataclasses.replace(trajectory, turns=(turn,))


GOOD = make_trajectory(versions=(0,))
KEY = next(iter(GOOD.images))
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (changed_turn(logprobs=np.array([-1, 0.5], np.float32)), "of logprobs is above 0"),
        (changed_turn(full_logprobs=np.array([-1, NAN], np.float32)), "of full_logprobs is above"),
        (changed_turn(policy_versions=np.array([1], np.int32)), r"int32\[1\] for 2 tokens"),
        (changed_turn(token_ids=np.array([], np.int32)), "nothing was sampled"),
        (changed_turn(logprobs=np.array([-1, NAN], np.float32)), "not finite"),
        (changed_turn(logprobs=np.array([-1, -INF], np.float32)), "not finite"),
        (changed_turn(logprobs=np.array([-1], np.float32)), r"float32\[1\] for 2 tokens"),
        (changed_turn(token_ids=np.array([-1, 5], np.int32)), "negative id -1"),
        (changed_turn(token_ids=np.array([100, 5], np.int32)), "vocabulary ends at 100"),
        (changed_turn(token_ids=np.array([9, 5], np.int32)), "placeholder was sampled"),
        (changed_turn(token_ids=np.array([5, 5], np.int64)), r"int64\[2\], expected int32"),
        (changed_turn(context_ids=np.array([1, 9], np.int32)), r"runs of \[1\] .* \[2\] visual"),
        (changed_turn(context_ids=np.array([9, 1, 9], np.int32)), r"runs of \[1, 1\] .* \[2\]"),
        (changed_turn(context_ids=np.array([], np.int32)), r"runs of \[\] .* \[2\] visual"),
        (changed_turn(image_keys=("f" * 64,)), "'ffffffffffffffff' has no image"),
        (changed_turn(policy_versions=np.array([1, -2], np.int32)), "policy version -2"),
        (changed_turn(policy_versions=np.array([1, -1], np.int32)), "policy version -1"),
        (changed_turn(reward=NAN), "reward is not finite"),
        (changed_turn(progress={"rate": INF}), "progress is not JSON"),
        (changed_turn(text="\ud800"), "not UTF-8"),
        (dataclasses.replace(GOOD, reward=INF), "reward is not finite: inf"),
        (dataclasses.replace(GOOD, episode_id=""), "episode_id must have 1 to 200"),
        (dataclasses.replace(GOOD, images={KEY: b"another"}), "sha256 of image"),
        (dataclasses.replace(GOOD, image_tokens={}), "different keys"),
        (dataclasses.replace(GOOD, image_tokens={KEY: 0}), "has 0 visual tokens"),
        (dataclasses.replace(GOOD, image_tokens={KEY: 2**23}), "has 8388608 visual tokens"),
        (dataclasses.replace(GOOD, image_tokens={KEY: 4}), r"have \[4\] visual tokens"),
    ],
)
def test_trajectory_that_is_invalid_is_not_encoded(trajectory, message):
    with pytest.raises(RecordError, match=message) as caught:
        record.encode(trajectory, LAYOUT)
    assert "\n" not in str(caught.value)


def test_placeholder_needs_no_embedding():
    sampled = np.array([5, 6], np.int32)
    record.encode(changed_turn(token_ids=sampled), TokenLayout(9, image_token_id=9))
    other = changed_turn(token_ids=sampled, context_ids=np.array([8, 9, 9, 4], np.int32))
    with pytest.raises(RecordError, match="context_ids has id 8, the vocabulary ends at 8"):
        record.encode(other, TokenLayout(8, image_token_id=9))


def test_trajectory_above_the_cap_is_not_encoded(monkeypatch):
    monkeypatch.setattr(framing, "MAX_RECORD_BYTES", 1000)
    with pytest.raises(RecordError, match="at most 1000 are accepted"):
        record.encode(make_trajectory(image_bytes=1000))


def reencoded(**changes) -> bytes:
    """GOOD's features with some replaced, or removed (None)."""
    features = example.decode(record.encode(GOOD)) | changes
    return example.encode({name: values for name, values in features.items() if values is not None})


def json_feature(value) -> list[bytes]:
    return [json.dumps(value).encode()]


I4_MAX = struct.pack("<i", 2**31 - 1)
TASK = dataclasses.asdict(GOOD.task)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns/token_ids/dtype": [b"|O"]}, "unknown dtype"),
        ({"turns/token_ids/dtype": [b"<f4"]}, "dtype <f4, expected <i4"),
        ({"turns/token_ids/shape": [2**62]}, "shape"),
        ({"turns/token_ids/shape": [-2]}, "shape"),
        ({"turns/token_ids/shape": [2, 1]}, "2 values, expected 1"),
        ({"images/tokens/shape": [2**33, 2**33]}, "shape"),
        ({"images/tokens/shape": [2**62], "images/tokens": [b""]}, "shape"),
        ({"images/tokens/shape": [0], "images/tokens": [b""]}, "expected first dimension 1"),
        ({"turns/token_lengths": [I4_MAX]}, "add up to 2147483647"),
        ({"turns/token_lengths": [struct.pack("<i", -1)]}, "add up to -1"),
        ({"turns/logprobs": [bytes(4)], "turns/logprobs/shape": [1]}, "logprobs has 1 values"),
        ({"turns": [2**40]}, "expected 1099511627776"),
        ({"turns/text": []}, "0 values, expected 1"),
        ({"turns/text": [b"\xff"]}, "not UTF-8"),
        ({"turns/action": [b"[1]"]}, "action is not a JSON object"),
        ({"turns/action": json_feature({"kind": "click"})}, "action has keys"),
        ({"turns/progress": [b"NaN"]}, "number NaN"),
        ({"turns/progress": [b'{"a": 1e999}']}, "not finite"),
        ({"turns/progress": [b'{"a": 1, "a": 2}']}, "key twice"),
        ({"turns/progress": [b"[" * 100_000]}, "not JSON: RecursionError"),
        ({"turns/progress": [b'{"a": ' + b"9" * 5000 + b"}"]}, "not JSON"),
        ({"task": json_feature(TASK | {"seed": True})}, "seed of type bool"),
        ({"task": json_feature(TASK | {"color": 1})}, "task has keys"),
        ({"stop_reason": [b"bored"]}, "expected one of completed"),
        ({"images/key": [KEY.encode()] * 2}, "twice"),
        ({"images/data": [b"x", b"y"]}, "2 values, expected 1"),
        ({"schema": [9]}, "schema 9, this reader knows 2 to 4"),
        ({"success": [b"yes"]}, "success is not a list of int"),
        ({"group_id": None}, "group_id is missing"),
        ({"mystery": [1]}, r"unknown features \['mystery'\]"),
    ],
)
def test_record_with_broken_features_raises_record_error(changes, message):
    with pytest.raises(RecordError, match=message):
        record.decode(reencoded(**changes))


def test_array_of_two_negative_sides_raises_record_error():
    features = {"kind": [b"x"], "a": [bytes(24)], "a/dtype": [b"<i4"], "a/shape": [-2, -3]}
    with pytest.raises(RecordError, match=r"shape \[-2, -3\]"):
        example.Fields(features, "x").array("a", "<i4", 2)


def test_record_with_broken_action_type_raises_record_error():
    action = dataclasses.asdict(Action("click", x=1)) | {"x": "1"}
    with pytest.raises(RecordError, match="x of type str"):
        record.decode(reencoded(**{"turns/action": json_feature(action)}))


@settings(deadline=None)
@given(st.data())
def test_record_with_random_damage_raises_only_record_error(data):
    """Below the crc: what a hostile writer with a right crc can do."""
    payload = bytearray(record.encode(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        record.decode(bytes(payload), LAYOUT)
    except RecordError as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- schema 2

OLD = Path(__file__).parent / "data" / "schema_2.tfrecord"  # by the last version that wrote it


def test_shard_of_schema_2_is_read_with_tokens_for_its_grids():
    header, trajectories = read_shard(OLD)
    assert (header.schema, header.layout.merge_size) == (2, 2)
    assert [t.episode_id for t in trajectories] == ["old-0", "old-1"]
    for old, versions in zip(trajectories, [(3, 4), (3,)], strict=True):
        now = make_trajectory(old.episode_id, "g", versions=versions)
        assert_same(old, dataclasses.replace(now, run_id=old.run_id, actor_id=old.actor_id))


def test_shard_of_schema_3_is_read_without_a_renderer():
    header, trajectories = read_shard(OLD.with_name("schema_3.tfrecord"))
    assert header.schema == 3
    for old, versions in zip(trajectories, [(3, 4), (3,)], strict=True):
        now = make_trajectory(old.episode_id, "g", versions=versions)
        assert_same(old, dataclasses.replace(now, run_id=old.run_id, actor_id=old.actor_id))


def test_record_keeps_the_renderer():
    drawn = dataclasses.replace(GOOD, renderer="5c5d4f4556b18892")
    assert record.decode(record.encode(drawn)).renderer == "5c5d4f4556b18892"
    with pytest.raises(RecordError, match="renderer must have at most 200"):
        record.encode(dataclasses.replace(GOOD, renderer="5" * 201))


def old_payload(**changes) -> bytes:
    """The first record of the old shard, with some features replaced."""
    payload = list(framing.iterate_frames(io.BytesIO(OLD.read_bytes()), OLD.stat().st_size))[1][1]
    return example.encode(example.decode(payload) | changes)


@pytest.mark.parametrize(
    ("grid", "message"),
    [((1, 0, 2), "sides of 1 to 4096"), ((1, 3, 2), "multiples of 2"), ((1, 2, 9999), "4096")],
)
def test_record_of_schema_2_with_an_impossible_grid_raises_record_error(grid, message):
    layout = dataclasses.replace(LAYOUT, merge_size=2)
    grids = np.array([grid, (1, 4, 2)], "<i4").tobytes()
    with pytest.raises(RecordError, match=message):
        record.decode(old_payload(**{"images/grid_thw": [grids]}), layout)


def test_record_of_schema_2_needs_its_headers_merge_size():
    with pytest.raises(RecordError, match="merge size of its shard's header"):
        record.decode(old_payload())
