"""`python -m uirl_jax.main` in which one process throws: THROWS_IN="1 3" is process 1 in step 3."""

import os

import jax
from absl import app

from uirl_jax import main
from uirl_jax.config import reading
from uirl_jax.learner import algorithm

update = algorithm.update


def throwing(*args, **options):
    process, step = map(int, os.environ["THROWS_IN"].split())
    if jax.process_index() == process and int(args[4].step) + 1 == step:
        raise KeyError("this process throws")
    return update(*args, **options)


if __name__ == "__main__":
    algorithm.update = throwing
    app.run(main.main, flags_parser=reading.parse_flags)
