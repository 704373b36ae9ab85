import collections
import dataclasses
import json
import shutil
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample_trajectories import LAYOUT, make_group, make_trajectory, make_writer
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, reader, record, writer
from uirl_jax.shards.journal import Journal
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.store import open_store
from uirl_jax.types import Trajectory


def open_queue(workdir: Path, state: dict | None = None) -> ShardQueue:
    """A queue of the tests' run, polled. The state goes through JSON, as in a checkpoint."""
    queue = ShardQueue(open_store(workdir), "run", "base", json.loads(json.dumps(state)))
    queue.poll()
    return queue


def ids(groups: list[list[Trajectory]] | None) -> list[list[str]] | None:
    return groups and [[trajectory.episode_id for trajectory in group] for group in groups]


def accounts(queue: ShardQueue) -> dict[str, int]:
    """The accounts without zeros, after asserting the identity."""
    counts = queue.accounting()
    assert counts["published"] == sum(n for name, n in counts.items() if name != "published")
    return {name: n for name, n in counts.items() if n}


def republish(path: Path) -> Path:
    """The same bytes under another name, as an actor that repeats itself would leave them."""
    *_, sequence, version = path.stem.split("-")
    copy = path.with_name(f"a0-{uuid.uuid4().hex}-{sequence}-{version}.tfrecord")
    shutil.copy(path, copy)
    return copy


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def frames(path: Path) -> list[bytes]:
    with open(path, "rb") as file:
        size_bytes = path.stat().st_size
        return [
            framing.frame(payload) for _, payload, _ in framing.iterate_frames(file, size_bytes)
        ]


# ---------------------------------------------------------------- taking


def test_take_groups_waits_until_there_are_enough_whole_groups(tmp_path):
    shard_writer, queue = make_writer(tmp_path), open_queue(tmp_path)
    assert queue.take_groups(1, 0, 0) is None
    shard_writer.publish(make_group("a", size=3))
    queue.poll()
    assert queue.take_groups(2, 0, 0) is None
    shard_writer.publish([*make_group("b"), *make_group("c")])
    queue.poll()
    assert ids(queue.take_groups(2, 0, 0)) == [["a-0", "a-1", "a-2"], ["b-0", "b-1"]]
    assert accounts(queue) == {"published": 7, "trained": 5, "pending": 2}
    assert ids(queue.take_groups(1, 0, 0)) == [["c-0", "c-1"]]
    assert queue.take_groups(1, 0, 0) is None


def test_take_groups_orders_one_poll_by_version_then_actor_then_sequence(tmp_path):
    second, first = make_writer(tmp_path, "a1"), make_writer(tmp_path, "a0")
    for shard_writer, name, version in [
        (second, "d", 0),
        (first, "e", 1),
        (first, "b", 0),
        (first, "c", 0),
    ]:
        shard_writer.publish(make_group(name, size=1, version=version))
    assert ids(open_queue(tmp_path).take_groups(4, 1, 1)) == [["b-0"], ["c-0"], ["d-0"], ["e-0"]]


def test_take_groups_of_one_group_id_in_two_shards_keeps_them_apart(tmp_path):
    shard_writer = make_writer(tmp_path)
    for episode_id in ("e0", "e1"):
        shard_writer.publish([make_trajectory(episode_id, "same")])
    assert ids(open_queue(tmp_path).take_groups(2, 0, 0)) == [["e0"], ["e1"]]


def test_take_groups_drops_what_was_played_twice_and_what_has_no_id_of_a_group(tmp_path):
    shard_writer = make_writer(tmp_path)

    def publish(episode_id: str, group_id: str) -> Path:
        return shard_writer.publish([make_trajectory(episode_id, group_id)])

    def is_trained(group_id: str) -> bool:
        if not group_id.isdecimal():
            raise RecordError(f"group_id={group_id!r}")
        return int(group_id) in trained

    trained: set[int] = {3}
    publish("e0", "00000004")
    publish("e1", "00000003")  # trained before
    publish("e2", "00000004")  # pending already
    broken = publish("e3", "../x")
    queue = open_queue(tmp_path)
    assert queue.take_groups(2, 0, 0, is_trained) is None
    assert ids(queue.take_groups(1, 0, 0, is_trained)) == [["e0"]]
    trained.add(4)
    publish("e4", "00000004")
    queue.poll()
    assert queue.take_groups(1, 0, 0, is_trained) is None
    assert accounts(queue) == {"published": 5, "trained": 1, "duplicate": 3, "quarantined": 1}
    assert not broken.exists()
    (reason,) = (tmp_path / "quarantine").glob("*.reason")
    assert "group_id='../x'" in reason.read_text()
    assert accounts(open_queue(tmp_path, queue.state())) == accounts(queue)


