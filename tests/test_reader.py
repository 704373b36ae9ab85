import dataclasses
from pathlib import Path

import pytest

from tests.sample_trajectories import make_group, make_writer
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, reader, record
from uirl_jax.store import open_store


def scan(path: Path) -> tuple[record.Header, list[reader.Entry]]:
    return reader.scan_shard(open_store(path.parent), path.name)


def frames(path: Path) -> list[bytes]:
    with open(path, "rb") as file:
        size_bytes = path.stat().st_size
        return [
            framing.frame(payload) for _, payload, _ in framing.iterate_frames(file, size_bytes)
        ]


def test_scan_with_any_bit_flipped_raises(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    whole = path.read_bytes()
    assert scan(path)[0].records == 2
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ShardError):
            scan(path)


def test_scan_truncated_anywhere_raises(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    whole = path.read_bytes()
    boundaries = [0]
    for framed in frames(path):
        boundaries.append(boundaries[-1] + len(framed))
    assert boundaries.pop() == len(whole)
    for size in {*range(0, len(whole), 17), *boundaries, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(ShardError, match=r"truncated|empty"):
            scan(path)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 2, 1, 3], "the footer has"),  # swapped: each crc is right, their crc is not
        ([0, 1, 1, 3], "the footer has"),
        ([0, 1, 3], "record 2: kind is 'footer'"),
        ([0, 1, 2, 2, 3], "the last record is not a footer"),
        ([1, 2, 3], "record 0 is not a header"),
        ([0, 1, 2, 3, 3], "bytes after the footer"),
        ([0, 1, 2, 3, 0, 1, 2, 3], "bytes after the footer"),
    ],
)
def test_scan_with_whole_records_out_of_place_raises(tmp_path, order, message):
    path = make_writer(tmp_path).publish(make_group("a"))
    framed = frames(path)
    path.write_bytes(b"".join(framed[number] for number in order))
    with pytest.raises((ShardError, RecordError), match=message):
        scan(path)


def test_scan_with_versions_that_the_header_hides_raises(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a", version=7))
    _, *rest = frames(path)
    lying = dataclasses.replace(scan(path)[0], lowest_version=8, highest_version=8)
    payloads = [record.encode_header(lying), *(framed[12:-4] for framed in rest[:-1])]
    framed = [framing.frame(payload) for payload in payloads]
    crcs = [int.from_bytes(f[-4:], "little") for f in framed]
    footer = record.Footer(2, sum(map(len, framed)), framing.crc_of_crcs(crcs))
    path.write_bytes(b"".join([*framed, framing.frame(record.encode_footer(footer))]))
    with pytest.raises(ShardError, match="versions 8 to 8, the records have 7 to 7"):
        scan(path)


def test_scan_of_too_large_a_file_is_refused_unread(tmp_path):
    path = tmp_path / "large.tfrecord"
    with open(path, "wb") as file:
        file.truncate(2**30 + 1)  # sparse
    with pytest.raises(ShardError, match="at most 1073741824"):
        scan(path)


def test_read_shard_that_is_broken_names_the_path(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"")
    with pytest.raises(ShardError, match=r"x\.tfrecord: empty file"):
        reader.read_shard(path)
    with pytest.raises(ShardError, match="No such file"):
        reader.read_shard(tmp_path / "gone.tfrecord")
