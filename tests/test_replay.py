"""Stored successes: kept newest, given to groups that failed whole, gone when nobody needs them."""

import dataclasses

import pytest

from tests import sample_trajectories as sample
from uirl_jax.errors import ConfigError, RestartError
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.replay import Replay, is_replayed
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.shards import reader
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.local import LocalStore
from uirl_jax.types import TaskSpec, Trajectory

EASY, HARD = TaskSpec("desktop/click_button", 1), TaskSpec("desktop/click_button", 2)


def group(name: str, task: TaskSpec, successes: list[bool], rewards=None) -> list[Trajectory]:
    members = sample.make_group(name, len(successes))
    return [
        dataclasses.replace(of, task=task, success=success, reward=reward)
        for of, success, reward in zip(
            members, successes, rewards or map(float, successes), strict=True
        )
    ]


def open_replay(workdir, files=None, base_hash="base") -> Replay:
    return Replay(open_store(workdir), base_hash, sample.LAYOUT, files or {})


def test_complete_gives_a_failed_group_the_best_success_of_its_own_instance(tmp_path):
    store = open_replay(tmp_path)
    better = group("g1", EASY, [False, True, True], [0.0, 1.0, 1.5])
    store.remember([better, group("g2", HARD, [False, False])], step=3)

    failed = group("g3", EASY, [False, False])
    completed = store.complete(failed)
    assert completed[:2] == failed
    sample.assert_same(completed[2], better[2])
    assert [is_replayed(of, completed) for of in completed] == [False, False, True]

    hard = group("g4", HARD, [False, False])
    assert store.complete(hard) == hard, "nobody has solved that instance yet"
    mixed = group("g5", EASY, [False, True])
    assert store.complete(mixed) == mixed, "a group with a success of its own needs none"


def test_remember_keeps_the_newest_and_never_what_was_replayed(tmp_path):
    store = open_replay(tmp_path)
    store.remember([group("g1", EASY, [True])], step=1)
    store.remember([group("g2", EASY, [True])], step=2)
    completed = store.complete(group("g3", EASY, [False]))
    assert completed[1].group_id == "group-g2"
    before = dict(store.files)
    store.remember([completed], step=3)
    assert store.files == before, "an old success does not become a newer one"


def test_a_later_success_of_the_same_step_leaves_the_file_that_a_group_was_completed_from(tmp_path):
    store = open_replay(tmp_path)
    store.remember([group("g1", EASY, [True])], step=1)
    completed = store.complete(group("g2", EASY, [False]))
    (ref,) = store.taken_from.values()
    store.remember([group("g3", EASY, [True, True])], step=1)
    (again,) = reader.read_refs(open_store(tmp_path), [ref], sample.LAYOUT)
    sample.assert_same(again, completed[1])


def test_prune_leaves_what_a_kept_checkpoint_names_so_that_it_can_be_restored(tmp_path):
    store = open_replay(tmp_path)
    kept = []
    for step in range(1, 5):
        store.remember([group(f"g{step}", EASY, [True])], step)
        kept = [*kept, dict(store.files)][-2:]
        store.prune(kept)
    assert sorted(path.name for path in (tmp_path / "replay").iterdir()) == sorted(
        name for files in kept for name in files.values()
    )
    restored = open_replay(tmp_path, kept[0]).complete(group("g9", EASY, [False]))
    assert restored[1].group_id == "group-g3"


@pytest.mark.parametrize("damage", ["gone", "cut", "other_base"])
def test_complete_with_a_damaged_file_says_so_and_goes_on(tmp_path, capsys, damage: str):
    store = open_replay(tmp_path)
    store.remember([group("g1", EASY, [True])], step=1)
    (path,) = (tmp_path / "replay").iterdir()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        store = open_replay(tmp_path, store.files, base_hash="another")
    failed = group("g2", EASY, [False])
    assert store.complete(failed) == failed
    assert "event=replay_lost" in capsys.readouterr().out and not store.files


def test_storage_that_does_not_answer_forgets_no_success(tmp_path, monkeypatch):
    store = open_replay(tmp_path)
    store.remember([group("g1", EASY, [True])], step=1)
    failed = group("g2", EASY, [False])

    def away(*args):
        raise StoreUnavailableError(5, "away")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "open", away)
        patch.setattr(LocalStore, "put", away)
        assert store.complete(failed) == failed
        with pytest.raises(RestartError, match="away; the storage does not answer"):
            store.remember([group("g3", HARD, [True])], step=2)
    assert len(store.complete(failed)) == 2


def test_config_that_replays_without_correction_is_refused():
    with pytest.raises(ConfigError, match="importance='none'"):
        AlgorithmConfig(replay=True, loss=PolicyLossConfig(importance="none"))
