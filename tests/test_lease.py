"""One learner a workdir and one process an actor number, for as long as it lives and no longer."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import killed
from uirl_jax.errors import ConfigError, LeaseHeldError
from uirl_jax.store import lease, open_store
from uirl_jax.store.lease import only_actor, only_learner

ROOT = Path(__file__).parents[1]


def no_loss() -> None:
    raise AssertionError("the lease was lost")


def test_only_learner_holds_no_longer_than_its_process_lives(tmp_path):
    code = f"""
import time
from uirl_jax.store import lease, open_store
with lease.only_learner(open_store({str(tmp_path)!r}), print):
    print('held', flush=True)
    time.sleep(60)
"""
    store = open_store(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    with killed(holder):
        assert holder.stdout.readline() == b"held\n"
        held = pytest.raises(ConfigError, match=f"process {holder.pid} on ")
        with held, only_learner(store, no_loss):
            pass
        holder.send_signal(signal.SIGSTOP)  # stopped is not dead
        with held, only_learner(store, no_loss):
            pass
        holder.kill()
        holder.wait()
        for _ in range(2):
            with only_learner(store, no_loss):
                assert f"process {os.getpid()} " in (tmp_path / "learner.lock").read_text()


def test_only_actor_of_a_number_is_alone_and_others_are_not_disturbed(tmp_path):
    store = open_store(tmp_path)
    with only_actor(store, "a0", no_loss), only_actor(store, "a1", no_loss):
        said = r"actor a0 is running there .*give each actor another --actor"
        with pytest.raises(ConfigError, match=said), only_actor(store, "a0", no_loss):
            pass
    with only_actor(store, "a0", no_loss):
        pass


def test_renew_after_the_lock_file_was_deleted_claims_it_again(tmp_path):
    store = open_store(tmp_path)
    mine = store.claim("learner.lock", "me")
    (tmp_path / "learner.lock").unlink()
    mine.renew()
    with pytest.raises(LeaseHeldError, match="me"):
        store.claim("learner.lock", "other")
    mine.release()
    store.claim("learner.lock", "other").release()


def test_renewed_lease_that_another_process_took_is_lost_and_said_so(tmp_path):
    store, lost = open_store(tmp_path), threading.Event()
    with lease.renewed(store.claim("learner.lock", "me"), lost.set, every_s=0.01):
        assert not lost.wait(0.1)
        other = None
        while other is None:  # deleted by hand, by somebody who took it for a leftover
            (tmp_path / "learner.lock").unlink()
            with contextlib.suppress(LeaseHeldError):  # the renewal was faster
                other = store.claim("learner.lock", "other")
        assert lost.wait(10)
        with pytest.raises(LeaseHeldError, match="other"):
            store.claim("learner.lock", "third")
    other.release()


def test_renewed_lease_outlives_a_storage_that_is_away_for_a_moment(tmp_path):
    class Away:
        renewals = 0
        released = False

        def renew(self) -> None:
            self.renewals += 1
            raise OSError(5, "Input/output error")

        def release(self) -> None:
            self.released = True

    away = Away()
    with lease.renewed(away, no_loss, every_s=0.01):
        while away.renewals < 3:
            pass
    assert away.released


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def full_disk(descriptor: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_whether_an_actor_is_alive_is_found_out_without_writing(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    assert not lease.is_alive(store, "a0")
    assert list(tmp_path.iterdir()) == []
    with only_actor(store, "a0", no_loss):
        assert lease.is_alive(store, "a0")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    before, opened = file.read_bytes(), descriptors()
    monkeypatch.setattr(os, "write", full_disk)
    assert before and not lease.is_alive(store, "a0")
    assert file.read_bytes() == before and descriptors() == opened


def test_claim_on_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    store, opened = open_store(tmp_path), descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space left"):
            store.claim("learner.lock", "me")
    assert descriptors() == opened
    store.claim("learner.lock", "other").release()
