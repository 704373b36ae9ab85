"""Broken TFRecords of AITW and AndroidControl: each is one line that says what and where, and costs
only itself."""

import gzip
import io
import json
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from tfrecord.writer import TFRecordWriter

from tests import gui_data_files as files
from tests.gui_data_files import prepared
from tools.gui_data import examples, tfrecords
from uirl_jax.errors import RecordError
from uirl_jax.shards import framing

NAN = float("nan")
MISSING = object()


def aitw(**other) -> dict:
    example = files.aitw_step("2", **other)
    return {name: value for name, value in example.items() if value is not MISSING}


EXAMPLES: dict[str, tuple[dict, str]] = {
    "no pixels": (aitw(image__encoded=MISSING), "image/encoded is missing"),
    "too few pixels": (aitw(image__encoded=([b"abc"], "byte")), "3 bytes of pixels, 60x40x3"),
    "pixels that are numbers": (aitw(image__encoded=([1], "int")), "is a list of int, not bytes"),
    "two screens": (aitw(image__encoded=([b"a", b"b"], "byte")), "has 2 values, expected one"),
    "four channels": (aitw(image__channels=([4], "int")), "and 4 channels"),
    "no width": (aitw(image__width=([0], "int")), "a screen of 0x40 pixels"),
    "a negative height": (aitw(image__height=([-40], "int")), "a screen of 60x-40 pixels"),
    "a screen of 10**18": (aitw(image__width=([10**18], "int")), "1000000000000000000x40 pixels"),
    "width as text": (aitw(image__width=([b"60"], "byte")), "is a list of bytes, not int"),
    "an unknown action": (aitw(results__action_type=([99], "int")), "action_type=99 is none of"),
    "an unused action": (aitw(results__action_type=([8], "int")), "action_type=8 is none of"),
    "a touch that is NaN": (aitw(touch=(NAN, 0.5)), "nan is no place on a screen"),
    "a touch of three": (aitw(results__yx_touch=([0.1] * 3, "float")), "expected 2 numbers"),
    "a touch outside": (aitw(touch=(0.5, 1.5)), "outside of a picture of 60x40"),
    "a touch in pixels": (aitw(touch=(20.0, 30.0)), "expected fractions of the picture"),
    "no lift": (aitw(results__yx_lift=MISSING), "results/yx_lift is missing"),
    "five numbers for boxes": (
        aitw(image__ui_annotations_positions=([0.1] * 5, "float")),
        "5 numbers for boxes of four",
    ),
    "a text that is no UTF-8": (
        aitw(kind=3, results__type_action=([b"\xff"], "byte")),
        "results/type_action is not UTF-8",
    ),
    "no goal": (aitw(goal_info=MISSING), "goal_info is missing"),
    "an empty goal": (aitw(goal=""), "instruction is empty"),
    "the second step alone": (aitw(step=1, length=2), "steps [1] of an episode of 2"),
    "a length of 2**62": (aitw(length=2**62), "steps [0] of an episode of 4611686018427387904"),
    "a length of nothing": (aitw(length=0), "steps [0] of an episode of 0"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_broken_step_costs_its_episode(tmp_path, name):
    broken, reason = EXAMPLES[name]
    good = [files.aitw_step("1"), files.aitw_step("3")]
    path = files.write_tfrecord(tmp_path / "a-00000-of-00001", [good[0], broken, good[1]])
    ids, left_out = prepared("aitw", path, tmp_path / "out")
    assert ids == ["aitw-1", "aitw-3"]
    assert [(one["what"], one["where"]) for one in left_out] == [
        ("row", "a-00000-of-00001 record 1 episode 2")
    ]
    assert reason in left_out[0]["reason"]


def test_a_record_without_an_episode_is_named(tmp_path):
    other = {"x": ([1], "int")}
    path = files.write_tfrecord(
        tmp_path / "a-00000-of-00001", [other, files.aitw_step("1"), {}, files.aitw_step("3")]
    )
    ids, left_out = prepared("aitw", path, tmp_path / "out")
    assert ids == ["aitw-1", "aitw-3"]
    assert [one["reason"] for one in left_out] == ["episode_id is missing"] * 2


def framed(*examples: dict) -> bytes:
    return b"".join(framing.frame(TFRecordWriter.serialize_tf_example(one)) for one in examples)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def long_record() -> bytes:
    """A frame whose length is true, of zeros: some hundred kilobytes of gzip for 300 MB."""
    length = struct.pack("<Q", 300_000_000)
    head = length + struct.pack("<I", framing.masked_crc(length))
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb") as out:
        out.write(framed(files.aitw_step("1")) + head)
        for _ in range(30):
            out.write(bytes(10_000_000))
    return file.getvalue()


RECORD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a flipped bit": (
        lambda: gzip.compress(framed(files.aitw_step("1")) + flipped(framed(aitw()), 500)),
        "behind record 0: the crc of a record does not match",
    ),
    "a flipped length": (
        lambda: gzip.compress(framed(files.aitw_step("1")) + flipped(framed(aitw()), 2)),
        "behind record 0: the crc of a record's length does not match",
    ),
    "a cut frame": (
        lambda: gzip.compress(framed(files.aitw_step("1"), aitw())[:-9]),
        "behind record 0: truncated",
    ),
    "a cut gzip": (
        lambda: gzip.compress(framed(files.aitw_step("1"), aitw()))[:-200],
        "the file was cut",
    ),
    "a damaged gzip": (
        lambda: flipped(data := gzip.compress(framed(files.aitw_step("1"))), len(data) - 6),
        "CRC check failed",
    ),
    "garbage behind the gzip": (
        lambda: gzip.compress(framed(files.aitw_step("1"))) + b"garbage",
        "Not a gzipped file",
    ),
    "no TFRecord": (lambda: b"PK\x03\x04" + bytes(100), "crc of a record's length"),
    "a bomb of 300 MB": (long_record, "record of 300000000 bytes, at most 268435456"),
    "a bomb of zeros": (
        lambda: gzip.compress(bytes(200_000_000), 1),
        "the crc of a record's length does not match",
    ),
}


