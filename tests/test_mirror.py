"""Copies of a process's own files in a bucket: sent when due, fetched by a fresh directory."""

import concurrent.futures
import errno
import os
import shutil
import threading
import time

import pytest

from tests.buckets import bucket_store
from uirl_jax.errors import ConfigError, RestartError, UirlError
from uirl_jax.store import mirror, open_store
from uirl_jax.store.bucket import BucketStore
from uirl_jax.store.lease import LEARNER as LEARNER_LEASE
from uirl_jax.store.local import LocalStore

LEARNER = mirror.Own(
    "learner", ("metrics.jsonl", "eval/*", "cold_start/*"), ("logs/actor-*.jsonl",)
)
ADDRESS = "gs://runs/run"


@pytest.fixture
def opened(monkeypatch):
    with bucket_store("gs", monkeypatch) as (store, service):
        yield store, service


def fresh(path):
    mirror.link(path, ADDRESS)
    return path


def write(directory, name: str, content: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def in_bucket(service) -> dict[str, bytes]:
    return {name.removeprefix("run/"): value for name, value in service.objects("runs").items()}


def test_linked_directory_opens_the_bucket_and_no_other_run(tmp_path, opened):
    directory = fresh(tmp_path / "a")
    assert open_store(directory).location() == ADDRESS
    assert isinstance(open_store(tmp_path / "b"), LocalStore)
    mirror.link(directory, ADDRESS)
    with pytest.raises(ConfigError, match="is the local directory of gs://runs/run"):
        mirror.link(directory, "gs://runs/other")


def test_files_are_copied_deleted_and_fetched_by_a_fresh_directory(tmp_path, opened):
    _, service = opened
    first, second = fresh(tmp_path / "first"), fresh(tmp_path / "second")
    with mirror.copied(first, open_store, LEARNER):
        write(first, "metrics.jsonl", b"1\n")
        write(first, "eval/before/episodes", b"e")
        write(first, "eval/old.json", b"o")
        write(first, "logs/other.log", b"not its own")
    assert in_bucket(service).keys() == {"metrics.jsonl", "eval/before/episodes", "eval/old.json"}
    with mirror.copied(second, open_store, LEARNER):
        assert (second / "eval/before/episodes").read_bytes() == b"e"
        write(second, "metrics.jsonl", b"1\n2\n")
        (second / "eval/old.json").unlink()
    assert in_bucket(service) == {"metrics.jsonl": b"1\n2\n", "eval/before/episodes": b"e"}
    # The first machine goes on: what the second wrote is newer than what it has.
    with mirror.copied(first, open_store, LEARNER):
        assert (first / "metrics.jsonl").read_bytes() == b"1\n2\n"
    # Killed before its last copy, and started again there: its own file is newer.
    write(first, "metrics.jsonl", b"1\n2\n3\n")
    with mirror.copied(first, open_store, LEARNER):
        assert (first / "metrics.jsonl").read_bytes() == b"1\n2\n3\n"
    assert in_bucket(service)["metrics.jsonl"] == b"1\n2\n3\n"


def test_a_name_is_copied_every_ten_seconds_and_a_large_one_less_often(
    tmp_path, opened, monkeypatch
):
    store, service = opened
    now_s = [1000.0]
    monkeypatch.setattr(mirror.time, "monotonic", lambda: now_s[0])
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)
    sent = []
    for second in range(41):
        now_s[0] = 1000.0 + second
        write(directory, "metrics.jsonl", b"%d" % second)
        write(directory, "eval/large", bytes([second]) * 2_000_000)
        before = in_bucket(service)
        copies.try_once()
        after = in_bucket(service)
        sent += [(second, name) for name in after if after.get(name) != before.get(name)]
    assert [s for s, name in sent if name == "metrics.jsonl"] == [0, 10, 20, 30, 40]
    assert [s for s, name in sent if name == "eval/large"] == [0, 20, 40]


