"""What the learner tells actors of the groups that it has taken, and what a killed one forgets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests import actor_world as world
from tests.sample_trajectories import LAYOUT, make_trajectory
from uirl_jax import policy_sync
from uirl_jax.learner import bookkeeping, state
from uirl_jax.learner.curriculum import Curriculum, CurriculumConfig
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import open_store

RUN = "run"


@contextlib.contextmanager
def opened(workdir: Path) -> Iterator[bookkeeping.Bookkeeping]:
    model = world.policy()
    fresh = state.init_state(
        model.trainable, state.make_optimizer(state.OptimizerConfig(lr=1e-3), 10)
    )
    curriculum = Curriculum(CurriculumConfig(), (make_trajectory().task,), 0)
    run, keep = bookkeeping.RunDirectory(workdir, RUN), bookkeeping.Keep()
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
