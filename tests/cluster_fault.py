"""`python -m uirl_jax.main` that an environment variable disturbs.

THROWS_IN="1 3": process 1 throws in step 3.
STOPPED_IN=4: step 4 does not begin before process 0 knows that the run is to stop.
HELD_IN="4 FILE": nor before there is such a file.
SAVE_FAILS_AT=3: the storage fails process 0 when it commits the checkpoint of step 3.
"""

import os
import sys
import threading
import time
from pathlib import Path

import jax
from absl import app
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from uirl_jax import main
from uirl_jax.actor import processes
from uirl_jax.config import reading
from uirl_jax.learner import algorithm
from uirl_jax.learner.cluster import Cluster

tell = Cluster.tell
stop_is_told = threading.Event()
update = algorithm.update
finalize = AtomicRenameTemporaryPath.finalize


def disturbed(*args, **options):
    process, step = map(int, os.environ.get("THROWS_IN", "0 0").split())
    state = options["state"] if "state" in options else args[4]
    if jax.process_index() == process and int(state.step) + 1 == step:
        raise KeyError("this process throws")
    if jax.process_index() == 0 and str(int(state.step) + 1) == os.environ.get("STOPPED_IN"):
        assert stop_is_told.wait(60)
    held_in, _, file = os.environ.get("HELD_IN", "").partition(" ")
    if jax.process_index() == 0 and str(int(state.step) + 1) == held_in:
        while not Path(file).exists():
            time.sleep(0.01)
    return update(*args, **options)


def telling(self: Cluster, key: str, text: str) -> None:
    tell(self, key, text)
    if key == "stop":
        stop_is_told.set()


async def failing(self: AtomicRenameTemporaryPath) -> None:
    if self.get_final().name == os.environ.get("SAVE_FAILS_AT"):
        raise OSError("the storage does not answer")
    await finalize(self)


if __name__ == "__main__":
    algorithm.update = disturbed
    Cluster.tell = telling
    # Of the child, where a parent is asked for.
    processes.command_of_this_process = lambda: [
        *(sys.executable, "-m", "tests.cluster_fault", *sys.argv[1:])
    ]
    AtomicRenameTemporaryPath.finalize = failing
    app.run(main.main, flags_parser=reading.parse_flags)
