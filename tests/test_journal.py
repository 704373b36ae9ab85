"""The learner's list of noticed shards: small objects, folded, over kills and full disks."""

import pytest

from uirl_jax.errors import ShardError
from uirl_jax.shards import journal
from uirl_jax.shards.journal import Journal, Line
from uirl_jax.store import open_store
from uirl_jax.store.local import LocalStore


def lines(first: int, count: int) -> list[Line]:
    return [Line(f"a0/{n}.tfrecord", n % 3 + 1, n % 5 == 0) for n in range(first, first + count)]


def append(notes: Journal, polls: int) -> None:
    """What so many polls notice, one to three shards each."""
    for poll in range(polls):
        notes.append(lines(len(notes.lines), 1 + poll % 3))


class CountingStore(LocalStore):
    written_bytes = 0

    def put(self, name, content):
        self.written_bytes += len(content)
        super().put(name, content)

    def put_new(self, name, content):
        self.written_bytes += len(content)
        return super().put_new(name, content)


def test_journal_of_many_polls_is_read_from_few_objects_and_each_line_is_written_twice(tmp_path):
    store = CountingStore(tmp_path)
    notes = Journal(store)
    append(notes, 1000)
    assert notes.lines == lines(0, 1999)
    assert Journal(store).lines == notes.lines
    names = store.names("journal")
    assert len(names) <= 1000 / journal.FOLD + journal.FOLD
    size_bytes = sum(len(store.read(name)) for name in names)
    assert size_bytes <= store.written_bytes <= 2 * size_bytes


@pytest.mark.parametrize("polls", [1, 99, 100, 101, 250])
def test_journal_opened_again_goes_on_and_folds_as_if_it_had_not_been_closed(tmp_path, polls):
    once, again = open_store(tmp_path / "once"), open_store(tmp_path / "again")
    notes = Journal(once)
    append(notes, polls)
    for poll in range(polls):
        Journal(again).append(lines(len(Journal(again).lines), 1 + poll % 3))
    assert Journal(again).lines == Journal(once).lines == notes.lines
    assert again.names("journal") == once.names("journal")


class Killed(Exception):
    pass


@pytest.mark.parametrize("done", ["nothing", "folded", "half deleted"])
def test_journal_killed_while_it_folds_loses_and_repeats_nothing(tmp_path, monkeypatch, done):
    store = open_store(tmp_path)
    notes = Journal(store)
    append(notes, journal.FOLD - 1)

    def killed(self, *args):
        if done == "half deleted":
            delete(self, *args[::2])
        raise Killed

    delete = LocalStore.delete
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "put" if done == "nothing" else "delete", killed)
        with pytest.raises(Killed):
            append(notes, 1)
    expected = lines(0, len(notes.lines))
    again = Journal(store)
    assert again.lines == expected
    append(again, 2 * journal.FOLD)
    assert Journal(store).lines == again.lines == lines(0, len(again.lines))
    assert len(store.names("journal")) <= 4 + journal.FOLD


def test_journal_on_a_full_disk_adds_nothing_and_then_goes_on(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    notes = Journal(store)
    append(notes, 3)
    before = list(notes.lines)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(
            ShardError, match="No space left on device: cannot write the list of shards"
        ):
            append(notes, 1)
    assert notes.lines == before == Journal(store).lines
    append(notes, 1)
    assert Journal(store).lines == notes.lines


def test_journal_of_two_learners_at_once_is_refused(tmp_path):
    one, other = Journal(open_store(tmp_path)), Journal(open_store(tmp_path))
    append(one, 1)
    with pytest.raises(ShardError, match="written by another learner"):
        append(other, 1)


def test_journal_with_a_part_missing_or_cut_raises_shard_error(tmp_path):
    store = open_store(tmp_path)
    append(Journal(store), 5)
    first, second, *_ = store.names("journal")
    content = store.read(second)
    store.delete(second)
    with pytest.raises(ShardError, match=r"has lines 3 to 6 .* 1 lines precede it"):
        Journal(store)
    for cut in (content[:-4], b"", content.splitlines(True)[0]):
        store.put(second, cut)
        with pytest.raises(ShardError):
            Journal(store)
    store.put(second, content)
    assert len(Journal(store).lines) == 9
    (tmp_path / "journal" / "notes.txt").write_text("not ours")
    assert len(Journal(store).lines) == 9 and first.endswith("0000000000.jsonl")


def test_journal_of_the_release_before_is_continued_beside_it(tmp_path):
    old = tmp_path / "shards" / "journal.jsonl"
    old.parent.mkdir()
    old.write_bytes(journal._to_bytes(lines(0, 5)) + b'{"shard": "torn')
    store = open_store(tmp_path)
    notes = Journal(store)
    assert notes.lines == lines(0, 5)
    before = old.read_bytes()
    append(notes, 150)
    assert Journal(store).lines == notes.lines == lines(0, len(notes.lines))
    assert old.read_bytes() == before
