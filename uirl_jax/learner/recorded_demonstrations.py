"""Recorded episodes as trajectories for supervised steps: of people, or of an earlier run's policy.

Reads folders of shard files: of `tools.record_demo`, or a run's kept/ and shards/ (expert
iteration: a policy's own successes become supervised data of the next base). They may have been
recorded with another model, prompt or context: the trajectories are encoded again in this run's
action format and tokens. Those that this run's base sampled keep their tokens, thoughts included.
"""

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from uirl_jax.demonstrations.recording import reads_alike, retell
from uirl_jax.errors import ActionError, ConfigError, ImageError, ShardError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.seeds import EVAL_SEEDS, TUNE_SEEDS
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import TaskSpec, Trajectory


class Recorded(NamedTuple):
    """A record of a folder, and where it is from."""

    trajectory: Trajectory
    base_hash: str  # of the model that sampled it; empty: nobody did
    path: Path


def load(
    folders: Sequence[str],
    chat: Chat,
    inputs: Inputs,
    *,
    base_hash: str = "",
    keep_shortest: int = 0,
) -> list[Trajectory]:
    """The demonstrations below the folders, sorted by file name within each folder.

    Args:
      base_hash: of the run's model; what it sampled itself keeps its tokens.
      keep_shortest: 0: all records, whether they solved the task or not. Otherwise as
        `shortest_successes`.
    Raises:
      ConfigError: a folder without demonstrations, files that cannot be read, actions that this
        run's action format cannot express, or no success to keep; all faults together.
    """
    found: list[Recorded] = []
    demonstrations, faults = [], []
    for folder in folders:
        paths = _shards(folder)
        if not paths:
            faults.append(_none_in(folder))
        for path in paths:
            try:
                header, records = read_shard(path)
            except ShardError as error:
                faults.append(str(error))
                continue
            found += [Recorded(record, header.base_hash, path) for record in records]
            if keep_shortest:  # after each file: a run's screenshots do not fit in memory together
                found = shortest_successes(found, keep_shortest)
    if keep_shortest and not found and not faults:
        faults.append(f"{', '.join(folders)}: no success on an instance that is not held out")
    for trajectory, recorded_by, path in found:
        try:
            is_own = bool(base_hash) and recorded_by == base_hash
            keep_words = is_own and reads_alike(trajectory, chat, inputs)
            demonstrations.append(retell(trajectory, chat, inputs, keep_words=keep_words))
        except (ActionError, ImageError) as error:
            faults.append(f"{path}: {error}")
    if faults:
        raise ConfigError("cold_start.demonstrations: " + "; ".join(faults))
    return demonstrations


def check_folders(folders: Sequence[str]) -> None:
    """Checks that each folder has demonstrations, without reading them. Raises: ConfigError."""
    if faults := [_none_in(folder) for folder in folders if not _shards(folder)]:
        raise ConfigError("cold_start.demonstrations: " + "; ".join(faults))


def _shards(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*.tfrecord") if path.name[0] != ".")


def _none_in(folder: str) -> str:
    return f"{folder}: no *.tfrecord there; python -m tools.record_demo writes them"


def shortest_successes(found: Iterable[Recorded], count: int) -> list[Recorded]:
    """The solved episodes, at most `count` of a task instance: fewest turns, then tokens, first.

    Left out are held-out and tuning instances, and second copies of an episode, as in replay/.
    An instance is a task with an instruction: grounding data asks several questions of a screen.
    """
    solved = {
        one.trajectory.episode_id: one
        for one in found
        if one.trajectory.success
        and not any(one.trajectory.task.seed in seeds for seeds in (EVAL_SEEDS, TUNE_SEEDS))
    }
    kept: list[Recorded] = []
    taken: collections.Counter[tuple[TaskSpec, str]] = collections.Counter()
    for one in sorted(solved.values(), key=lambda one: one.trajectory.length):
        instance = (one.trajectory.task, one.trajectory.instruction)
        if taken[instance] < count:
            taken[instance] += 1
            kept.append(one)
    return kept


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
