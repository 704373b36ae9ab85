"""The queue of a store that is far away: one that may not answer, and is read by many at once."""

import contextlib
import io
import random
import resource
import time

import pytest

from tests.sample_trajectories import make_group, make_writer
from tests.test_queue import accounts, ids, open_queue
from uirl_jax.errors import RestartError
from uirl_jax.shards import reader
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.store import StoreUnavailableError
from uirl_jax.store.local import LocalStore


@pytest.mark.parametrize("silent", ["shards/a0/", "shards/journal", "journal/"])
def test_storage_that_does_not_answer_after_a_restart_loses_nothing(tmp_path, silent):
    path = make_writer(tmp_path).publish(make_group("a"))
    state = open_queue(tmp_path).state()

    class Away(LocalStore):
        def open(self, name: str) -> io.BufferedIOBase:
            if name.startswith(silent):
                raise StoreUnavailableError(5, "away")
            return super().open(name)

    with pytest.raises(StoreUnavailableError):
        ShardQueue(Away(tmp_path), "run", "base", state)
    assert path.exists()
    assert accounts(open_queue(tmp_path, state)) == {"published": 2, "pending": 2}


@pytest.mark.parametrize("applied", [False, True])
def test_storage_that_does_not_answer_while_used_shards_are_moved_is_asked_again(tmp_path, applied):
    """The move itself may have been applied, or not."""
    shard_writer = make_writer(tmp_path)
    for name in "abc":
        shard_writer.publish(make_group(name))
    moved: list[str] = []

    class Away(LocalStore):
        def move(self, name: str, target: str) -> None:
            moved.append(name)
            if len(moved) != 2 or applied:
                super().move(name, target)
            if len(moved) == 2:
                raise StoreUnavailableError(5, "away")

    queue = ShardQueue(Away(tmp_path), "run", "base", keep_bytes=1 << 20)
    queue.poll()
    queue.take_groups(3, 0, 0)
    queue.committed(queue.state())
    queue.committed(queue.state())
    assert len(list((tmp_path / "kept").iterdir())) == 3
    assert not LocalStore(tmp_path).names("shards/a0")
    sizes = LocalStore(tmp_path).sizes("kept")
    kept = ShardQueue(LocalStore(tmp_path), "run", "base", queue.state(), keep_bytes=1)
    kept.committed(kept.state())
    assert min(sizes.values()) > 100 and not (tmp_path / "kept").exists()


@contextlib.contextmanager
def no_more_files():
    """No further file can be opened in this process."""
    lowest, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, highest))


@pytest.mark.parametrize("method", ["scan_shard", "read_entries"])
def test_process_with_too_many_open_files_quarantines_nothing(tmp_path, monkeypatch, method):
    make_writer(tmp_path).publish(make_group("a"))
    queue = ShardQueue(LocalStore(tmp_path), "run", "base")
    if method == "read_entries":
        queue.poll()
    read = getattr(reader, method)

    def starved(*args):
        with no_more_files():
            return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(reader, method, starved)
        queue.poll()
        assert queue.take_groups(1, 0, 0) is None
    queue.poll()
    assert ids(queue.take_groups(1, 0, 0)) == [["a-0", "a-1"]]
    assert accounts(queue) == {"published": 2, "trained": 2}


def test_storage_that_does_not_answer_while_a_shard_is_quarantined_ends_to_be_started_again(
    tmp_path,
):
    path = make_writer(tmp_path).publish(make_group("a"))
    path.write_bytes(path.read_bytes()[:-1])

    class Away(LocalStore):
        def move(self, name: str, target: str) -> None:
            raise StoreUnavailableError(5, "away")

    with pytest.raises(RestartError, match="away; the storage does not answer"):
        ShardQueue(Away(tmp_path), "run", "base").poll()
    assert accounts(open_queue(tmp_path)) == {"published": 2, "quarantined": 2}


def test_shards_that_are_read_at_once_keep_their_order(tmp_path, monkeypatch):
    shard_writer = make_writer(tmp_path)
    for number in range(12):
        shard_writer.publish(make_group(f"{number:02d}", size=1 + number % 3))
    expected = [[f"{number:02d}-{m}" for m in range(1 + number % 3)] for number in range(12)]
    scan = reader.scan_shard
    monkeypatch.setattr(LocalStore, "reads_at_once", 4)

    def slow(store: LocalStore, name: str):
        time.sleep(0.02 * random.random())
        return scan(store, name)

    monkeypatch.setattr(reader, "scan_shard", slow)
    queue = open_queue(tmp_path)
    assert ids(queue.take_groups(12, 0, 0)) == expected
    assert ids(open_queue(tmp_path).take_groups(12, 0, 0)) == expected  # after a restart
