"""Held-out tasks in, success with its uncertainty out: for each stage of a run, and for all of it.

`main` hands in how tasks are run (an actor with the policy of the stage) and gets an `EvalResult`;
the same numbers go to `eval/<stage>.json`, a few of the episodes to
`eval/<stage>/episodes.tfrecord`, and the run's outcome to `summary.json`. It starts no session,
samples nothing and imports neither actor nor learner. Where held-out seeds come from is decided in
`seeds`.
"""

import collections
import dataclasses
import inspect
import json
import os
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.seeds import eval_seed
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.store import open_store
from uirl_jax.store.files import write_atomically
from uirl_jax.types import StopReason, TaskSpec, Trajectory

EVAL_DIR = "eval"
EPISODES_FILE = "episodes.tfrecord"
SUMMARY_FILE = "summary.json"
CHANCE = "random"  # the stage that no policy plays
RUN_STAGES = (CHANCE, "before", "cold_start", "after")  # that a run measures by itself
KEPT_EPISODES = 12
FATES = ("trained", "stale", "quarantined", "duplicate", "pending")

RunTasks = Callable[[Sequence[TaskSpec]], Sequence[Trajectory] | Awaitable[Sequence[Trajectory]]]

_STAGE = re.compile(r"[a-z0-9_]{1,64}")
_RUN_SEED_STRIDE = 100_000  # instances that one evaluation may have


@dataclasses.dataclass(frozen=True)
class Rate:
    """Successes among attempts, with the Wilson interval of the share."""

    successes: int
    attempts: int
    rate: float  # 0 where there was no attempt
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class EvalResult(Rate):
    """What one stage of a run (its base model, its policy after training) achieved."""

    stage: str
    per_task: dict[str, Rate]  # "desktop/click_button", with its variant where it has one
    env_errors: int  # episodes that the environment broke: no attempts
    missing: int  # tasks without any attempt, whether by env_error or because the run was stopped
    stop_reasons: dict[str, int]  # of all episodes, env_error included
    mean_reward: float  # over the attempts
    mean_turns: float
    finished_unix_s: float


