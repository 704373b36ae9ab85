"""Two learners on one bucket: exactly one publishes, also after pauses at the worst moment."""

import contextlib
import threading
import time

import numpy as np
import pytest

from tests.buckets import bucket_store
from tools.bucket_emulator import HARD
from uirl_jax import policy_sync
from uirl_jax.errors import LeaseHeldError, RestartError
from uirl_jax.store import StoreUnavailableError
from uirl_jax.store.bucket import BucketStore
from uirl_jax.store.counted_lease import LeaseTimes
from uirl_jax.store.lease import LEARNER

# A paused process does not notice that time passes: its lease does not give up by its own clock.
PAUSED = LeaseTimes(expiry_s=60.0, give_up_s=600.0, request_s=2.0, look_s=0.02)
TAKES = LeaseTimes(expiry_s=0.2, give_up_s=600.0, request_s=2.0, look_s=0.02)


def learner(times: LeaseTimes) -> BucketStore:
    return BucketStore("gs://runs/run", poll_s=0.0, times=times)


def publish(store: BucketStore, version: int, who: float) -> None:
    policy_sync.publish(
        store,
        version=version,
        step=version,
        arrays={"a": np.full(3, who, np.float32)},
        base_hash="base",
        run_id="run",
        extra={"who": who},
    )


def current(store: BucketStore) -> tuple[int, float, int]:
    manifest = policy_sync.read_manifest(store)
    assert manifest is not None
    adapters = policy_sync.load(store, manifest, "base")
    assert adapters["a"].tolist() == [manifest.extra["who"]] * 3
    return manifest.version, manifest.extra["who"], manifest.extra["lease_generation"]


@pytest.mark.parametrize("pause", ["before the write", "within the write"])
def test_learner_that_was_paused_publishes_nothing_after_another_took_over(monkeypatch, pause):
    with bucket_store("gs", monkeypatch, times=PAUSED) as (first, _):
        for takeover in range(10):
            first.claim(LEARNER, "first")
            policy_sync.seal(first)
            publish(first, 5, 1.0)
            assert current(first)[:2] == (5, 1.0)
            second = learner(TAKES)

            def take_over(second: BucketStore = second) -> None:
                second.claim(LEARNER, "second")
                policy_sync.seal(second)

            real, once = first.put_version, [pause == "within the write"]

            def put_later(name, content, version, real=real, once=once, take=take_over, **how):
                if name == policy_sync.MANIFEST and once.pop():
                    take()  # the lease has been checked, the write has not reached the bucket
                return real(name, content, version, **how)

            if pause == "before the write":
                take_over()
            with monkeypatch.context() as patch:
                if pause == "within the write":
                    patch.setattr(first, "put_version", put_later)
                with pytest.raises(RestartError, match="was lost to second"):
                    publish(first, 6, 1.0)
            assert current(second)[:2] == (5, 1.0)
            publish(second, 6, 2.0)
            assert current(second) == (6, 2.0, 2 * takeover + 2)
            second._held[LEARNER].release()
            first.delete(policy_sync.MANIFEST)


@pytest.mark.parametrize("depth", [0, 600, 200_000])
def test_learner_starts_beside_a_manifest_that_it_cannot_mark(monkeypatch, depth):
    """600 levels can be read, and not be written."""
    with bucket_store("gs", monkeypatch) as (store, _):
        store.claim(LEARNER, "me")
        publish(store, 1, 1.0)
        text = store.read(policy_sync.MANIFEST).decode()
        nested = text.replace('"who": 1.0', f'"who": {"[" * depth}{"]" * depth}')
        store.put(policy_sync.MANIFEST, nested.encode())
        policy_sync.seal(store)
        publish(store, 2, 2.0)
        assert current(store)[:2] == (2, 2.0)


@pytest.mark.parametrize("faults", [None, HARD], ids=["quiet", "faults"])
def test_two_learners_that_start_together_twenty_times_one_trains(monkeypatch, faults):
    times = LeaseTimes(expiry_s=60.0, give_up_s=40.0, request_s=2.0, look_s=0.02)
    with bucket_store("gs", monkeypatch, times=times, faults=faults, request_s=1.0) as (store, _):
        for race in range(20 if faults is None else 6):
            start, trained, ended = threading.Barrier(2), [], threading.Event()

            def run(who: float, start=start, trained=trained, ended=ended, race=race) -> None:
                mine = learner(times)
                start.wait()
                try:
                    held = mine.claim(LEARNER, f"learner {who}")
                except LeaseHeldError:
                    return
                policy_sync.seal(mine)
                for version in (2 * race, 2 * race + 1):
                    publish(mine, version, who)
                trained.append(who)
                while not ended.wait(0.02):  # it goes on until the other has given up
                    with contextlib.suppress(StoreUnavailableError):
                        held.renew()
                held.release()

            threads = [threading.Thread(target=run, args=(who,)) for who in (1.0, 2.0)]
            for thread in threads:
                thread.start()
            deadline_s = time.monotonic() + 60
            while sum(thread.is_alive() for thread in threads) > 1 and len(trained) < 2:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.01)
            while not trained and time.monotonic() < deadline_s:
                time.sleep(0.01)
            ended.set()
            for thread in threads:
                thread.join()
            assert len(trained) == 1
            assert current(store) == (2 * race + 1, trained[0], race + 1)