@pytest.mark.parametrize("name", RECORD_FILES)
def test_a_broken_record_file_costs_its_rest(tmp_path, name):
    make, reason = RECORD_FILES[name]
    source = tmp_path / "source"
    files.write_tfrecord(source / "b-00001-of-00002", [files.aitw_step("3")])
    (source / "a-00000-of-00002").write_bytes(make())
    ids, left_out = prepared("aitw", source, tmp_path / "out")
    assert ids[-1] == "aitw-3" and set(ids) <= {"aitw-1", "aitw-3"}
    found = [one for one in left_out if one["what"] == "file"]
    assert len(found) == 1 and reason in found[0]["reason"]
    assert found[0]["where"].endswith("a-00000-of-00002")


def test_the_limit_of_a_record_is_asked_before_memory_is(tmp_path):
    """With the length of a terabyte there is no read of it: this test would not end."""
    length = struct.pack("<Q", 2**40)
    data = length + struct.pack("<I", framing.masked_crc(length)) + b"a"
    (tmp_path / "a").write_bytes(gzip.compress(data))
    with pytest.raises(RecordError, match="record of 1099511627776 bytes"):
        list(tfrecords.payloads(tmp_path / "a"))


CLICK = {"action_type": "click", "x": 1, "y": 2}
EPISODES: dict[str, tuple[dict, str]] = {
    "no goal": ({"goal": ([], "byte")}, "goal has 0 values, expected one"),
    "an action too few": ({"actions": ([], "byte")}, "expected one screenshot more than actions"),
    "a size too few": ({"screenshot_widths": ([60], "int")}, "2 screenshots of 1 sizes"),
    "a picture of another size": (
        {"screenshot_widths": ([61, 60], "int")},
        "step 0: a screenshot of (60, 40) pixels, said to have (61, 40)",
    ),
    "a screenshot that is none": ({"screenshots": ([b"a", b"b"], "byte")}, "not a readable PNG"),
    "an action that is no JSON": ({"actions": ([b"click"], "byte")}, "it is not JSON"),
    "an action that is a list": ({"actions": ([b"[]"], "byte")}, "is a JSON list"),
    "an action that is no UTF-8": ({"actions": ([b"\xff"], "byte")}, "actions is not UTF-8"),
    "an id as text": ({"episode_id": ([b"7"], "byte")}, "episode_id is a list of bytes"),
    **{
        name: ({"actions": ([json.dumps({**CLICK, **fields}).encode()], "byte")}, reason)
        for name, fields, reason in (
            ("an unknown action", {"action_type": "fly"}, "action_type='fly' is unknown"),
            ("no action", {"action_type": None}, "action_type is missing"),
            ("x as text", {"x": "1"}, "'1' is not a number"),
            ("x as NaN", {"x": NAN}, "holds NaN"),
            ("x outside", {"x": 1000}, "outside of a picture of 60x40; expected pixels"),
            ("a scroll sideways", {"action_type": "scroll", "direction": "in"}, "direction='in'"),
            ("a scroll to nowhere", {"action_type": "scroll"}, "direction is missing"),
            ("no text", {"action_type": "input_text"}, "text is missing"),
        )
    },
}


