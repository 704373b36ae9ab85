"""Held-out tasks in, one stage's success out: each task is played once and counted.

The caller hands in how tasks are run (an actor with the policy of the stage). This module starts no
session, samples nothing and imports neither actor nor learner. `seeds` decides where held-out seeds
come from.
"""

import dataclasses
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from uirl_jax.errors import UirlError
from uirl_jax.evaluation.results import EPISODES_FILE, EVAL_DIR, write_json
from uirl_jax.evaluation.statistics import EvalResult, count
from uirl_jax.seeds import eval_seed
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import StopReason, TaskSpec, Trajectory

KEPT_EPISODES = 12

RunTasks = Callable[[Sequence[TaskSpec]], Sequence[Trajectory] | Awaitable[Sequence[Trajectory]]]

_STAGE = re.compile(r"[a-z0-9_]{1,64}")
_RUN_SEED_STRIDE = 100_000  # instances that one evaluation may have


def eval_tasks(kinds: Sequence[TaskSpec], n: int, seed: int = 0) -> list[TaskSpec]:
    """n held-out instances, the kinds in turn; none of them can come up in training.

    Args:
        kinds: name, variant and max_turns of each; their own seeds do not matter.
        seed: another one gives other instances, as held-out as these.
    Raises: ValueError for no kind, or more than 100,000 instances.
    """
    if not kinds or not 0 <= n <= _RUN_SEED_STRIDE:
        raise ValueError(f"{n} instances of {len(kinds)} tasks; at most {_RUN_SEED_STRIDE}")
    first = seed * _RUN_SEED_STRIDE
    return [
        dataclasses.replace(kinds[idx % len(kinds)], seed=eval_seed(first + idx))
        for idx in range(n)
    ]


async def evaluate(
    run_tasks: RunTasks,
    tasks: Sequence[TaskSpec],
    stage: str,
    workdir: str | os.PathLike[str],
    *,
    base_hash: str,
    layout: TokenLayout,
    keep: int = KEPT_EPISODES,
) -> EvalResult:
    """Runs every task once, counts, and writes `eval/<stage>.json` and a few episodes beside it.

    Args:
        run_tasks: tasks -> their trajectories, in any order; a coroutine function or a plain one.
            An episode that ended in env_error may be followed by another one of the same task.
        stage: "before", "cold_start", "after": names the files.
        base_hash, layout: of the model that sampled, for the header of the kept episodes.
        keep: how many tasks' episodes are kept; the first ones, so that stages show the same tasks.
    Raises:
        UirlError: the disk is full.
        ValueError: a trajectory of a task that was not asked for, or too many of one that was.
    """
    if not _STAGE.fullmatch(stage):
        raise ValueError(f"stage {stage!r}: expected 1 to 64 of a-z 0-9 _, it names a file")
    outcome = run_tasks(tasks)
    trajectories = await outcome if inspect.isawaitable(outcome) else outcome
    result = count(stage, tasks, trajectories)
    directory = Path(workdir) / EVAL_DIR / stage
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UirlError(f"{directory}: cannot be made ({error.strerror})") from error
    attempts = {t.task: t for t in trajectories if t.stop_reason is not StopReason.ENV_ERROR}
    kept = [attempts[task] for task in tasks if task in attempts][:keep]
    if kept:
        write_shard(directory / EPISODES_FILE, kept, base_hash=base_hash, layout=layout)
    # Last: a stage whose JSON is there is complete, and is not evaluated again after a restart.
    write_json(directory.with_suffix(".json"), dataclasses.asdict(result))
    return result
