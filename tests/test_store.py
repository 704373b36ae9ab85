"""The stores: whole contents or none; a directory also over kills and full disks.

`opened` runs a test over a directory and over both kinds of bucket, which are emulated.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.buckets import bucket_store
from uirl_jax.errors import UirlError
from uirl_jax.store import files, open_store
from uirl_jax.store.local import LocalStore

ROOT = Path(__file__).parents[1]


def files_under(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in paths)


@pytest.fixture(params=["directory", "gs", "s3"])
def opened(request, tmp_path, monkeypatch):
    """(store, function that lists every name in it)."""
    if request.param == "directory":
        yield open_store(tmp_path / "run"), lambda: files_under(tmp_path / "run")
        return
    with bucket_store(request.param, monkeypatch) as (store, service):
        yield store, lambda: sorted(n.removeprefix("run/") for n in service.objects("runs"))


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_put_is_read_back_whole_and_in_parts(opened):
    store, listed = opened
    store.put("shards/a0/x", b"first")
    store.put("shards/a0/x", (chunk for chunk in (b"sec", b"", b"ond")))
    assert store.read("shards/a0/x") == b"second"
    with store.open("shards/a0/x") as file:
        file.seek(3)
        assert (file.read(2), file.tell()) == (b"on", 5)
    assert listed() == ["shards/a0/x"]
    store.put("empty", b"")
    assert store.read("empty") == b""
    with store.open("empty") as file:
        assert file.read() == b""
    assert store.location("shards/a0/x") == f"{store.location()}/shards/a0/x"
    with pytest.raises(FileNotFoundError):
        store.read("shards/a0/y")


def test_put_new_is_written_by_exactly_one_of_many(opened):
    (store, listed), wrote = opened, []
    start = threading.Barrier(8)

    def write(content: bytes) -> None:
        start.wait()
        if store.put_new("config.json", content):
            wrote.append(content)

    threads = [threading.Thread(target=write, args=(bytes([n]) * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read("config.json")] == wrote
    assert listed() == ["config.json"]


def test_put_version_replaces_only_the_version_that_was_read(opened):
    store, _ = opened
    assert store.read_version("policy/manifest.json") == (b"", "")
    first = store.put_version("policy/manifest.json", b"1", "")
    assert first and store.put_version("policy/manifest.json", b"none", "") == ""
    assert store.read_version("policy/manifest.json") == (b"1", first)
    second = store.put_version("policy/manifest.json", b"2", first)
    assert second not in ("", first)
    assert store.put_version("policy/manifest.json", b"late", first) == ""
    assert store.read_version("policy/manifest.json") == (b"2", second)
    store.put("policy/manifest.json", b"3")
    assert store.put_version("policy/manifest.json", b"late", second) == ""
    assert store.read("policy/manifest.json") == b"3"
    store.delete("policy/manifest.json")
    assert store.put_version("policy/manifest.json", b"late", second) == ""


def test_put_new_whose_answer_is_lost_and_asked_for_again_is_still_new(tmp_path, monkeypatch):
    """As an NFS client does: the second LINK finds what the first one made."""
    link = os.link

    def link_twice(*paths):
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", link_twice)
    store = LocalStore(tmp_path)
    assert store.put_new("a", b"mine") and store.read("a") == b"mine"
    assert not store.put_new("a", b"another's") and store.read("a") == b"mine"


def test_names_are_below_the_prefix_and_ascending(opened):
    store, _ = opened
    for name in ("a/2", "a/1/x", "a/10", "ab/1", "a-1"):
        store.put(name, b"")
    assert store.names("a") == ["a/1/x", "a/10", "a/2"]
    assert store.names("none") == store.names("a-1") == []


def test_names_of_a_directory_leave_out_unfinished_files_and_links(tmp_path):
    store = open_store(tmp_path)
    store.put("a/2", b"")
    (tmp_path / "a" / ".2.0.tmp").write_bytes(b"half")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a")
    assert store.names("a") == ["a/2"]


def test_sizes_are_those_of_the_contents_below_the_prefix(opened):
    store, _ = opened
    for name, size in {"a/x": 3, "a/b/y": 0, "ab/z": 5}.items():
        store.put(name, b"." * size)
    assert store.sizes("a") == {"a/b/y": 0, "a/x": 3} and store.sizes("none") == {}


def test_delete_and_move_are_seen_at_once(opened):
    store, listed = opened
    store.put("policy/1/adapters", b"1")
    store.put("eval/after/episodes", b"2")
    store.put("eval/after.json", b"3")
    store.delete("policy/0/adapters", "policy/1/adapters", "policy/2/adapters")
    store.delete()
    store.move("eval/after/episodes", "eval/version_3/episodes")
    with pytest.raises(FileNotFoundError):
        store.move("eval/none", "quarantine/none")
    assert listed() == ["eval/after.json", "eval/version_3/episodes"]
    assert store.read("eval/version_3/episodes") == b"2"
    store.put("eval/after.json", b"33")
    store.move("eval/after.json", "eval/version_3/episodes")
    assert store.read("eval/version_3/episodes") == b"33"


def test_move_to_another_disk_is_whole_or_none(tmp_path, monkeypatch):
    """shards/ may be a link to a larger disk; what is quarantined leaves it."""
    replace = os.replace

    def of_one_disk(source, target):
        disks = {Path(path).relative_to(tmp_path).parts[0] for path in (source, target)}
        if len(disks) > 1:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(source, target)

    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shards").symlink_to(tmp_path / "disk")
    store = open_store(tmp_path / "run")
    store.put("shards/a0/1", b"1" * 5000)
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, target: of_one_disk(os.path.realpath(source), os.path.realpath(target)),
    )
    with monkeypatch.context() as full:
        full.setattr("shutil.copyfileobj", full_disk)
        with pytest.raises(OSError, match="No space"):
            store.move("shards/a0/1", "quarantine/1")
    assert files_under(tmp_path / "run" / "quarantine") == []
    assert store.read("shards/a0/1") == b"1" * 5000
    store.move("shards/a0/1", "quarantine/1")
    assert store.read("quarantine/1") == b"1" * 5000
    assert files_under(tmp_path / "disk") == []


def test_delete_and_move_leave_no_empty_directory(tmp_path):
    store = open_store(tmp_path)
    store.put("policy/1/adapters", b"1")
    store.put("eval/after/episodes", b"2")
    store.put("eval/after.json", b"3")
    store.delete("policy/1/adapters", "policy/2/adapters")
    store.move("eval/after/episodes", "eval/version_3/episodes")
    with pytest.raises(FileNotFoundError):
        store.move("eval/none", "quarantine/none")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("after.json", "episodes", "eval", "version_3")
    ]
    store.put("policy/1/adapters", b"1")


def test_put_beside_a_process_that_prunes_the_same_directory_succeeds(tmp_path):
    store, stop = open_store(tmp_path), threading.Event()

    def prune() -> None:
        while not stop.is_set():
            store.delete("a/b/gone")
            store.put("a/b/other", b"")
            store.delete("a/b/other")

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for n in range(300):
            store.put(f"a/b/{n}", b"x")
            assert store.read(f"a/b/{n}") == b"x"
            store.delete(f"a/b/{n}")
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_put_on_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    store = open_store(tmp_path)
    store.put("policy/manifest.json", b"old")
    monkeypatch.setattr(os, call, full_disk)
    for name in ("policy/manifest.json", "policy/2/adapters"):
        with pytest.raises(OSError, match="No space left on device"):
            store.put(name, b"new")
    monkeypatch.undo()
    assert store.read("policy/manifest.json") == b"old"
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["manifest.json"]


def test_put_whose_chunks_fail_leaves_nothing(opened):
    store, listed = opened

    def chunks():
        yield b"half"
        raise ValueError("no record")

    with pytest.raises(ValueError, match="no record"):
        store.put("shards/a0/x", chunks())
    assert listed() == []


@pytest.mark.parametrize("new", [False, True])
def test_put_syncs_the_content_before_it_appears_and_the_directories_after(
    tmp_path, monkeypatch, new
):
    """A name that reaches the disk before its content is a torn file after a power cut."""
    calls = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def note_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(path.relative_to(tmp_path).as_posix() if path.is_dir() else "content")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("appears") or replace(*paths))
    monkeypatch.setattr(os, "link", lambda *paths: calls.append("appears") or link(*paths))
    store = open_store(tmp_path)
    (store.put_new if new else store.put)("policy/1/adapters", b"x")
    # Each new directory is an entry in another one.
    assert sorted(calls[:2]) == [".", "policy"]
    assert calls[2:] == ["content", "appears", "policy/1"]


def test_put_on_a_file_system_that_cannot_sync_directories_works(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    store = open_store(tmp_path)
    store.put("a/b", b"x")
    assert store.read("a/b") == b"x"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.b", "a\0b"])
def test_names_that_are_none_are_refused(opened, name):
    store, listed = opened
    for call in (store.read, store.names, lambda name: store.put(name, b"x"), store.delete):
        with pytest.raises(OSError, match="invalid name in a workdir"):
            call(name)
    assert listed() == []


def test_open_follows_no_link_out_of_the_workdir(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    store = open_store(tmp_path / "run")
    store.put("policy/1/adapters", b"inside")
    (tmp_path / "run" / "policy" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "run" / "policy" / "in").symlink_to(tmp_path / "run" / "policy" / "1")
    with pytest.raises(OSError, match="is outside the workdir"):
        store.read("policy/out/secret")
    assert store.read("policy/in/adapters") == b"inside"
    # A whole prefix on another disk is the user's choice.
    (tmp_path / "run" / "shards").symlink_to(tmp_path / "outside")
    assert store.names("shards") == ["shards/secret"]
    assert store.read("shards/secret") == b"x"


def test_remove_unfinished_takes_what_killed_writers_left_and_nothing_else(tmp_path):
    store = open_store(tmp_path)
    store.put("policy/1/adapters", b"x")
    (tmp_path / "policy" / ".7-dead.tmp").mkdir()  # as release 0.1.0 wrote a version
    (tmp_path / "policy" / ".7-dead.tmp" / "adapters").write_bytes(b"half")
    (tmp_path / "policy" / "1" / ".adapters.0.tmp").write_bytes(b"half")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".x.tmp").write_bytes(b"another process is writing it")
    store.remove_unfinished("policy")
    store.remove_unfinished("none")
    assert files_under(tmp_path) == ["policy/1/adapters", "shards/.x.tmp"]
    assert not (tmp_path / "policy" / ".7-dead.tmp").exists()


PUT_FOREVER = """
import sys
from uirl_jax.store import open_store
store = open_store(sys.argv[1])
number = int(sys.argv[2])
while True:
    number += 1
    content = b"%d " % number
    store.put("policy/manifest", content * 200_000)
    assert store.put_new(f"journal/{number:010d}", content)
    print(number, flush=True)
