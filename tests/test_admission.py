"""How far ahead an actor may sample: what is trained, what is on disk, and which group is next."""

import pytest

from tests.sample_trajectories import make_trajectory, make_writer
from uirl_jax.actor.admission import Ledger, PublishedShards, ShardGroup, group_id
from uirl_jax.errors import PolicyError
from uirl_jax.policy_sync import Manifest
from uirl_jax.store import open_store

RUN, BASE = "run", "base"


def manifest(version, extra):
    return Manifest(version, version, "policy/0/a", 0, BASE, RUN, extra, 0.0)


def test_ledger_counts_what_is_trained_and_what_the_learner_can_still_use():
    on_disk = [
        ShardGroup(3, 4, 5),  # trained, not deleted yet
        ShardGroup(4, 5, 5),
        ShardGroup(5, 4, 5),
        ShardGroup(6, 3, 5),  # stale
        ShardGroup(7, 6, 6),  # of a policy that was lost
    ]
    ledger = Ledger.of(manifest(5, {"groups_trained": [[0, 2], [3, 4]]}), on_disk, 1)
    assert ledger.pending == {4, 5}
    assert [i for i in range(9) if i in ledger] == [0, 1, 3, 4, 5]
    # accepted = 3 trained + 2 pending; the limit is (1 + 5 + 1) * 1 = 7
    limits = {"groups_per_step": 1, "max_staleness": 1}
    assert ledger.next_index({}, (), **limits) == 2
    assert ledger.next_index({2: 5}, {2, 6}, **limits) == 7
    assert ledger.next_index({2: 5, 6: 5}, {2, 6}, **limits) is None
    # Groups 3 and 4 are accounted for: their claims do not count twice.
    assert ledger.next_index({2: 5, 3: 5, 4: 5}, {2, 3, 4}, **limits) == 6


def test_ledger_waits_for_a_group_that_would_become_stale():
    """Started at version 3, it may be trained up to version 4: five groups, with itself."""
    limits = {"groups_per_step": 1, "max_staleness": 1}
    extra = {"groups_trained": [[0, 4]]}
    ledger = Ledger.of(manifest(4, extra), [], 1)
    assert ledger.next_index({4: 4}, {4}, **limits) == 5
    assert ledger.next_index({4: 3}, {4}, **limits) is None
    assert ledger.next_index({4: 4}, {4}, **limits, steps=5) is None  # no step would take it


def test_ledger_groups_that_taught_nothing_are_replaced_at_the_same_version():
    limits = {"groups_per_step": 4, "max_staleness": 0}
    extra = {"groups_trained": [[0, 4]]}
    assert Ledger.of(manifest(0, extra), [], 0).next_index({}, (), **limits) is None
    replacing = Ledger.of(manifest(0, extra | {"groups_extra": 2}), [], 0)
    assert replacing.next_index({4: 0}, {4}, **limits) == 5
    assert replacing.next_index({4: 0, 5: 0}, {4, 5}, **limits) is None
    for wrong in (-1, 1.5, "2", None):
        with pytest.raises(PolicyError, match="groups_extra is"):
            Ledger.of(manifest(0, extra | {"groups_extra": wrong}), [], 0)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"groups_trained": None},
        {"groups_trained": [[0, 2], [1, 4]]},
        {"groups_trained": [[2, 1]]},
        {"groups_trained": [[-3, 1]]},
        {"groups_trained": [[0, 1, 2]]},
        {"groups_trained": 5},
        {"groups_trained": [[0, 10**30]]},
        {"groups_trained": [[0, 2], [10**30, 10**30]]},
    ],
)
def test_ledger_of_a_manifest_that_says_nothing_usable_is_refused(extra):
    with pytest.raises(PolicyError, match="groups_trained"):
        Ledger.of(manifest(0, extra), [], 0)


def test_published_shards_sees_other_actors_and_forgets_deleted_files(tmp_path):
    group = [make_trajectory(f"e{n}", group_id(4), versions=(2, 3)) for n in range(2)]
    path = make_writer(tmp_path, actor_id="a1", run_id=RUN).publish(group)
    make_writer(tmp_path, actor_id="a1", run_id="other").publish(
        [make_trajectory("e9", group_id(5))]
    )
    (tmp_path / "shards/a1/broken.tfrecord").write_bytes(b"no shard")
    shards = PublishedShards(open_store(tmp_path), RUN)
    assert shards.poll() == (ShardGroup(4, 2, 3),)
    assert shards.poll() == (ShardGroup(4, 2, 3),)
    path.unlink()
    assert shards.poll() == ()
