"""What people demonstrated (tools.record_demo), as trajectories for this run's supervised steps.

A folder of shard files in, trajectories out, told again in the run's own action format and tokens:
the model, prompt and context that they were recorded under need not be the run's. What was saved is
learnt from, solved or not; whoever recorded it had the choice.
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
    """All demonstrations below the folders, in the order of their files' names.

    Raises:
      ConfigError: a folder without any, or files that are none or hold what this run's action
        format cannot say; all of them at once.
    """
    told, faults = [], []
    for folder in map(Path, folders):
        paths = sorted(path for path in folder.rglob("*.tfrecord") if not path.name.startswith("."))
        if not paths:
            faults.append(f"{folder}: no *.tfrecord there; python -m tools.record_demo writes them")
        for path in paths:
            try:
                told += [retell(one, chat, inputs) for one in read_shard(path)[1]]
            except ShardError as error:
                faults.append(str(error))
            except (ActionError, ImageError) as error:
                faults.append(f"{path}: {error}")
    if faults:
        raise ConfigError("cold_start.demonstrations: " + "; ".join(faults))
    return told


def describe(demonstrations: Sequence[Trajectory]) -> str:
    solved = sum(one.success for one in demonstrations)
    turns = sum(len(one.turns) for one in demonstrations)
    tasks = sorted({one.task.name for one in demonstrations})
    return (
        f"cold start: {len(demonstrations)} recorded demonstrations, {solved} of them solved, "
        f"{turns} turns, of {', '.join(tasks)}"
    )


def pick(demonstrations: Sequence[Trajectory], index: int, seed: int) -> Trajectory:
    """The index-th episode to learn from: every one once, then every one once in another order."""
    pass_number, place = divmod(index, len(demonstrations))
    order = np.random.default_rng([seed, pass_number]).permutation(len(demonstrations))
    return demonstrations[order[place]]
