"""Runs the held-out or tuning tasks of one stage, once each, and counts successes.

The caller passes the function that runs tasks (an actor with the policy of the stage). This module
starts no sessions, samples nothing and imports neither actor nor learner. `seeds` defines the
seeds of both.
"""

import collections
import dataclasses
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

from uirl_jax.errors import UirlError
from uirl_jax.evaluation.results import EPISODES_FILE, EVAL_DIR, write_json
from uirl_jax.evaluation.statistics import EvalResult, count
from uirl_jax.seeds import eval_seed, tune_seed
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers.recorded.rewards import PREFIX as RECORDED

KEPT_EPISODES = 12  # those of the first tasks, so that all stages keep the same tasks

InstanceSeeds = Literal["held_out", "tuning"]
RunTasks = Callable[[Sequence[TaskSpec]], Sequence[Trajectory] | Awaitable[Sequence[Trajectory]]]

STAGE_NAME = re.compile(r"[a-z0-9_]{1,64}")
_RUN_SEED_STRIDE = 100_000  # maximum number of instances in one evaluation


def eval_tasks(
    kinds: Sequence[TaskSpec], n: int, seed: int = 0, seeds: InstanceSeeds = "held_out"
) -> list[TaskSpec]:
    """n instances, alternating between the kinds; training never draws their seeds.

    Args:
        kinds: name, variant and max_turns of each; their seeds are ignored.
        seed: selects another set of instances.
        seeds: which of the two ranges they are from.
    Raises: ValueError: no kind, or more than 100,000 instances.
    """
    if not kinds or not 0 <= n <= _RUN_SEED_STRIDE:
        raise ValueError(f"{n} instances of {len(kinds)} tasks; at most {_RUN_SEED_STRIDE}")
    first = seed * _RUN_SEED_STRIDE
    seed_of = {"held_out": eval_seed, "tuning": tune_seed}[seeds]
    tasks = []
    so_far: collections.Counter[TaskSpec] = collections.Counter()
    for idx in range(n):
        kind = kinds[idx % len(kinds)]
        # Recorded rows are played in the order of their seeds: a kind leaves out none of its own.
        number = so_far[kind] if kind.name.startswith(RECORDED) else idx
        so_far[kind] += 1
        tasks.append(dataclasses.replace(kind, seed=seed_of(first + number)))
    return tasks


async def evaluate(
    run_tasks: RunTasks,
    tasks: Sequence[TaskSpec],
    stage: str,
    workdir: str | os.PathLike[str],
    *,
    base_hash: str,
    layout: TokenLayout,
) -> EvalResult:
    """Runs every task once, counts, and writes `eval/<stage>.json` and a few episodes.

    Args:
        run_tasks: tasks -> their trajectories, in any order; a coroutine function or a plain one.
            It may return env_error episodes in addition to a later episode of the same task.
        stage: "before", "cold_start", "after": the name of the files.
        base_hash, layout: of the model that sampled, for the header of the kept episodes.
    Raises:
        UirlError: the disk is full.
        ValueError: a trajectory of a task that is not in `tasks`, or several of one task.
    """
    if not STAGE_NAME.fullmatch(stage):
        raise ValueError(f"stage {stage!r}: expected 1 to 64 of a-z 0-9 _, for a file name")
    outcome = run_tasks(tasks)
    trajectories = await outcome if inspect.isawaitable(outcome) else outcome
    result = count(stage, tasks, trajectories)
    directory = Path(workdir) / EVAL_DIR / stage
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UirlError(f"{directory}: cannot be created ({error.strerror})") from error
    attempts = {t.task: t for t in trajectories if t.stop_reason is not StopReason.ENV_ERROR}
    kept = [attempts[task] for task in tasks if task in attempts][:KEPT_EPISODES]
    if kept:
        write_shard(directory / EPISODES_FILE, kept, base_hash=base_hash, layout=layout)
    # Written last: a stage with a JSON file is complete and is not evaluated again.
    write_json(directory.with_suffix(".json"), dataclasses.asdict(result))
    return result
