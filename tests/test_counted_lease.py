"""The lease in a bucket: one holder over pauses, kills, wrong clocks, lost answers and outages."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.buckets import SHORT, bucket_store
from tools.bucket_emulator import Faults
from uirl_jax.errors import ConfigError, LeaseHeldError
from uirl_jax.store import counted_lease, lease
from uirl_jax.store.bucket import BucketStore

ROOT = Path(__file__).parents[1]
NAME = "learner.lock"


@pytest.fixture
def opened(monkeypatch):
    with bucket_store("gs", monkeypatch) as (store, service):
        yield store, service


def another(times=SHORT) -> BucketStore:
    """The store of another host: nothing is shared but the bucket."""
    return BucketStore("gs://runs/run", poll_s=0.0, times=times)


def elsewhere(monkeypatch) -> None:
    """From here on this process looks like one of another host."""
    monkeypatch.setattr(counted_lease, "_this_process", lambda: "other-boot pid:[1] 7 7")


def no_loss() -> None:
    raise AssertionError("the lease was lost")


def test_claim_of_a_held_lease_is_refused_with_its_holder_once_it_is_renewed(opened):
    store, _ = opened
    mine = store.claim(NAME, "me")
    with (
        lease.renewed(mine, no_loss, every_s=0.1),
        pytest.raises(LeaseHeldError, match="me"),
    ):
        another().claim(NAME, "other")
    theirs = another().claim(NAME, "other")  # released: at once
    assert theirs.generation == mine.generation + 1 == 2
    with pytest.raises(LeaseHeldError):
        store.fence(NAME)


def test_claim_of_a_lease_that_is_not_renewed_waits_for_its_expiry(opened):
    store, service = opened
    mine = store.claim(NAME, "me")
    started_s = time.monotonic()
    theirs = another().claim(NAME, "other")
    assert SHORT.expiry_s <= time.monotonic() - started_s < 3 * SHORT.expiry_s
    assert theirs.generation == 2
    for call in (mine.renew, mine.check, lambda: store.fence(NAME)):
        with pytest.raises(LeaseHeldError):
            call()
    mine.release()  # takes nothing away from the other
    theirs.renew()
    assert json.loads(service.objects("runs")["run/leases/learner.lock"])["holder"] == "other"


def test_holder_gives_up_before_another_may_take_the_lease(opened):
    store, service = opened
    lost = threading.Event()
    with lease.renewed(store.claim(NAME, "me"), lost.set, every_s=0.05):
        time.sleep(SHORT.give_up_s * 1.2)
        assert not lost.is_set()
        started_s = time.monotonic()
        service.set_faults(unavailable=1.0)  # the network is cut
        assert lost.wait(5)
        assert time.monotonic() - started_s < SHORT.expiry_s
        service.set_faults()


def test_renewal_goes_on_while_a_check_reads_slowly(opened, monkeypatch):
    store, service = opened
    held = store.claim(NAME, "me")
    has_read, renewed = threading.Event(), threading.Event()
    faults: list[Exception] = []
    read_version = store.read_version

    def read_slowly(name: str, **options: bool) -> tuple[bytes, str]:
        found = read_version(name, **options)
        has_read.set()
        renewed.wait(20)
        return found

    def check() -> None:
        try:
            held.check()
        except Exception as error:
            faults.append(error)

    monkeypatch.setattr(store, "read_version", read_slowly)
    checking = threading.Thread(target=check)
    checking.start()
    assert has_read.wait(20)
    started_s = time.monotonic()
    held.renew()
    assert time.monotonic() - started_s < 10  # not after the read
    renewed.set()
    checking.join()
    assert not faults
    service.reset()
    held.renew()  # with the version of the first renewal, not the older one that was read
    assert service.counters()["requests"] == {"put": 1}


def test_holder_that_was_killed_on_this_host_is_replaced_at_once(opened, monkeypatch):
    _, service = opened
    code = """