def test_service_that_is_away_is_tried_again(tmp_path, opened, monkeypatch, caplog):
    store, service = opened
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)
    write(directory, "metrics.jsonl", b"1\n")

    def away(*_: object) -> str:
        raise OSError(5, "away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "upload", away)
        copies.try_once()
        copies.try_once()
    assert "metrics.jsonl" not in in_bucket(service)
    assert caplog.text.count("event=not_copied") == 1
    copies.try_once()
    assert in_bucket(service)["metrics.jsonl"] == b"1\n"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_copies_of_a_folder_that_cannot_be_listed_are_kept(
    tmp_path, opened, monkeypatch, caplog, code
):
    store, service = opened
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)
    write(directory, "eval/before/episodes", b"e")
    write(directory, "metrics.jsonl", b"1\n")
    copies.try_once()
    scandir = os.scandir

    def failing(path):
        if path == str(directory / "eval"):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        copies.try_once(is_last=True)
    assert in_bucket(service).keys() == {"eval/before/episodes", "metrics.jsonl"}
    assert "event=not_copied" in caplog.text
    shutil.rmtree(directory / "eval")
    copies.try_once(is_last=True)
    assert in_bucket(service).keys() == {"metrics.jsonl"}


def test_copies_are_kept_if_the_local_directory_is_gone(tmp_path, opened):
    store, service = opened
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)
    write(directory, "metrics.jsonl", b"1\n")
    copies.try_once()
    directory.rename(tmp_path / "elsewhere")
    copies.try_once(is_last=True)
    assert in_bucket(service) == {"metrics.jsonl": b"1\n"} and not directory.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("defect")])
