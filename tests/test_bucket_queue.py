"""Records through a bucket with all faults on: none is lost, none is trained twice."""

import dataclasses
import json
import random
import threading
import time

import pytest

from tests.buckets import bucket_store
from tests.sample_trajectories import LAYOUT, make_trajectory
from tools.bucket_emulator import HARD
from uirl_jax.errors import RestartError, ShardError
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.bucket import BucketStore

ACTORS, GROUP, PER_STEP = 3, 8, 2
MANY = dataclasses.replace(HARD, lost_answer=0.1, hang=0.005, hang_s=3.0, slow_s=0.05)


MANY_TRIES = 500


def act(actor: int, groups: int, store: BucketStore) -> None:
    """Publishes its groups; one whose outcome is not known is published again, as actors do."""
    writer = ShardWriter(store, f"a{actor}", "run", "base", layout=LAYOUT)
    for number in range(groups):
        group = [
            make_trajectory(f"{actor}-{number}-{member}", f"{actor}-{number}", versions=(0,))
            for member in range(GROUP)
        ]
        for _ in range(MANY_TRIES):
            try:
                writer.publish(group)
                break
            except ShardError:
                time.sleep(0.05)
        else:
            raise AssertionError(f"group {actor}-{number} is never published")


class Learner:
    """Takes groups, commits its cursor, deletes what is consumed; killed at random moments."""

    def __init__(self, seed: int, make_store, kills: int, steps: int) -> None:
        self._random, self._make_store = random.Random(seed), make_store
        self._kill = kills / steps / 2
        self._committed: tuple[str, list[str]] = ("null", [])  # what a checkpoint would hold
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        state, trained = self._committed
        for _ in range(MANY_TRIES):
            try:
                self.queue = ShardQueue(self._make_store(), "run", "base", json.loads(state))
                break
            except ShardError:
                self.restarts += 1
        else:
            raise AssertionError("the queue never opens")
        self.trained = list(trained)

    def step(self) -> None:
        """One step, which a kill may end anywhere; then a new process goes on."""
        try:
            self.queue.poll()
            groups = self.queue.take_groups(PER_STEP, 0, 0)
            if groups is None:
                return
            self.trained += [record.episode_id for group in groups for record in group]
            if self._random.random() < self._kill:
                raise RestartError("killed before the commit")
            self._committed = json.dumps(self.queue.state()), list(self.trained)
            if self._random.random() < self._kill:
                raise RestartError("killed between the commit and the deletion")
            self.queue.committed(json.loads(self._committed[0]))
        except (RestartError, StoreUnavailableError):
            self.restarts += 1
            self._start()


@pytest.mark.parametrize(
    "records", [240, pytest.param(10_080, marks=pytest.mark.slow)], ids=["240", "10080"]
)
def test_records_through_a_bucket_with_all_faults_are_trained_once_each(monkeypatch, records):
    groups = records // (ACTORS * GROUP)
    with bucket_store("gs", monkeypatch, faults=MANY, request_s=1.0) as (store, service):

        def make_store() -> BucketStore:
            return BucketStore("gs://runs/run", poll_s=0.0, request_s=1.0)

        threads = [
            threading.Thread(target=act, args=(n, groups, make_store())) for n in range(ACTORS)
        ]
        for thread in threads:
            thread.start()
        learner, deadline_s = (
            Learner(0, make_store, 6, records // (PER_STEP * GROUP)),
            time.monotonic() + records / 5 + 60,
        )
        while len(learner.trained) < records and time.monotonic() < deadline_s:
            learner.step()
        for thread in threads:
            thread.join()
        learner.step()
        expected = {
            f"{actor}-{number}-{member}"
            for actor in range(ACTORS)
            for number in range(groups)
            for member in range(GROUP)
        }
        assert len(learner.trained) == len(set(learner.trained))
        assert set(learner.trained) == expected
        counts = learner.queue.accounting()
        assert counts["trained"] == records
        assert counts["stale"] == counts["quarantined"] == counts["pending"] == 0
        assert counts["published"] == records + counts["duplicate"]
        counters = service.counters()
        # Eleven were seen at 240 records: a group is read by one request.
        assert sum(counters["injected"].values()) > records / 40
        assert len(counters["injected"]) >= 4  # kinds
        service.set_faults()
        left = store.names("shards")
        print({"restarts": learner.restarts, "left": len(left), **counts, **counters})
        assert store.names("quarantine") == []


def test_storage_that_does_not_answer_says_nothing_about_a_shard(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    shards = ShardWriter(store, "a0", "run", "base", layout=LAYOUT)
    shards.publish([make_trajectory(f"e{n}", "g", versions=(0,)) for n in range(3)])
    queue = ShardQueue(store, "run", "base")

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError(5, "away")

    def noticed_with(*calls: str) -> int:
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(store, name, away)
            queue.poll()
            assert queue.take_groups(1, 0, 0) is None
        assert store.names("quarantine") == []
        return queue.accounting()["pending"]

    assert noticed_with("names") == noticed_with("open") == 0
    queue.poll()
    assert noticed_with("open") == 3
    groups = queue.take_groups(1, 0, 0)
    assert groups is not None and len(groups[0]) == 3
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", away)
        queue.committed(queue.state())
    assert len(store.names("shards")) == 1
    queue.committed(queue.state())  # with a later commit
    assert store.names("shards") == []
    assert caplog.text.count("event=storage_unavailable") == 1
