"""Demonstrations recorded by people (tools.record_demo), as trajectories for supervised steps.

Reads a folder of shard files and re-encodes the trajectories in the run's own action format and
tokens, so they may have been recorded with another model, prompt or context. All saved
demonstrations are used, whether they solved the task or not.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from uirl_jax.demonstrations.recording import retell
from uirl_jax.errors import ActionError, ConfigError, ImageError, ShardError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Trajectory


def load(folders: Sequence[str], chat: Chat, inputs: Inputs) -> list[Trajectory]:
    """All demonstrations below the folders, sorted by file name within each folder.

    Raises:
      ConfigError: a folder without demonstrations, files that cannot be read, or actions that this
        run's action format cannot express; all faults together.
    """
    demonstrations, faults = [], []
    for folder in map(Path, folders):
        paths = sorted(path for path in folder.rglob("*.tfrecord") if not path.name.startswith("."))
        if not paths:
            faults.append(f"{folder}: no *.tfrecord there; python -m tools.record_demo writes them")
        for path in paths:
            try:
                demonstrations += [retell(record, chat, inputs) for record in read_shard(path)[1]]
            except ShardError as error:
                faults.append(str(error))
            except (ActionError, ImageError) as error:
                faults.append(f"{path}: {error}")
    if faults:
        raise ConfigError("cold_start.demonstrations: " + "; ".join(faults))
    return demonstrations


def describe(demonstrations: Sequence[Trajectory]) -> str:
    solved = sum(demonstration.success for demonstration in demonstrations)
    turns = sum(len(demonstration.turns) for demonstration in demonstrations)
    tasks = sorted({demonstration.task.name for demonstration in demonstrations})
    return (
        f"cold start: {len(demonstrations)} recorded demonstrations, {solved} of them solved, "
        f"{turns} turns; tasks: {', '.join(tasks)}"
    )


def pick(demonstrations: Sequence[Trajectory], index: int, seed: int) -> Trajectory:
    """The index-th episode to train on: each once per epoch, every epoch in another order."""
    epoch, position = divmod(index, len(demonstrations))
    order = np.random.default_rng([seed, epoch]).permutation(len(demonstrations))
    return demonstrations[order[position]]
