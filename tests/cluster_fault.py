"""`python -m uirl_jax.main` in which one process fails, as an environment variable says.

THROWS_IN="1 3": process 1 throws in step 3.
SAVE_FAILS_AT=3: the storage fails process 0 when it commits the checkpoint of step 3.
"""

import os

import jax
from absl import app
from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath

from uirl_jax import main
from uirl_jax.config import reading
from uirl_jax.learner import algorithm

update = algorithm.update
finalize = AtomicRenameTemporaryPath.finalize


def throwing(*args, **options):
    process, step = map(int, os.environ.get("THROWS_IN", "0 0").split())
    state = options["state"] if "state" in options else args[4]
    if jax.process_index() == process and int(state.step) + 1 == step:
        raise KeyError("this process throws")
    return update(*args, **options)


async def failing(self: AtomicRenameTemporaryPath) -> None:
    if self.get_final().name == os.environ.get("SAVE_FAILS_AT"):
        raise OSError("the storage does not answer")
    await finalize(self)


if __name__ == "__main__":
    algorithm.update = throwing
    AtomicRenameTemporaryPath.finalize = failing
    app.run(main.main, flags_parser=reading.parse_flags)
