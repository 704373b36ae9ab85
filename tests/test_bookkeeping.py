"""What the learner tells actors of the groups that it has taken, and what a killed one forgets."""

import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import actor_world as world
from tests.sample_trajectories import LAYOUT, make_trajectory
from uirl_jax import policy_sync
from uirl_jax.actor import admission
from uirl_jax.learner import bookkeeping, loop, state
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.curriculum import Curriculum, CurriculumConfig
from uirl_jax.learner.own_rewards import OwnRewards
from uirl_jax.rl.rewards import OwnReward, RewardConfig
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import open_store

RUN = "run"
ONE_KIND = (make_trajectory().task,)


def fresh_state() -> state.TrainState:
    optimizer = state.make_optimizer(state.OptimizerConfig(lr=1e-3), 10)
    return state.init_state(world.policy().trainable, optimizer)


@contextlib.contextmanager
def opened(
    workdir: Path, kinds=ONE_KIND, resume_from: Path | None = None, **options
) -> Iterator[bookkeeping.Bookkeeping]:
    model, fresh = world.policy(), fresh_state()
    curriculum = Curriculum(CurriculumConfig(**options), kinds, 0)
    run = bookkeeping.RunDirectory(workdir, RUN, resume_from=resume_from)
    keep = bookkeeping.Keep()
    with bookkeeping.restore(run, model, curriculum, fresh, keep) as (books, restored):
        if books.is_fresh:
            books.save(0, restored)
        yield books


def test_groups_taken_since_the_checkpoint_are_not_told_to_actors_and_are_taken_again(tmp_path):
    model, store = world.policy(), open_store(tmp_path)
    writer = ShardWriter(store, "a0", RUN, model.base_hash, layout=LAYOUT)

    def trained() -> object:
        manifest = policy_sync.read_manifest(store)
        assert manifest is not None
        return manifest.extra["groups_trained"], manifest.extra["groups_extra"]

    for index in range(2):
        writer.publish([make_trajectory(f"e{index}", f"{index:08d}")])
    with opened(tmp_path) as books:
        assert len(books.take(2, 0, 0) or ()) == 2
        assert books.allow_extra(1, 2)
        books.publish(0, {})  # within the step
        assert trained() == ([], 1)
    # Killed. Another actor has played a group again meanwhile.
    writer.publish([make_trajectory("again", f"{1:08d}")])
    with opened(tmp_path) as books:
        taken = books.take(2, 0, 0)
        assert taken is not None and [group[0].episode_id for group in taken] == ["e0", "e1"]
        assert books.take(1, 0, 0) is None
        assert books.final_accounting()["duplicate"] == 1


def test_rewards_by_task_are_those_with_the_functions_of_ones_own(tmp_path):
    writer = ShardWriter(open_store(tmp_path), "a0", RUN, world.policy().base_hash, layout=LAYOUT)
    writer.publish([make_trajectory("e0", f"{0:08d}", reward=0.25)])
    own = OwnRewards(RewardConfig(functions=(OwnReward("examples.own_code.rewards:few_tokens"),)))
    cfg = SimpleNamespace(
        learner=SimpleNamespace(groups_per_step=1, max_staleness=0), algorithm=AlgorithmConfig()
    )
    kinds = (make_trajectory().task, KINDS[0])
    with opened(tmp_path, kinds) as books:
        never, say = threading.Event(), lambda waited_s: None
        ((group,), _) = loop._take(cfg, books, own, 0, {}, never, say)
        assert group[0].reward > 0.25
        told = {name: value for name, value in books.describe().items() if "click_button" in name}
        (mean,) = (value for name, value in told.items() if name.endswith("/reward"))
    assert mean == pytest.approx(group[0].reward)


KINDS = tuple(dataclasses.replace(make_trajectory().task, name=f"t/{n}") for n in range(2))


@pytest.fixture
def earlier(tmp_path) -> Path:
    """The workdir of a run of ten steps of eight groups, of which one was of KINDS[1]."""
    store = open_store(tmp_path / "earlier")
    writer = ShardWriter(store, "a0", RUN, world.policy().base_hash, layout=LAYOUT)
    group = dataclasses.replace(make_trajectory("e0", f"{79:08d}"), task=KINDS[1])
    writer.publish([group])
    with opened(tmp_path / "earlier", KINDS) as books:
        books.begin_at(79)
        books.count(books.take(1, 0, 0) or [])
        books.save(10, fresh_state())
    return tmp_path / "earlier"


@pytest.mark.parametrize(
    ("kinds", "instances", "played"),
    [(KINDS, 0, 0.5), (KINDS[:1], 0, 0.0), (KINDS[::-1], 0, 0.0), (KINDS, 3, 0.0)],
)
def test_tallies_of_a_resumed_run_are_kept_for_the_same_tasks(
    tmp_path, earlier, kinds, instances, played
):
    with opened(tmp_path / "run", kinds, earlier, instances=instances) as books:
        assert books.describe()["curriculum/played"] == played


def test_resumed_run_says_which_checkpoint_it_does_not_start_from(tmp_path, earlier, capsys):
    shutil.rmtree(earlier / "checkpoints" / "10" / "meta")
    with opened(tmp_path / "run", KINDS, earlier):
        pass
    said = capsys.readouterr().out
    assert f'event=checkpoint_skipped reason="{earlier / "checkpoints" / "10"}: ' in said
    assert f"event=resumed workdir={earlier} step=0" in said


@pytest.mark.parametrize("per_step", [4, 8, 16])
def test_actors_of_a_resumed_run_start_the_groups_of_its_next_step(tmp_path, earlier, per_step):
    with opened(tmp_path / "run", KINDS, earlier) as books:
        books.begin_at(10 * per_step)
        books.save(10, fresh_state())
        books.allow_extra(per_step, 11 * per_step)  # as every step begins
        books.publish(10, {})
    manifest = policy_sync.read_manifest(open_store(tmp_path / "run"))
    assert manifest is not None
    ledger, started = admission.Ledger.of(manifest, (), 0), dict[int, int]()
    while True:
        index = ledger.next_index(started, started, groups_per_step=per_step, max_staleness=0)
        if index is None:
            break
        started[index] = 10
    assert len(started) == per_step and min(started) >= 80


def test_actors_of_a_run_that_ended_early_go_on_once_it_is_extended(tmp_path):
    def published(books: bookkeeping.Bookkeeping) -> policy_sync.Manifest:
        books.publish(0, {})
        manifest = policy_sync.read_manifest(open_store(tmp_path))
        assert manifest is not None
        return manifest

    with opened(tmp_path) as books:
        assert not admission.has_ended(published(books), 10)
        books.end(10, "enough")
        manifest = published(books)
    assert admission.has_ended(manifest, 10)
    assert not admission.has_ended(manifest, 20)  # the learner has not published yet


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(True, True), (False, False), (None, False), (10, True), (9, False), ("10", False)],
)
def test_end_of_a_run_is_read_from_manifests_of_all_releases(ended, expected):
    manifest = policy_sync.Manifest(
        version=3,
        step=3,
        path="",
        crc32c=0,
        base_hash="",
        run_id=RUN,
        extra={"ended": ended},
        published_unix_s=0.0,
    )
    assert admission.has_ended(manifest, 10) is expected
    assert not admission.has_ended(dataclasses.replace(manifest, extra={}), 10)
    assert admission.has_ended(dataclasses.replace(manifest, step=10), 10)