def test_full_local_disk_ends_neither_the_copies_nor_the_runs_own_error(
    tmp_path, opened, monkeypatch, caplog, error
):
    store, service = opened
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)

    def full(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(mirror.files, "replacing", full)
        for content in (b"1\n", b"1\n2\n"):
            write(directory, "metrics.jsonl", content)
            copies.try_once(is_last=True)
    assert caplog.text.count("event=not_copied") == 1
    # One line for what a disk or a run can do; a traceback for what nobody expects.
    assert ("Traceback" in caplog.text) == (not isinstance(error, OSError | UirlError))
    write(directory, "metrics.jsonl", b"1\n2\n3\n")
    copies.try_once(is_last=True)
    assert in_bucket(service)["metrics.jsonl"] == b"1\n2\n3\n"
    # At the end, too, what ended the run is reported.
    with pytest.raises(KeyError, match="of the run"), mirror.copied(directory, open_store, LEARNER):
        write(directory, "metrics.jsonl", b"1\n2\n3\n4\n")
        monkeypatch.setattr(mirror.files, "replacing", full)
        raise KeyError("of the run")


@pytest.mark.parametrize("size_bytes", [10, 33 << 20])
def test_killed_between_a_copy_and_its_note_it_keeps_what_it_wrote_since(
    tmp_path, opened, monkeypatch, size_bytes
):
    store, service = opened
    directory = fresh(tmp_path / "a")
    first = b"1" * size_bytes + b"\n"
    write(directory, "metrics.jsonl", first)
    with monkeypatch.context() as killed:
        killed.setattr(mirror.Copies, "_save", lambda copies: None)
        mirror.Copies(directory, store, LEARNER).try_once()
    assert in_bucket(service)["metrics.jsonl"] == first
    write(directory, "metrics.jsonl", first + b"2\n")
    with mirror.copied(directory, open_store, LEARNER):
        assert (directory / "metrics.jsonl").read_bytes() == first + b"2\n"
    assert in_bucket(service)["metrics.jsonl"] == first + b"2\n"
    # Another directory of the same run has another mark.
    with mirror.copied(fresh(tmp_path / "b"), open_store, LEARNER):
        write(tmp_path / "b", "metrics.jsonl", b"of b")
    with mirror.copied(directory, open_store, LEARNER):
        assert (directory / "metrics.jsonl").read_bytes() == b"of b"


def test_process_that_lost_its_lease_copies_nothing(tmp_path, opened):
    store, service = opened
    directory = fresh(tmp_path / "a")
    own = mirror.Own("learner", ("metrics.jsonl",), lease=LEARNER_LEASE)
    copies, held = mirror.Copies(directory, store, own), store.claim(LEARNER_LEASE, "me")
    write(directory, "metrics.jsonl", b"1\n")
    copies.try_once()
    held.release()
    BucketStore(ADDRESS).claim(LEARNER_LEASE, "the next one")
    store.put("metrics.jsonl", b"of the next one")
    write(directory, "metrics.jsonl", b"1\n2\n")
    copies.try_once(is_last=True)
    assert in_bucket(service)["metrics.jsonl"] == b"of the next one"
    with pytest.raises(RestartError, match="lease of this learner was lost"):
        mirror.copy_now(directory, lambda _: store, "metrics.jsonl")


def test_process_that_lost_its_lease_deletes_nothing(tmp_path, opened):
    store, service = opened
    directory = fresh(tmp_path / "a")
    own = mirror.Own("learner", ("eval/*",), lease=LEARNER_LEASE)
    copies, held = mirror.Copies(directory, store, own), store.claim(LEARNER_LEASE, "me")
    write(directory, "eval/old.json", b"o")
    copies.try_once()
    held.release()
    BucketStore(ADDRESS).claim(LEARNER_LEASE, "the next one")
    (directory / "eval/old.json").unlink()
    copies.try_once(is_last=True)  # has nothing to upload
    assert in_bucket(service)["eval/old.json"] == b"o"


def test_older_copy_that_is_still_under_way_never_replaces_a_newer_one(
    tmp_path, opened, monkeypatch
):
    store, service = opened
    directory = fresh(tmp_path / "a")
    copies = mirror.Copies(directory, store, LEARNER)
    write(directory, "metrics.jsonl", b"1\n")
    upload, has_read, newer_is_there = store.upload, threading.Event(), threading.Event()

    def upload_slowly(path, name: str, mark: str) -> str:
        write(tmp_path, "as read", path.read_bytes())
        has_read.set()
        newer_is_there.wait(0.5)
        return upload(tmp_path / "as read", name, mark)

    monkeypatch.setattr(store, "upload", upload_slowly)
    thread = threading.Thread(target=copies.try_once)
    thread.start()
    assert has_read.wait(20)
    write(directory, "metrics.jsonl", b"1\n2\n")
    mirror.copy_now(directory, lambda _: BucketStore(ADDRESS), "metrics.jsonl")
    newer_is_there.set()
    thread.join()
    assert in_bucket(service)["metrics.jsonl"] == b"1\n2\n"


def test_directory_that_others_need_whole_is_fetched_once_it_is_complete(tmp_path, opened):
    store, service = opened
    learner, actor = fresh(tmp_path / "learner"), fresh(tmp_path / "actor")
    copies = mirror.Copies(learner, store, LEARNER)
    write(learner, "cold_start/model/config.json", b"{}")
    write(learner, "cold_start/model/model.safetensors", b"w")
    store.put("cold_start/model/config.json", b"{}")  # as if it were killed after the first file
    mirror.fetch_directory(actor, open_store, "cold_start/model")
    assert not (actor / "cold_start").exists()
    copies.try_once()
    mirror.fetch_directory(actor, open_store, "cold_start/model")
    assert (actor / "cold_start/model/model.safetensors").read_bytes() == b"w"
    # A learner on a fresh machine has it too, and does not send it again.
    service.reset()
    with mirror.copied(fresh(tmp_path / "again"), open_store, LEARNER):
        assert (tmp_path / "again/cold_start/model/config.json").read_bytes() == b"{}"
    assert service.counters()["requests"].get("put", 0) <= 1


STEPS = "cold_start/checkpoints"


def write_step(directory, step: int, *parts: str) -> None:
    for part in parts or ("_METADATA", "arrays/a", "arrays/b", "meta/m"):
        write(directory, f"{STEPS}/{step}/{part}", f"{part} of {step}".encode())


def steps_at(directory) -> list[str]:
    names = (path.relative_to(directory / STEPS) for path in (directory / STEPS).rglob("*/*"))
    return sorted(name.as_posix() for name in names if (directory / STEPS / name).is_file())


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_checkpoint_of_a_cold_start_is_fetched_once_all_its_files_were_sent(
    tmp_path, opened, monkeypatch, caplog, sent
):
    store, service = opened
    first = fresh(tmp_path / "first")
    copies = mirror.Copies(first, store, LEARNER)
    write_step(first, 5)
    upload, left = store.upload, iter(range(sent))

    def until_preempted(path, name: str, mark: str) -> str:
        if STEPS in name and next(left, None) is None:
            raise OSError(5, "preempted")
        return upload(path, name, mark)

    with monkeypatch.context() as patch:
        patch.setattr(store, "upload", until_preempted)
        copies.try_once()
    with mirror.copied(fresh(tmp_path / "second"), open_store, LEARNER):
        assert steps_at(tmp_path / "second") == []
    assert "event=not_fetched" in caplog.text
    assert not in_bucket(service)  # the second machine starts again, and saves it anew
    # The first one goes on with its own, also beside an incomplete one from another machine.
    store.put(f"{STEPS}/5.files", b'["arrays/other", "arrays/a"]')
    store.put(f"{STEPS}/5/arrays/other", b"of the second")
    with mirror.copied(first, open_store, LEARNER):
        assert len(steps_at(first)) == 4
    with mirror.copied(fresh(tmp_path / "third"), open_store, LEARNER):
        assert steps_at(tmp_path / "third") == steps_at(first)
    assert f"{STEPS}/5/arrays/other" not in in_bucket(service)


def test_checkpoint_of_a_cold_start_replaces_another_machines_and_is_deleted_with_its_list(
    tmp_path, opened
):
    _, service = opened
    first, second = fresh(tmp_path / "first"), fresh(tmp_path / "second")
    with mirror.copied(first, open_store, LEARNER):
        write_step(first, 5)
    with mirror.copied(second, open_store, LEARNER):
        shutil.rmtree(second / STEPS / "5")
        write_step(second, 6, "arrays/c", "arrays/d")
    assert sorted(in_bucket(service)) == [
        *(f"{STEPS}/6.files", f"{STEPS}/6/arrays/c", f"{STEPS}/6/arrays/d")
    ]
    write_step(first, 6)  # which it saved before it was preempted
    service.reset()
    with mirror.copied(first, open_store, LEARNER):
        assert [name for name in steps_at(first) if name[0] == "6"] == ["6/arrays/c", "6/arrays/d"]
        shutil.rmtree(first / STEPS / "5")
    service.reset()
    with mirror.copied(first, open_store, LEARNER):
        pass
    assert not service.counters()["requests"].get("put", 0)  # nothing of it is sent again


@pytest.mark.parametrize("count", [1, 2])
def test_checkpoints_that_an_older_release_copied_are_fetched_unless_there_is_only_one(
    tmp_path, opened, count
):
    store, service = opened
    for step in range(count):
        store.put(f"{STEPS}/{step}/arrays/a", b"perhaps without arrays/b")
    with mirror.copied(fresh(tmp_path / "a"), open_store, LEARNER):
        assert len(steps_at(tmp_path / "a")) == (2 if count == 2 else 0)
    names = (f"{STEPS}/0.files", f"{STEPS}/0/arrays/a", f"{STEPS}/1.files", f"{STEPS}/1/arrays/a")
    assert sorted(in_bucket(service)) == ([*names] if count == 2 else [])


def test_processes_with_one_local_directory_fetch_one_directory_once(tmp_path, opened, monkeypatch):
    store, _ = opened
    learner, actors = fresh(tmp_path / "learner"), fresh(tmp_path / "actors")
    parts = ("config.json", "model.safetensors", "tokenizer.json")
    for part in parts:
        write(learner, f"cold_start/model/{part}", part.encode())
    mirror.Copies(learner, store, LEARNER).try_once()
    write(actors, "cold_start/.model.tmp/left by a killed process", b"")
    fetched: list[str] = []
    download = BucketStore.download

    def download_slowly(self, name: str, path) -> None:
        fetched.append(name)
        time.sleep(0.1)
        download(self, name, path)

    monkeypatch.setattr(BucketStore, "download", download_slowly)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(mirror.fetch_directory, actors, open_store, "cold_start/model")
            for _ in range(3)
        ]
        for wait in waits:
            wait.result()
    assert len(fetched) == len(parts)
    found = sorted(path.name for path in (actors / "cold_start/model").iterdir())
    assert found == sorted(parts)
    assert not (actors / "cold_start/.model.tmp").exists()


def test_last_lines_of_other_processes_are_read_and_their_own_files_left_alone(tmp_path, opened):
    store, _ = opened
    directory = fresh(tmp_path / "a")
    store.put("logs/actor-a1.jsonl", b"x" * 200_000 + b'\n{"last": 1}\n')
    store.put("logs/actor-a2.jsonl", b"from another time")
    write(directory, "logs/actor-a2.jsonl", b"written here")
    copies = mirror.Copies(directory, store, LEARNER)
    copies.try_once()
    read = (directory / "logs/actor-a1.jsonl").read_bytes()
    assert len(read) == mirror.TAIL_BYTES and read.endswith(b'\n{"last": 1}\n')
    assert (directory / "logs/actor-a2.jsonl").read_bytes() == b"written here"


def test_without_a_link_nothing_happens(tmp_path):
    with mirror.copied(tmp_path, open_store, LEARNER):
        write(tmp_path, "metrics.jsonl", b"1\n")
    mirror.copy_now(tmp_path, open_store, "metrics.jsonl")
    mirror.fetch_directory(tmp_path, open_store, "cold_start/model")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