def test_take_groups_drops_whole_groups_that_are_stale(tmp_path):
    mixed = [
        make_trajectory("m0", "mixed", versions=(4, 5)),
        make_trajectory("m1", "mixed", versions=(2, 5)),  # began two versions too early
    ]
    fine = [
        make_trajectory("f0", "fine", versions=(3, 5)),
        make_trajectory("f1", "fine", versions=()),  # no turn: it has no version to be stale with
    ]
    empty = [make_trajectory("z0", "empty", versions=())]
    make_writer(tmp_path).publish([*mixed, *fine, *empty])
    queue = open_queue(tmp_path)
    assert accounts(queue) == {"published": 5, "pending": 5}
    assert ids(queue.take_groups(1, current_version=5, max_staleness=2)) == [["f0", "f1"]]
    assert accounts(queue) == {"published": 5, "trained": 2, "stale": 3}


def test_take_groups_puts_shards_of_a_policy_that_was_lost_out_of_the_actors_sight(tmp_path):
    shard_writer = make_writer(tmp_path)
    here = shard_writer.publish([make_trajectory("h0", "here", versions=(5,))])
    gone = shard_writer.publish(
        [
            make_trajectory("g0", "gone", versions=(5, 6)),
            make_trajectory("g1", "gone too", versions=(5,)),  # its shard goes as a whole
        ]
    )
    queue = open_queue(tmp_path)
    assert ids(queue.take_groups(1, current_version=5, max_staleness=0)) == [["h0"]]
    assert accounts(queue) == {"published": 3, "trained": 1, "quarantined": 2}
    assert here.exists() and not gone.exists()
    (reason,) = (tmp_path / "quarantine").glob("*.reason")
    assert "after version 5 that was lost" in reason.read_text()
    # Nor does it come back: not in this process, and not in the next.
    assert queue.take_groups(1, current_version=6, max_staleness=1) is None
    assert accounts(open_queue(tmp_path, queue.state())) == accounts(queue)
    again = open_queue(tmp_path)  # killed before a checkpoint knew of it
    assert accounts(again) == {"published": 3, "pending": 1, "quarantined": 2}
    assert "after version 5" in reason.read_text()


# ---------------------------------------------------------------- duplicates