import os, signal
from uirl_jax.store.bucket import BucketStore
BucketStore("gs://runs/run").claim("learner.lock", "killed")
os.kill(os.getpid(), signal.SIGKILL)
"""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    store = BucketStore("gs://runs/run")  # with the real minute
    started_s = time.monotonic()
    assert store.claim(NAME, "me").generation == 2
    assert time.monotonic() - started_s < 5


FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")
MISSING = FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize("stat", [None, FORBIDDEN, MISSING])
def test_living_holder_of_another_user_is_not_taken_for_dead(monkeypatch, stat):
    """What /proc refuses of its process; with `hidepid` it looks as if there was none."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        boot, namespace, _, _ = counted_lease._this_process().split()
        number, _, start = counted_lease._stat(str(living.pid))
        holder = f"{boot} {namespace} {number} {start}"
        assert not counted_lease._is_dead(holder)
        readlink = os.readlink

        def refuse(error: OSError, others: Callable[..., Any], *names: Any) -> Any:
            if str(living.pid) in str(names[0]):
                raise error
            return others(*names)

        def opened(path: Any, **how: Any) -> Any:
            return refuse(stat, lambda name: open(name, **how), path) if stat else open(path, **how)

        with monkeypatch.context() as patch:
            patch.setattr(os, "readlink", lambda path: refuse(FORBIDDEN, readlink, path))
            patch.setattr(counted_lease, "open", opened, raising=False)
            patch.setattr(os, "kill", lambda pid, _: refuse(FORBIDDEN, int, pid))
            assert not counted_lease._is_dead(holder)
        living.kill()
        os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
        assert counted_lease._is_dead(holder)  # killed, and not waited for yet
    assert counted_lease._is_dead(holder)
    own = counted_lease._this_process()
    assert not counted_lease._is_dead(own) and counted_lease._is_dead(f"{own}1")
    assert not counted_lease._is_dead(f"{boot} {namespace} {'9' * 30} 1")  # not an id


def test_holder_of_another_host_is_not_taken_for_dead(opened, monkeypatch):
    store, _ = opened
    with monkeypatch.context() as patch:
        elsewhere(patch)
        store.claim(NAME, "there")
    started_s = time.monotonic()
    another().claim(NAME, "me")
    assert time.monotonic() - started_s >= SHORT.expiry_s


def test_clocks_that_differ_by_an_hour_change_nothing(opened, monkeypatch):
    store, _ = opened
    held = store.claim(NAME, "me")
    real_s = time.time
    with lease.renewed(held, no_loss, every_s=0.05):
        for hours in (-1, 1):
            monkeypatch.setattr(time, "time", lambda hours=hours: real_s() + 3600 * hours)
            with pytest.raises(LeaseHeldError):
                another().claim(NAME, "other")


@pytest.mark.parametrize("seed", range(3))
def test_lease_outlives_lost_answers_and_false_conflicts(monkeypatch, seed):
    faults = Faults(lost_answer=0.3, false_conflict=0.2, unavailable=0.1, seed=seed)
    times = counted_lease.LeaseTimes(expiry_s=20.0, give_up_s=15.0, request_s=4.0)
    with bucket_store("gs", monkeypatch, faults=faults, times=times) as (store, _):
        held = store.claim(NAME, "me")
        for _ in range(10):
            held.renew()
            assert store.fence(NAME) == 1
        # More than once: the other's first look may be late, and it has to see a change.
        with (
            lease.renewed(held, no_loss, every_s=0.3),
            pytest.raises(ConfigError, match="a learner is running there"),
            lease.only_learner(another(LOOK_OFTEN), no_loss),
        ):
            pass


LOOK_OFTEN = counted_lease.LeaseTimes(expiry_s=20.0, give_up_s=15.0, request_s=4.0, look_s=0.05)


def test_is_alive_watches_without_taking_and_costs_one_listing(opened):
    store, service = opened
    watching = another()
    assert not lease.is_alive(watching, "a0")
    held = [store.claim(f"actor-a{n}.lock", f"a{n}") for n in range(20)]
    time.sleep(SHORT.sight_s)
    service.reset()
    assert all(lease.is_alive(watching, f"a{n}") for n in range(20))
    assert service.counters()["requests"] == {"list": 1}
    for _ in range(8):
        time.sleep(SHORT.expiry_s / 4)
        held[0].renew()
        assert lease.is_alive(watching, "a0")
    assert not lease.is_alive(watching, "a1")  # was not renewed
    held[0].renew()


def test_content_that_is_no_lease_is_refused(opened):
    store, _ = opened
    store.put("leases/learner.lock", b"\xff{}")
    with pytest.raises(OSError, match="is not a lease; delete it"):
        store.claim(NAME, "me")


def test_twenty_races_of_two_have_one_winner_each(opened, monkeypatch):
    store, _ = opened
    for race in range(20):
        start, results = threading.Barrier(2), []

        def take(which: BucketStore, race: int = race, start=start, results=results) -> None:
            start.wait()
            try:
                held = which.claim(f"learner-{race}.lock", "somebody")
            except LeaseHeldError:
                return
            results.append(held)

        threads = [threading.Thread(target=take, args=(which,)) for which in (store, another())]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for held in list(results):
                held.renew()
            time.sleep(0.02)
        assert len(results) == 1
