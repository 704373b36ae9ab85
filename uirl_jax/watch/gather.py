"""Reads the files of a run for its report; no drawing and no markup here.

Reads metrics.jsonl, cold_start/metrics.jsonl, summary.json, config.json and eval/. Files may be
missing, so that a report can be made while the run is in progress.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from uirl_jax import evaluation
from uirl_jax.console import format_duration
from uirl_jax.errors import RecordError, ShardError, UirlError
from uirl_jax.metrics import COLD_START_DIR, read_metrics
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import TaskSpec, Trajectory
from uirl_jax.watch.suites import SuiteScores, read_suites

VERSIONS_OF = ("uirl_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pillow")

_MOST = 1e300  # of a number that is drawn
_RATE_FIELDS = dataclasses.fields(evaluation.Rate)
_SECRET = re.compile(r"(^|_)(token|secret|password|api_key)$")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The content of a workdir. Its text is untrusted and must be escaped for display."""

    root: Path
    rows: list[dict[str, Any]]  # of metrics.jsonl
    cold_rows: list[dict[str, Any]]
    summary: dict[str, Any]  # {} until the run has ended
    config: dict[str, Any]  # without secrets
    results: list[evaluation.EvalResult]
    suites: list[SuiteScores]
    episodes: dict[str, dict[TaskSpec, Trajectory]]  # by stage; stages without episodes are absent
    notes: list[str]  # files that are left out because they cannot be read

    @property
    def played(self) -> list[evaluation.EvalResult]:
        """The results of policies, without the stage of random actions."""
        return [result for result in self.results if result.stage != evaluation.CHANCE]


def read_run(workdir: str | os.PathLike[str], *, with_episodes: bool = True) -> RunFiles:
    """Reads a workdir; missing files give empty fields, unreadable ones a note.

    Args: with_episodes: whether the kept episodes of the stages are read too.
    Raises: UirlError: the workdir is not a directory.
    """
    root = Path(workdir)
    if not root.is_dir():
        raise UirlError(f"{root}: no such directory; give the workdir of a run")
    notes: list[str] = []
    summary = _read_object(root / evaluation.SUMMARY_FILE, notes)
    fault = _fault_of_summary(summary)
    if fault:
        notes.append(f"summary.json has a {fault!r} that is not what a run writes: left out")
        summary = {}
    config = _read_object(root / "config.json", notes)
    try:
        results = _checked_results(evaluation.read_results(root).values(), notes)
    except UirlError as error:
        notes.append(str(error))
        results = []
    run = RunFiles(
        root=root,
        rows=_drawable(read_metrics(root)),
        cold_rows=_drawable(read_metrics(root / COLD_START_DIR)),
        summary=summary,
        config=without_secrets(config),
        results=results,
        suites=read_suites(root, notes),
        episodes={},
        notes=notes,
    )
    if not with_episodes:
        return run
    stages = [result.stage for result in run.played]
    return dataclasses.replace(run, episodes=_read_episodes(root, stages, notes))


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} is not JSON ({error}) and is left out")
        return {}
    if isinstance(content, dict):
        return content
    notes.append(f"{path.name} is not a JSON object and is left out")
    return {}


def _is_number(value: Any) -> bool:
    """Whether a value of a JSON file can be drawn; not so NaN, which Python's JSON reads."""
    return type(value) in (int, float) and abs(value) < _MOST


def _drawable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl without what is no number."""
    return [
        {name: value for name, value in row.items() if _is_number(value)}
        for row in rows
        if _is_number(row["step"]) and abs(row["step"]) < 2**53
    ]


def _fault_of_summary(summary: dict[str, Any]) -> str:
    """The first key of a summary that has not the type that a run writes; empty: none."""
    for name in ("train_seconds", "peak_rss_gib"):
        if not _is_number(summary.get(name, 0)):
            return name
    if not isinstance(summary.get("facts", {}), dict):
        return "facts"
    counts = ("published", *evaluation.FATES, "lost", "env_error")
    found = summary.get("episodes", dict.fromkeys((*counts, "identity_holds"), 0))
    is_whole = isinstance(found, dict) and "identity_holds" in found
    return "" if is_whole and all(_is_number(found.get(n)) for n in counts) else "episodes"


def _checked_results(
    results: Iterable[evaluation.EvalResult], notes: list[str]
) -> list[evaluation.EvalResult]:
    """The results whose numbers are numbers."""
    kept = []
    for result in results:
        rates = (result, *result.per_task.values())
        numbers = [getattr(rate, field.name) for rate in rates for field in _RATE_FIELDS]
        numbers += [result.env_errors, result.missing]
        rewards = (task.mean_reward for task in result.per_task.values())
        numbers += [reward for reward in rewards if reward is not None]
        if isinstance(result.stage, str) and all(map(_is_number, numbers)):
            kept.append(result)
        else:
            notes.append(f"the result of stage {str(result.stage)[:80]!r} is left out: no numbers")
    return kept


def _read_episodes(
    root: Path, stages: Sequence[str], notes: list[str]
) -> dict[str, dict[TaskSpec, Trajectory]]:
    by_stage = {}
    for stage in stages:
        path = root / evaluation.EVAL_DIR / stage / evaluation.EPISODES_FILE
        if not path.exists():
            continue
        try:
            by_stage[stage] = {trajectory.task: trajectory for trajectory in read_shard(path)[1]}
        except (ShardError, RecordError) as error:
            notes.append(f"episodes of stage {stage} are left out: {error}")
    return by_stage


def without_secrets(value: Any, key: str = "") -> Any:
    """Replaces secrets such as a verifier's bearer token: reports are shared with others."""
    if isinstance(value, dict):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    return "(hidden)" if isinstance(value, str) and value and _SECRET.search(key) else value


def machine_facts() -> dict[str, str]:
    """Package versions, processor and memory; no user or host names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "system": f"{platform.system()} {platform.machine()}, {cores} cores",
        "python": platform.python_version(),
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["system"] += f", {memory_bytes / 2**30:.0f} GiB"
    for name in VERSIONS_OF:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def run_facts(run: RunFiles, *, on_its_machine: bool = True) -> dict[str, str]:
    """Label -> value: steps, time, memory, seed and machine. Values are untrusted text.

    Args: on_its_machine: whether this process is the run's, and its machine too.
    """
    facts: dict[str, str] = {}
    if run.rows:
        facts["steps"] = str(run.rows[-1]["step"])
    if "train_seconds" in run.summary:
        facts["training time"] = format_duration(float(run.summary["train_seconds"]))
    if "peak_rss_gib" in run.summary:
        facts["peak memory"] = f"{run.summary['peak_rss_gib']:.2f} GiB"
    if "seed" in run.summary:
        facts["seed"] = str(run.summary["seed"])
    machine = run.summary.get("facts") or (machine_facts() if on_its_machine else {})
    return facts | {key: str(value) for key, value in machine.items()}


def accounting(run: RunFiles) -> dict[str, Any] | None:
    """Episodes by outcome, from the summary or, during the run, from the last step.

    None before the first step.
    """
    if "episodes" in run.summary:
        return dict(run.summary["episodes"])
    names = ("published", *evaluation.FATES)
    if not run.rows or any(f"records/{name}" not in run.rows[-1] for name in names):
        return None
    counts = {name: int(run.rows[-1][f"records/{name}"]) for name in names}
    return evaluation.episodes_summary(counts, lost=0, env_error=0) | {"lost": None}