@pytest.mark.parametrize("name", EPISODES)
def test_a_broken_episode_is_named(tmp_path, name):
    fields, reason = EPISODES[name]
    path = files.write_tfrecord(
        tmp_path / "android_control-00000-of-00020",
        [files.control_episode(8, (CLICK,)), {**files.control_episode(7, (CLICK,)), **fields}],
    )
    ids, left_out = prepared("android_control", path, tmp_path / "out")
    assert ids == ["android_control-8"]
    assert len(left_out) == 1 and left_out[0]["where"] == f"{path.name} record 1"
    assert reason in left_out[0]["reason"]


def test_a_feature_with_two_lists_is_refused():
    of_bytes, of_numbers = field(1, field(1, b"a")), field(3, field(1, b"\x01"))

    def example(feature: bytes) -> bytes:
        return field(1, entry(feature))

    assert examples.decode(example(of_bytes), "k") == {"k": [b"a"]}
    assert examples.decode(example(of_numbers), "k") == {"k": [1]}
    with pytest.raises(RecordError, match="feature 'k' has 2 lists"):
        examples.decode(example(of_bytes + of_numbers), "k")
    assert examples.decode(example(of_bytes + of_numbers), "other") == {}  # not looked at


def length(size: int) -> bytes:
    """A varint."""
    return bytes([size & 127 | 128]) + length(size >> 7) if size > 127 else bytes([size])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + length(len(content)) + content


def entry(feature: bytes, name: bytes = b"k") -> bytes:
    return field(1, field(1, name) + field(2, feature))


SIZE = 2**24
MANY: dict[str, tuple[bytes, str]] = {
    "packed numbers": (entry(field(3, field(1, bytes(SIZE)))), "has more than 200000 numbers"),
    "single numbers": (entry(field(3, b"\x08\0" * (SIZE // 2))), "has more than 100000 fields"),
    "floats": (entry(field(2, field(1, bytes(SIZE)))), "has more than 200000 numbers"),
    "empty texts": (entry(field(1, b"\x0a\0" * (SIZE // 2))), "has more than 100000 fields"),
    "features": (
        b"".join(entry(b"", b"%d" % number) for number in range(150_000)),
        "has more than 100000 fields",
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_a_record_of_millions_of_values_is_refused_in_its_own_memory(name):
    features, reason = MANY[name]
    payload = field(1, features)
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match=reason):
            examples.decode(payload, ["k"])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * SIZE


def test_features_without_a_reader_cost_nothing():
    payload = field(1, MANY["packed numbers"][0] + entry(field(3, field(1, b"\x07")), b"a"))
    assert examples.decode(payload, ["a"]) == {"a": [7]}


def test_there_are_dozens_of_them():
    assert sum(map(len, (EXAMPLES, RECORD_FILES, EPISODES))) > 40
