"""Temporary folders: held while their process lives, removed by another one after it."""

import subprocess
import sys
import tempfile

import pytest

from tests.processes import killed
from uirl_jax.store.temporary import HeldFolder, remove_abandoned

HOLDER = """
import sys, time
from uirl_jax.store.temporary import HeldFolder
held = HeldFolder("held-")
print(held.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_is_removed_once_its_process_is_killed(folder):
    (folder / "held-no-lock").mkdir()  # one that is being made
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    with killed(process):
        of_process = process.stdout.readline().strip()
        mine = HeldFolder("held-")
        remove_abandoned("held-")
        left = {path.name for path in folder.iterdir()}
        assert left == {mine.path.name, of_process.rpartition("/")[2], "held-no-lock"}
    remove_abandoned("other-")
    assert {path.name for path in folder.iterdir()} == left
    remove_abandoned("held-")
    assert {path.name for path in folder.iterdir()} == {mine.path.name, "held-no-lock"}
    mine.remove()


def test_folder_that_is_given_up_is_gone(folder):
    held = HeldFolder("held-")
    held.remove()
    assert not list(folder.iterdir())