def test_duplicate_shard_is_counted_and_not_trained(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    queue = open_queue(tmp_path)
    republish(path)
    queue.poll()
    assert accounts(queue) == {"published": 4, "duplicate": 2, "pending": 2}
    assert len(queue.take_groups(1, 0, 0)) == 1
    republish(path)
    queue.poll()
    assert accounts(queue) == {"published": 6, "duplicate": 4, "trained": 2}


def test_duplicate_within_a_shard_leaves_the_rest_of_its_group(tmp_path):
    group = make_group("a", size=3)
    make_writer(tmp_path).publish([*group, group[1]])
    queue = open_queue(tmp_path)
    assert ids(queue.take_groups(1, 0, 0)) == [["a-0", "a-1", "a-2"]]
    assert accounts(queue) == {"published": 4, "trained": 3, "duplicate": 1}


def test_duplicate_after_the_original_was_deleted_is_still_noticed(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    kept = tmp_path / "kept"
    shutil.copy(path, kept)
    queue = open_queue(tmp_path)
    queue.take_groups(1, 0, 0)
    state = queue.state()
    queue.committed(state)
    assert not path.exists()
    path.parent.mkdir(parents=True)
    shutil.copy(kept, path)
    republish(path)
    path.unlink()
    queue = open_queue(tmp_path, state)
    assert accounts(queue) == {"published": 4, "trained": 2, "duplicate": 2}


# ---------------------------------------------------------------- quarantine


def foreign(workdir: Path, **changes) -> Path:
    """A valid shard whose header differs in one thing."""
    path = make_writer(workdir).publish(make_group("a", size=3))
    base_hash = changes.pop("base_hash", "base")
    trajectories = [dataclasses.replace(t, **changes) for t in reader.read_shard(path)[1]]
    writer.write_shard(path, trajectories, base_hash=base_hash, layout=LAYOUT)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "other"}, "run 'other', expected 'run'"),
        ({"base_hash": "other"}, "base model 'other', expected 'base'"),
    ],
)
def test_quarantine_of_a_foreign_shard_keeps_bytes_reason_and_count(tmp_path, changes, message):
    path = foreign(tmp_path, **changes)
    data = path.read_bytes()
    queue = open_queue(tmp_path)
    assert accounts(queue) == {"published": 3, "quarantined": 3}
    assert not path.exists()
    moved = tmp_path / "quarantine" / f"a0--{path.name}"
    assert moved.read_bytes() == data
    reason = moved.with_name(f"{moved.name}.reason").read_text()
    assert message in reason and path.name in reason and reason.count("\n") == 1


def test_quarantine_of_a_wrong_schema_counts_one(tmp_path):
    header = record.Header("run", "a0", "base", 0, 0, 3, LAYOUT, schema=1)
    path = make_writer(tmp_path).publish(make_group("a"))
    framed = frames(path)
    path.write_bytes(b"".join([framing.frame(record.encode_header(header)), *framed[1:]]))
    queue = open_queue(tmp_path)
    assert accounts(queue) == {"published": 1, "quarantined": 1}
    (reason,) = (tmp_path / "quarantine").glob("*.reason")
    assert "schema 1, this reader knows 2" in reason.read_text()


@pytest.mark.parametrize(("position", "count"), [(-30, 2), (20, 1)])
def test_quarantine_of_a_damaged_shard_counts_its_header_or_one(tmp_path, position, count):
    path = make_writer(tmp_path).publish(make_group("a"))
    flip_bit(path, position)
    assert accounts(open_queue(tmp_path)) == {"published": count, "quarantined": count}


@pytest.mark.parametrize("move", ["rename", "other_actor"])
def test_quarantine_of_a_shard_under_a_wrong_name(tmp_path, move):
    path = make_writer(tmp_path).publish(make_group("a"))
    target = path.with_name("x.tfrecord") if move == "rename" else path.parents[1] / "a1"
    (tmp_path / "shards" / "a1").mkdir()
    shutil.move(path, target)
    assert accounts(open_queue(tmp_path)) == {"published": 2, "quarantined": 2}


def test_quarantine_count_survives_any_restart(tmp_path):
    shard_writer = make_writer(tmp_path)
    flip_bit(shard_writer.publish(make_group("a")), -30)
    early = open_queue(tmp_path).state()
    flip_bit(shard_writer.publish(make_group("b")), -30)
    assert accounts(open_queue(tmp_path, early)) == {"published": 4, "quarantined": 4}
    assert accounts(open_queue(tmp_path, early)) == {"published": 4, "quarantined": 4}
    assert accounts(open_queue(tmp_path)) == {"published": 4, "quarantined": 4}


def test_quarantine_interrupted_before_the_move_is_finished_and_counted_once(tmp_path, monkeypatch):
    path = make_writer(tmp_path).publish(make_group("a"))
    flip_bit(path, -30)
    with monkeypatch.context() as patched:
        patched.setattr(ShardQueue, "_quarantine", lambda *_: None)  # killed there
        open_queue(tmp_path)
    assert path.exists()
    assert accounts(open_queue(tmp_path)) == {"published": 2, "quarantined": 2}
    assert not path.exists()


