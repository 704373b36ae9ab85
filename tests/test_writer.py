import dataclasses
import errno
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sample_trajectories import LAYOUT, assert_same, make_group, make_trajectory, make_writer
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, reader, record, writer

REPOSITORY = Path(__file__).parent.parent


def files_under(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_publish_is_read_back_with_run_and_actor_filled_in(tmp_path):
    group = [make_trajectory("e0", versions=(3, 4)), make_trajectory("e1", versions=(4,))]
    path = make_writer(tmp_path).publish(group)
    header, trajectories = reader.read_shard(path)
    assert header == record.Header("run", "a0", "base", 3, 4, 2, LAYOUT)
    for got, expected in zip(trajectories, group, strict=True):
        assert (got.run_id, got.actor_id) == ("run", "a0")
        vars(got).update(run_id="", actor_id="")  # frozen, but this is a test
        assert_same(got, expected)
    assert files_under(tmp_path) == [path]


def test_publish_names_shards_by_actor_boot_sequence_and_version(tmp_path):
    first, second = make_writer(tmp_path), make_writer(tmp_path)
    paths = [first.publish(make_group("a")), first.publish(make_group("b", version=12))]
    paths.append(second.publish(make_group("c")))
    names = [re.fullmatch(r"a0-([0-9a-f]{32})-(\d{8})-v(\d+)\.tfrecord", p.name) for p in paths]
    assert [name.groups()[1:] for name in names] == [
        ("00000000", "0"),
        ("00000001", "12"),
        ("00000000", "0"),
    ]
    assert names[0][1] == names[1][1] != names[2][1]
    assert all(path.parent == tmp_path / "shards" / "a0" for path in paths)


def test_publish_writes_tfrecord_framing(tmp_path):
    data = make_writer(tmp_path).publish(make_group("a", size=3)).read_bytes()
    payloads = []
    while data:  # as TensorFlow's reader steps through a file
        (length,) = struct.unpack("<Q", data[:8])
        payloads.append(data[12 : 12 + length])
        data = data[16 + length :]
    assert len(payloads) == 5  # header, three trajectories, footer


@pytest.mark.parametrize("actor_id", ["", "../x", "a/b", "a b", "a" * 65, "ä"])
def test_writer_with_an_actor_id_that_is_no_name_raises_shard_error(tmp_path, actor_id):
    with pytest.raises(ShardError, match="expected 1 to 64"):
        make_writer(tmp_path, actor_id)
    assert files_under(tmp_path) == []


def test_publish_of_another_run_or_nothing_raises_shard_error(tmp_path):
    theirs = make_writer(tmp_path / "theirs", run_id="other").publish(make_group("a"))
    _, trajectories = reader.read_shard(theirs)
    ours = make_writer(tmp_path / "ours")
    with pytest.raises(ShardError, match="run_id is 'other', this writer's is 'run'"):
        ours.publish(trajectories)
    with pytest.raises(ShardError, match="at least one"):
        ours.publish([])
    assert files_under(tmp_path / "ours") == []


def test_write_shard_of_two_actors_raises_shard_error(tmp_path):
    mixed = [dataclasses.replace(t, actor_id=t.episode_id) for t in make_group("a")]
    with pytest.raises(ShardError, match="several runs or actors"):
        writer.write_shard(tmp_path / "x.tfrecord", mixed, base_hash="base", layout=LAYOUT)
    assert files_under(tmp_path) == []


def test_publish_with_one_invalid_trajectory_leaves_nothing(tmp_path):
    good, bad = make_group("a")
    bad = make_trajectory("bad", versions=(0,), reward=float("nan"))
    with pytest.raises(RecordError, match="'bad': reward"):
        make_writer(tmp_path).publish([good, bad])
    assert files_under(tmp_path) == []


def test_publish_above_the_shard_cap_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(framing, "MAX_SHARD_BYTES", 5000)
    with pytest.raises(RecordError, match="more than 5000 bytes"):
        make_writer(tmp_path).publish(make_group("a", size=5))
    assert files_under(tmp_path) == []


def test_publish_when_the_file_may_not_grow_leaves_nothing_and_then_works(tmp_path):
    """A real short write, by the kernel's limit on file size."""
    shard_writer = make_writer(tmp_path)
    group = [make_trajectory("e0", image_bytes=400_000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(ShardError, match="not published") as caught:
            shard_writer.publish(group)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert files_under(tmp_path) == []
    assert reader.read_shard(shard_writer.publish(group))[0].records == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_publish_when_the_disk_is_full_late_leaves_nothing(tmp_path, monkeypatch, call):
    shard_writer = make_writer(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ShardError, match="No space left on device"):
        shard_writer.publish(make_group("a"))
    assert files_under(tmp_path) == []


def test_publish_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    shard_writer = make_writer(tmp_path)
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard_writer.publish(make_group("a"))
    assert files_under(tmp_path) == []


def test_publish_syncs_the_file_before_it_appears_and_the_directory_after(tmp_path, monkeypatch):
    """A rename that reaches the disk before its data is a torn shard after a power cut."""
    shard_writer = make_writer(tmp_path)
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        calls.append("directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file")
        fsync(descriptor)

    def note_replace(source, target):
        calls.append("rename")
        replace(source, target)

    shard_writer.publish(make_group("a"))  # which makes the directory
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    shard_writer.publish(make_group("b"))
    assert calls == ["file", "rename", "directory"]


def test_writer_removes_what_a_killed_one_left(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    left_over = path.with_name(f".{path.name}.tmp")
    left_over.write_bytes(b"half")
    make_writer(tmp_path)
    assert files_under(tmp_path) == [path]


PUBLISH_FOREVER = """
import sys
from pathlib import Path
from tests.sample_trajectories import make_trajectory, make_writer
writer = make_writer(Path(sys.argv[1]))
group = [make_trajectory(f"e{n}", versions=(0,), image_bytes=300_000) for n in range(4)]
while True:
    print(writer.publish(group), flush=True)
"""


def test_writer_killed_at_ten_moments_leaves_no_torn_shard(tmp_path):
    reported = []
    for kill in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", PUBLISH_FOREVER, str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for _ in range(1 + kill % 3):
                reported.append(process.stdout.readline().strip())
            time.sleep(0.0017 * kill)  # a publication takes some 10 ms
            process.send_signal(signal.SIGKILL)
    shards = list((tmp_path / "shards" / "a0").glob("*.tfrecord"))
    assert {str(path) for path in shards} >= set(reported)
    assert len(set(reported)) == 19
    for path in shards:
        assert reader.read_shard(path)[0].records == 4