"""


def test_store_killed_at_ten_moments_has_whole_contents_and_every_one_it_told_of(tmp_path):
    store, last = open_store(tmp_path), 0
    for kill in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", PUT_FOREVER, str(tmp_path), str(last)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for _ in range(1 + kill % 3):
                told = int(process.stdout.readline())
            threading.Event().wait(0.0007 * kill)
            process.send_signal(signal.SIGKILL)
        newest = store.read("policy/manifest").split()
        assert len(newest) == 200_000 and len(set(newest)) == 1
        journal = [int(store.read(name)) for name in store.names("journal")]
        assert journal == list(range(1, len(journal) + 1))
        assert told <= len(journal) <= int(newest[0]) <= len(journal) + 1
        last = len(journal)
    store.remove_unfinished("policy")
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["manifest"]


def test_write_atomically_on_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UirlError, match=r"report\.html: cannot be written \(No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_new_directory_appears_with_its_files_or_not_at_all(tmp_path):
    target = tmp_path / "cold_start" / "model"
    with pytest.raises(KeyboardInterrupt), files.new_directory(target) as directory:
        (directory / "half").write_bytes(b"x")
        raise KeyboardInterrupt
    assert list(target.parent.iterdir()) == []
    (target.parent / ".model.tmp").mkdir()
    (target.parent / ".model.tmp" / "of a killed process").write_bytes(b"x")
    with files.new_directory(target) as directory:
        (directory / "whole").write_bytes(b"x")
        assert not target.exists()
    assert files_under(tmp_path) == ["cold_start/model/whole"]


def test_new_directory_that_cannot_replace_leaves_the_earlier_one(tmp_path, monkeypatch):
    target, renames = tmp_path / "best", []

    def fill(text: str) -> None:
        with files.new_directory(target, replaces=True) as directory:
            (directory / "file").write_text(text)

    fill("first")
    rename = os.rename

    def fail_in_between(source: Path, destination: Path) -> None:
        renames.append((source, destination))
        if len(renames) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_in_between)
        with pytest.raises(OSError, match="Input/output error"):
            fill("second")
    assert (target / "file").read_text() == "first" and list(tmp_path.iterdir()) == [target]
    rename(*renames[0])  # as a process leaves it that is killed between the two
    with pytest.raises(KeyboardInterrupt), files.new_directory(target, replaces=True):
        raise KeyboardInterrupt
    assert (target / "file").read_text() == "first" and list(tmp_path.iterdir()) == [target]
    fill("third")
    assert (target / "file").read_text() == "third" and list(tmp_path.iterdir()) == [target]
