"""Checkpoints in an emulated bucket: exact, set aside there when damaged, whole after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from orbax.checkpoint import CheckpointManager

from tests.buckets import point_to
from tests.test_checkpoints import ABSTRACT, assert_same, make_state
from tools.bucket_emulator import Emulator, emulator
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import CheckpointError, CheckpointUnavailableError
from uirl_jax.store import StoreUnavailableError
from uirl_jax.store.bucket import BucketStore

ROOT = Path(__file__).parents[1]
DIRECTORY = "gs://runs/run/checkpoints"


@pytest.fixture(scope="module")
def module_service():
    """One for all tests: gcsfs keeps its connection for as long as the process lives."""
    with pytest.MonkeyPatch.context() as patch, emulator() as running:
        point_to(running, patch)
        yield running


@pytest.fixture
def service(module_service):
    yield module_service
    for name in names(module_service, ""):
        module_service.drop("runs", name)


def save(*steps: int) -> None:
    with Checkpointer(DIRECTORY) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), {"step": step})


def names(service: Emulator, step: str) -> list[str]:
    prefix = f"run/checkpoints/{step}"
    return [name for name in service.objects("runs") if name.startswith(prefix)]


def truncate_all(service: Emulator) -> None:
    for name in names(service, "3/"):
        if not name.endswith("commit_success.txt"):
            service.damage("runs", name, service.objects("runs")[name][:-1])


def drop_arrays(service: Emulator) -> None:
    for name in names(service, "3/arrays/"):
        service.drop("runs", name)


def flip_arrays(service: Emulator) -> None:
    for name in names(service, "3/arrays/"):
        content = service.objects("runs")[name]
        if "/d/" in name:
            flipped = bytes([content[len(content) // 2] ^ 8])
            half = len(content) // 2
            service.damage("runs", name, content[:half] + flipped + content[half + 1 :])


def edit_meta(service: Emulator) -> None:
    name = "run/checkpoints/3/meta/metadata"
    service.damage("runs", name, service.objects("runs")[name].replace(b'"step"', b'"stop"'))


def test_save_and_restore_in_a_bucket_is_exact_and_keeps_three(service):
    save(1, 2, 3, 4)
    with Checkpointer(DIRECTORY) as checkpointer:
        assert checkpointer.steps() == [2, 3, 4]
        restored = checkpointer.restore_latest(ABSTRACT)
    assert restored.step == 4 and restored.meta == {"step": 4} and restored.skipped == []
    assert_same(restored.arrays, make_state(4))
    assert names(service, "1/") == []


@pytest.mark.parametrize("damage", [truncate_all, drop_arrays, flip_arrays, edit_meta])
def test_damaged_newest_step_in_a_bucket_is_set_aside_there_and_saved_again(service, damage):
    save(1, 2, 3)
    damage(service)
    left = [name.partition("checkpoints/3/")[2] for name in names(service, "3/")]
    with Checkpointer(DIRECTORY, read_only=True) as checkpointer:
        assert checkpointer.restore_latest(ABSTRACT).step == 2
    assert names(service, "damaged") == []
    with Checkpointer(DIRECTORY) as checkpointer:
        restored = checkpointer.restore_latest(ABSTRACT)
        assert restored.step == 2 and len(restored.skipped) == 1
        assert_same(restored.arrays, make_state(2))
        assert checkpointer.steps() == [1, 2]
        checkpointer.save(3, make_state(33), {"step": 3})
    moved = names(service, "damaged/3-")
    assert sorted(name.split("/", 4)[4] for name in moved) == sorted(left)
    with Checkpointer(DIRECTORY) as checkpointer:
        assert_same(checkpointer.restore_latest(ABSTRACT).arrays, make_state(33))


def test_step_that_a_bucket_does_not_give_at_once_is_read_again(service, monkeypatch):
    save(1, 2)
    restore, asked = CheckpointManager.restore, []

    def restore_later(*args, **options):
        asked.append(args[1])
        if len(asked) == 1:
            raise ValueError("UNAVAILABLE: the service does not answer")
        return restore(*args, **options)

    with Checkpointer(DIRECTORY) as checkpointer:
        monkeypatch.setattr(CheckpointManager, "restore", restore_later)
        restored = checkpointer.restore_latest(ABSTRACT)
        assert (restored.step, restored.skipped, asked) == (2, [], [2, 2, 2])
        assert_same(restored.arrays, make_state(2))

        def away(*args):
            raise StoreUnavailableError(5, "away")

        asked.clear()
        monkeypatch.setattr(BucketStore, "names", away)
        with pytest.raises(CheckpointUnavailableError, match=r"/2: cannot be read now: .*away"):
            checkpointer.restore_latest(ABSTRACT)
        assert checkpointer.steps() == [1, 2]


@pytest.mark.slow  # gcsfs waits for seconds before it tries again
def test_saves_with_faults_of_the_service_are_committed_whole(service):
    service.set_faults(too_many=0.02, internal=0.02, unavailable=0.02, seed=3)
    save(1, 2, 3)
    service.set_faults()
    with Checkpointer(DIRECTORY) as checkpointer:
        assert_same(checkpointer.restore_latest(ABSTRACT).arrays, make_state(3))


def test_learner_killed_while_it_saves_leaves_the_committed_steps(service):
    code = f"""
import jax
from tests.test_checkpoints import make_state
from uirl_jax.checkpoints import Checkpointer
with Checkpointer({DIRECTORY!r}) as checkpointer:
    step = checkpointer.steps()[-1] if checkpointer.steps() else 0
    while True:
        step += 1
        checkpointer.save(step, make_state(step), {{"step": step}})
        print(step, flush=True)
"""
    env = {**os.environ, **service.environment, "PYTHONPATH": str(ROOT)}
    for kill in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
        ) as process:
            for _ in range(2):
                told = int(process.stdout.readline())
            time.sleep(0.05 + 0.04 * kill)
            process.send_signal(signal.SIGKILL)
        with Checkpointer(DIRECTORY) as checkpointer:
            restored = checkpointer.restore_latest(ABSTRACT)
        assert restored.step >= told and restored.skipped == []
        assert_same(restored.arrays, make_state(restored.step))


def test_s3_is_refused_for_checkpoints():
    with pytest.raises(CheckpointError, match="checkpoints are written to gs:// or a directory"):
        Checkpointer("s3://runs/run/checkpoints")


def test_bucket_without_gcsfs_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install -e '\.\[gcs\]'"):
        Checkpointer(DIRECTORY)