def test_shard_damaged_after_it_was_noticed_is_quarantined_for_what_is_left(tmp_path):
    shard_writer = make_writer(tmp_path)
    path = shard_writer.publish([*make_group("a"), *make_group("b"), *make_group("c")])
    queue = open_queue(tmp_path)
    assert ids(queue.take_groups(1, 0, 0)) == [["a-0", "a-1"]]
    flip_bit(path, path.stat().st_size // 2)  # in group b
    shard_writer.publish(make_group("d"))
    queue.poll()
    assert ids(queue.take_groups(1, 0, 0)) == [["d-0", "d-1"]]
    expected = {"published": 8, "trained": 4, "quarantined": 4}
    assert accounts(queue) == expected
    assert accounts(open_queue(tmp_path, queue.state())) == expected


# ---------------------------------------------------------------- directories in motion


def test_poll_leaves_temporary_and_other_files_alone(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    others = [path.with_name(f".{path.name}.tmp"), path.with_name("notes.txt")]
    for other in others:
        other.write_bytes(b"half")
    (path.parent / "directory.tfrecord").mkdir()
    queue = open_queue(tmp_path)
    assert accounts(queue) == {"published": 2, "pending": 2}
    assert all(other.exists() for other in others)


def test_poll_reads_each_file_once(tmp_path, monkeypatch):
    shard_writer, scanned = make_writer(tmp_path), collections.Counter()
    scan = reader.scan_shard
    monkeypatch.setattr(
        reader, "scan_shard", lambda store, name: scanned.update([name]) or scan(store, name)
    )
    queue = open_queue(tmp_path)
    for number in range(5):
        shard_writer.publish(make_group(f"g{number}"))
        queue.poll()
        queue.poll()
    assert len(scanned) == 5 and set(scanned.values()) == {1}


def test_poll_tolerates_a_file_that_vanishes(tmp_path, monkeypatch):
    shard_writer = make_writer(tmp_path)
    gone, stays = shard_writer.publish(make_group("a")), shard_writer.publish(make_group("b"))
    scan = reader.scan_shard

    def scan_after_deletion(store, name):
        gone.unlink(missing_ok=True)
        return scan(store, name)

    monkeypatch.setattr(reader, "scan_shard", scan_after_deletion)
    queue = open_queue(tmp_path)
    assert stays.exists()
    assert accounts(queue) == {"published": 2, "pending": 2}


def test_pending_shard_that_vanishes_is_counted_with_a_reason(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    queue = open_queue(tmp_path)
    path.unlink()
    assert queue.take_groups(1, 0, 0) is None
    assert accounts(queue) == {"published": 2, "quarantined": 2}
    (reason,) = (tmp_path / "quarantine").iterdir()
    assert "No such file" in reason.read_text()


# ---------------------------------------------------------------- restarts


def test_restart_from_an_older_state_sees_the_same_groups_in_the_same_order(tmp_path):
    first, late = make_writer(tmp_path, "a1"), make_writer(tmp_path, "a0")
    queue = open_queue(tmp_path)
    early = queue.state()
    first.publish([*make_group("a"), *make_group("b", version=1)])
    queue.poll()
    one = ids(queue.take_groups(1, 1, 1))
    middle = queue.state()
    # Noticed later, though its version and actor sort before: the order must not change for it.
    late.publish(make_group("c", version=0))
    queue.poll()
    two = ids(queue.take_groups(2, 1, 1))
    for state, expected in [(early, [*one, *two]), (middle, two), (None, [*one, *two])]:
        restarted = open_queue(tmp_path, state)
        assert ids(restarted.take_groups(len(expected), 1, 1)) == expected
        assert accounts(restarted) == {"published": 6, "trained": 6}


def test_committed_deletes_only_what_that_state_has_wholly_consumed(tmp_path):
    shard_writer, queue = make_writer(tmp_path), open_queue(tmp_path)
    whole = shard_writer.publish(make_group("a"))
    half = shard_writer.publish([*make_group("b"), *make_group("c")])
    queue.poll()
    queue.take_groups(2, 0, 0)
    state = queue.state()
    queue.take_groups(1, 0, 0)
    later = shard_writer.publish(make_group("d"))
    queue.poll()
    queue.take_groups(1, 0, 0)
    queue.committed(state)
    assert [path.exists() for path in (whole, half, later)] == [False, True, True]
    restarted = open_queue(tmp_path, state)
    assert ids(restarted.take_groups(2, 0, 0)) == [["c-0", "c-1"], ["d-0", "d-1"]]
    restarted.committed(restarted.state())
    assert not half.exists() and not later.exists()


def test_restart_between_commit_and_deletion_deletes_later_and_trains_nothing_twice(tmp_path):
    path = make_writer(tmp_path).publish(make_group("a"))
    queue = open_queue(tmp_path)
    queue.take_groups(1, 0, 0)
    state = queue.state()  # committed, then killed
    restarted = open_queue(tmp_path, state)
    assert restarted.take_groups(1, 0, 0) is None
    assert accounts(restarted) == {"published": 2, "trained": 2}
    restarted.committed(restarted.state())
    assert not path.exists()


def test_restart_behind_a_deletion_counts_the_lost_records(tmp_path):
    """All newer checkpoints damaged: the shards that they had used up are gone."""
    shard_writer, queue = make_writer(tmp_path), open_queue(tmp_path)
    shard_writer.publish([*make_group("a"), *make_group("b")])
    queue.poll()
    queue.take_groups(1, 0, 0)
    state = queue.state()
    shard_writer.publish(make_group("c"))
    queue.poll()
    queue.take_groups(2, 0, 0)
    queue.committed(queue.state())
    restarted = open_queue(tmp_path, state)
    assert accounts(restarted) == {"published": 6, "trained": 2, "quarantined": 4}
    assert accounts(open_queue(tmp_path, restarted.state())) == accounts(restarted)


def append_as_before(workdir: Path) -> Path:
    """The journal as release 0.1.0 kept it: one file, to which it appended."""
    lines = [path.read_bytes() for path in sorted((workdir / "journal").iterdir())]
    shutil.rmtree(workdir / "journal")
    path = workdir / "shards" / "journal.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_restart_in_a_workdir_of_the_release_before_goes_on_in_the_same_order(tmp_path):
    shard_writer, queue = make_writer(tmp_path, "a1"), open_queue(tmp_path)
    shard_writer.publish(make_group("b"))
    queue.poll()
    make_writer(tmp_path, "a0").publish(make_group("a"))  # noticed later, though it sorts before
    queue.poll()
    assert ids(queue.take_groups(1, 0, 0)) == [["b-0", "b-1"]]
    state = queue.state()
    append_as_before(tmp_path)
    shard_writer.publish(make_group("c"))
    for _ in range(2):  # the second time with a journal of both forms
        restarted = open_queue(tmp_path, state)
        assert ids(restarted.take_groups(2, 0, 0)) == [["a-0", "a-1"], ["c-0", "c-1"]]
        assert accounts(restarted) == {"published": 6, "trained": 6}
    assert ids(open_queue(tmp_path).take_groups(1, 0, 0)) == [["b-0", "b-1"]]


def test_restart_with_a_torn_journal_line_notices_that_shard_again(tmp_path):
    make_writer(tmp_path).publish(make_group("a"))
    open_queue(tmp_path)
    journal = append_as_before(tmp_path)
    journal.write_bytes(journal.read_bytes()[:-5])
    assert accounts(open_queue(tmp_path)) == {"published": 2, "pending": 2}
    assert accounts(open_queue(tmp_path)) == {"published": 2, "pending": 2}
    assert len(Journal(open_store(tmp_path)).lines) == 1


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("now", None, "0 lines, the checkpoint refers to 1"),
        ("before", None, "0 lines, the checkpoint refers to 1"),
        ("before", "", "0 lines, the checkpoint refers to 1"),
        ("now", "", "has lines 0 to 0 of the journal"),
        ("now", "{}\n", "line 1 is damaged"),
        ("before", "{}\n", "line 1 is damaged"),
    ],
)
def test_restart_with_a_lost_or_damaged_journal_raises_shard_error(tmp_path, form, text, message):
    make_writer(tmp_path).publish(make_group("a"))
    state = open_queue(tmp_path).state()
    (path,) = (tmp_path / "journal").iterdir()
    if form == "before":
        path = append_as_before(tmp_path)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ShardError, match=message):
        open_queue(tmp_path, state)