def wilson_interval(successes: int, attempts: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of the true success rate; honest also near 0 and 1, where the normal interval is not.

    Args:
        successes: 0 <= successes <= attempts.
        confidence: in (0, 1), two-sided.
    Returns: (low, high) within [0, 1]; (0, 1) for no attempt.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
        1927.
    """
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes in {attempts} attempts")
    if attempts == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / attempts
    centre = share + z * z / (2 * attempts)
    spread = z * ((share * (1 - share) + z * z / (4 * attempts)) / attempts) ** 0.5
    scale = 1 + z * z / attempts
    # At 0 and 1 the bound is exact; the formula misses it by a rounding error.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == attempts else (centre + spread) / scale
    return low, high


def rate(successes: int, attempts: int) -> Rate:
    low, high = wilson_interval(successes, attempts)
    return Rate(successes, attempts, successes / attempts if attempts else 0.0, low, high)


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


def count(stage: str, tasks: Sequence[TaskSpec], trajectories: Sequence[Trajectory]) -> EvalResult:
    """The numbers of `evaluate`, from trajectories that are there.

    Episodes that the environment broke are no attempts of the policy: they are counted apart,
    neither as failures nor out of sight.
    """
    attempts = [t for t in trajectories if t.stop_reason is not StopReason.ENV_ERROR]
    surplus = collections.Counter(t.task for t in attempts) - collections.Counter(tasks)
    if surplus:
        raise ValueError(
            f"{stage}: {sum(surplus.values())} episodes too many, {min(surplus, key=str)}"
        )
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in attempts:
        by_task.setdefault(task_label(trajectory.task), []).append(trajectory)
    overall = rate(sum(t.success for t in attempts), len(attempts))
    return EvalResult(
        **dataclasses.asdict(overall),
        stage=stage,
        per_task={
            label: rate(sum(t.success for t in group), len(group))
            for label, group in sorted(by_task.items())
        },
        env_errors=len(trajectories) - len(attempts),
        missing=len(tasks) - len(attempts),
        stop_reasons=dict(
            sorted(collections.Counter(str(t.stop_reason) for t in trajectories).items())
        ),
        mean_reward=_mean([t.reward for t in attempts]),
        mean_turns=_mean([len(t.turns) for t in attempts]),
        finished_unix_s=time.time(),
    )


def task_label(task: TaskSpec) -> str:
    return f"{task.name} ({task.variant})" if task.variant else task.name


def _mean(values: Sequence[float]) -> float:
    return float(statistics.fmean(values)) if values else 0.0


def read_results(workdir: str | os.PathLike[str]) -> dict[str, EvalResult]:
    """The finished stages of a run, oldest first.

    Raises: UirlError for a file that is none of ours; `evaluate` writes them whole or not at all.
    """
    results = []
    for path in Path(workdir).joinpath(EVAL_DIR).glob("*.json"):
        try:
            flat = json.loads(path.read_bytes())
            flat["per_task"] = {label: Rate(**one) for label, one in flat["per_task"].items()}
            results.append(EvalResult(**flat))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UirlError(
                f"{path}: is no result of this version ({type(error).__name__}: {error}); "
                "remove it to evaluate the stage again"
            ) from None
    return {r.stage: r for r in sorted(results, key=lambda r: (r.finished_unix_s, r.stage))}


def stage_name(asked: str, version: int, last_version: int) -> str:
    """The stage that `--role=eval` measures: what was asked for, or the policy's version.

    Args:
        version: of the policy that plays; 0 is the base.
        last_version: that the run ends with.
    Raises: ConfigError: the run would take the result for its own of another policy.
    """
    if asked in RUN_STAGES and not (asked == "after" and version == last_version):
        raise ConfigError(
            f"--stage={asked}: that is what the run itself measures, and this is version {version} "
            f"of {last_version}; use another name, or none for version_{version}"
        )
    return asked or f"version_{version}"


def rename_stage(workdir: str | os.PathLike[str], stage: str, name: str) -> None:
    """A finished stage under another name, so that its own is free to be measured again.

    Interrupted at any point, the same call completes it. Does nothing where there is no such stage.
    """
    result, store = read_results(workdir).get(stage), open_store(workdir)
    if result is None:
        return
    for episodes in store.names(f"{EVAL_DIR}/{stage}"):
        store.move(episodes, f"{EVAL_DIR}/{name}/{episodes.rpartition('/')[2]}")
    renamed = dataclasses.asdict(dataclasses.replace(result, stage=name))
    write_json(Path(workdir) / EVAL_DIR / f"{name}.json", renamed)
    store.delete(f"{EVAL_DIR}/{stage}.json")


def format_table(results: Sequence[EvalResult]) -> str:
    """The table that ends a run: plain text, aligned, no trailing blanks or newline."""
    rows = [("stage", "success", "95 % interval", "episodes")]
    for one in results:
        rows.append(
            (
                stage_label(one.stage),
                f"{one.rate:.1%}" if one.attempts else "-",
                f"{one.low:.1%} to {one.high:.1%}",
                f"{one.successes}/{one.attempts}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    for one in results:
        if one.env_errors or one.missing:
            lines.append(
                f"{stage_label(one.stage)}: {one.env_errors} episodes broken by the environment "
                f"(not counted), {one.missing} tasks without an attempt"
            )
    return "\n".join(lines)


def stage_label(stage: str) -> str:
    return stage.replace("_", " ")


def episodes_summary(accounting: Mapping[str, int], *, lost: int, env_error: int) -> dict[str, Any]:
    """What became of every episode that was started for training.

    Args:
        accounting: of the learner's shard queue: published and each of FATES.
        lost: started, and gone with a killed process before they were published.
        env_error: broken by the environment and refilled; never published.
    """
    fates = {name: int(accounting[name]) for name in FATES}
    return {
        "published": int(accounting["published"]),
        **fates,
        "identity": f"published = {' + '.join(FATES)}",
        "identity_holds": int(accounting["published"]) == sum(fates.values()),
        "lost": int(lost),
        "env_error": int(env_error),
    }


def format_episodes(episodes: Mapping[str, Any]) -> str:
    """`published 960 = 940 trained + 12 stale + ...`, and says so where that is false."""
    terms = " + ".join(f"{episodes[name]} {name}" for name in FATES)
    sign = "=" if episodes["identity_holds"] else "IS NOT"
    return (
        f"published {episodes['published']} {sign} {terms}; never published: "
        f"{episodes['lost']} lost, {episodes['env_error']} env_error"
    )


def summary(
    results: Mapping[str, EvalResult],
    *,
    seed: int,
    train_seconds: float,
    peak_rss_gib: float,
    accounting: Mapping[str, int],
    lost: int,
    env_error: int,
    report: str | os.PathLike[str],
    facts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        results: by stage; `before`, `after` and, where there is one, `cold_start` are summarised.
        accounting, lost, env_error: see `episodes_summary`.
        report: path of the page, as printed at the end.
        facts: what the run was made on (see `report.machine_facts`).
    """
    stages = {
        name: {field.name: getattr(results[name], field.name) for field in dataclasses.fields(Rate)}
        for name in RUN_STAGES
        if name in results and name != CHANCE
    }
    return stages | {
        "seed": int(seed),
        "train_seconds": round(float(train_seconds), 3),
        "peak_rss_gib": round(float(peak_rss_gib), 3),
        "episodes": episodes_summary(accounting, lost=lost, env_error=env_error),
        "report": os.fspath(report),
        "facts": dict(facts or {}),
    }


def write_summary(workdir: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Writes summary.json. Raises: UirlError where it cannot be written."""
    path = Path(workdir) / SUMMARY_FILE
    write_json(path, content)
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