@pytest.mark.parametrize(
    ("change", "message"), [({"run_id": "other"}, "run 'other'"), ({"schema": 2}, "schema 2")]
)
def test_restart_with_a_state_of_another_run_raises_shard_error(tmp_path, change, message):
    with pytest.raises(ShardError, match=message):
        open_queue(tmp_path, open_queue(tmp_path).state() | change)


# ---------------------------------------------------------------- the accounting identity

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            st.lists(st.integers(1, 3), min_size=1, max_size=3),
            st.integers(0, 3),
        ),
        st.tuples(st.just("duplicate"), st.integers(0, 9)),
        st.tuples(st.just("corrupt"), st.sampled_from([20, -30])),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["save", "commit", "restart"])),
    ),
    min_size=4,
    max_size=24,
)


@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS)
def test_accounts_and_exactly_once_hold_for_any_sequence_of_faults(operations, tmp_path_factory):
    """A learner of staleness 1 whose actor publishes, repeats itself and breaks its files.

    Every number is counted here from what the test did, and compared with the queue's.
    """
    workdir = tmp_path_factory.mktemp("run")
    shard_writer, queue = make_writer(workdir), open_queue(workdir)
    kept, shards, valid = workdir / "kept", [], set()  # kept: copies, for shards deleted meanwhile
    kept.mkdir()
    published = corrupt = duplicates = 0
    version, trained = 0, []
    saved = (queue.state(), version, [])
    takes: list[tuple[int, int, list | None]] = []  # since the save

    for operation, *arguments in operations:
        if operation == "publish":
            sizes, age = arguments
            # A version is published to the actor only after its checkpoint is committed.
            made = [
                trajectory
                for number, size in enumerate(sizes)
                for trajectory in make_group(
                    f"s{len(shards)}-{number}", size, max(0, saved[1] - age)
                )
            ]
            path = shard_writer.publish(made)
            shutil.copy(path, kept)
            shards.append((path, len(made)))
            valid |= {trajectory.episode_id for trajectory in made}
            published += len(made)
        elif operation == "duplicate" and shards:
            path, size = shards[arguments[0] % len(shards)]
            *_, sequence, tail = path.name.split("-")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(
                kept / path.name, path.with_name(f"a0-{uuid.uuid4().hex}-{sequence}-{tail}")
            )
            published += size
            duplicates += size
        elif operation == "corrupt":
            flip_bit(shard_writer.publish(make_group("corrupt")), arguments[0])
            count = 1 if arguments[0] == 20 else 2  # the header is damaged, or what follows
            published += count
            corrupt += count
        elif operation == "take":
            groups = queue.take_groups(arguments[0], version, 1)
            takes.append((arguments[0], version, ids(groups)))
            if groups:
                trained += [episode for group in ids(groups) for episode in group]
                version += 1
        elif operation == "save":
            saved, takes = (queue.state(), version, list(trained)), []
        elif operation == "commit":
            queue.committed(saved[0])
        elif operation == "restart":
            state, version, trained = saved[0], saved[1], list(saved[2])
            queue = open_queue(workdir, state)
            for n_groups, at_version, expected in takes:  # the same steps see the same records
                if expected:
                    assert ids(queue.take_groups(n_groups, at_version, 1)) == expected
                    trained += [episode for group in expected for episode in group]
                    version = at_version + 1
        queue.poll()
        counts = accounts(queue)
        assert counts.get("published", 0) == published
        assert counts.get("trained", 0) == len(trained) == len(set(trained))
        assert counts.get("quarantined", 0) == corrupt
        assert counts.get("duplicate", 0) == duplicates
        assert set(trained) <= valid

    while groups := queue.take_groups(1, version, version):
        trained += [episode for group in ids(groups) for episode in group]
    counts = accounts(queue)
    assert "pending" not in counts
    assert counts.get("trained", 0) == len(trained) == len(set(trained))
    assert counts.get("trained", 0) + counts.get("stale", 0) == len(valid)
    queue.committed(queue.state())
    assert list((workdir / "shards").glob("*/*.tfrecord")) == []
