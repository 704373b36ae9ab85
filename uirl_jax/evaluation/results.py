"""The files of an evaluation in a workdir: eval/<stage>.json, its episodes, and summary.json."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.evaluation.rates import Rate
from uirl_jax.evaluation.recorded import from_json
from uirl_jax.evaluation.statistics import EvalResult, TaskRate
from uirl_jax.store.files import write_atomically
from uirl_jax.store.local import LocalStore

EVAL_DIR = "eval"
EPISODES_FILE = "episodes.tfrecord"
SUMMARY_FILE = "summary.json"
CHANCE = "random"  # the stage of random actions
RUN_STAGES = (CHANCE, "before", "cold_start", "after")  # evaluated by every run
FATES = ("trained", "stale", "quarantined", "duplicate", "pending")


def read_results(workdir: str | os.PathLike[str]) -> dict[str, EvalResult]:
    """The finished stages of a run, oldest first.

    Raises: UirlError: a file is not a valid result.
    """
    results = []
    for path in Path(workdir).joinpath(EVAL_DIR).glob("*.json"):
        try:
            results.append(to_result(json.loads(path.read_bytes())))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UirlError(
                f"{path}: not a result of this version ({type(error).__name__}: {error}); "
                "remove it to evaluate the stage again"
            ) from None
    return {r.stage: r for r in sorted(results, key=lambda r: (r.finished_unix_s, r.stage))}


def to_result(flat: Mapping[str, Any]) -> EvalResult:
    """The result that `dataclasses.asdict` made these values of.

    Raises: TypeError, KeyError, AttributeError: others.
    """
    per_task = {label: TaskRate(**rate) for label, rate in flat["per_task"].items()}
    recorded = {name: from_json(one) for name, one in flat.get("recorded", {}).items()}
    result = EvalResult(**{**flat, "per_task": per_task, "recorded": recorded})
    whole = isinstance(result.stage, str) and type(result.finished_unix_s) in (int, float)
    if not whole:
        raise TypeError("stage is no text, or finished_unix_s no number")
    return result


def forget_after(workdir: str | os.PathLike[str], version: int) -> None:
    """Deletes the evaluations of policies after this version, which a run is about to repeat."""
    store = LocalStore(workdir)
    for stage in read_results(workdir):
        number = stage.removeprefix("version_")
        if number != stage and number.isdecimal() and int(number) > version:
            store.delete(f"{EVAL_DIR}/{stage}.json", *store.names(f"{EVAL_DIR}/{stage}"))


def stage_name(asked: str, version: int, last_version: int) -> str:
    """The stage name of `--role=eval`: `asked`, or version_<n> if it is empty.

    Args:
        asked: the --stage flag.
        version: of the policy that is evaluated; 0 is the base.
        last_version: the version at the end of the run.
    Raises: ConfigError: a stage name that the run itself uses for another policy.
    """
    if asked in RUN_STAGES and not (asked == "after" and version == last_version):
        raise ConfigError(
            f"--stage={asked}: the run itself evaluates this stage, and the current policy is "
            f"version {version} of {last_version}; use another name, or omit --stage for "
            f"version_{version}"
        )
    return asked or f"version_{version}"


def keep_final(workdir: str | os.PathLike[str], steps: int) -> None:
    """Renames the final evaluation to its version, so that a longer run has another one.

    Args: steps: the version where the result does not know it, as that of an earlier release.
    """
    final = read_results(workdir).get("after")
    known = None if final is None else final.policy_version  # a callback may have ended the run
    rename_stage(workdir, "after", f"version_{steps if known is None else known}")


def rename_stage(workdir: str | os.PathLike[str], stage: str, name: str) -> None:
    """Renames a finished stage, so that its old name can be evaluated again.

    If interrupted, the same call completes it. Does nothing if the stage does not exist. A finished
    stage of the new name stays, and the old one is deleted: where a gate kept the last policy from
    the actors, `after` is of an earlier policy than that.
    """
    results, store = read_results(workdir), LocalStore(workdir)
    result, there = results.get(stage), results.get(name)
    if result is None:
        return
    if there is not None and there.finished_unix_s != result.finished_unix_s:
        store.delete(f"{EVAL_DIR}/{stage}.json", *store.names(f"{EVAL_DIR}/{stage}"))
        return
    for episodes in store.names(f"{EVAL_DIR}/{stage}"):
        store.move(episodes, f"{EVAL_DIR}/{name}/{episodes.rpartition('/')[2]}")
    renamed = dataclasses.asdict(dataclasses.replace(result, stage=name))
    write_json(Path(workdir) / EVAL_DIR / f"{name}.json", renamed)
    store.delete(f"{EVAL_DIR}/{stage}.json")


def episodes_summary(accounting: Mapping[str, int], *, lost: int, env_error: int) -> dict[str, Any]:
    """The number of training episodes by outcome.

    Args:
        accounting: of the learner's shard queue: published, and each of FATES.
        lost: episodes lost with a killed process before they were published.
        env_error: episodes that ended as env_error and were repeated; never published.
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
        results: by stage; `before`, `after` and, if present, `cold_start` are summarised.
        accounting, lost, env_error: see `episodes_summary`.
        report: path of report.html, as printed at the end.
        facts: software versions and machine (see `watch.machine_facts`).
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
    """Writes summary.json. Raises: UirlError if it cannot be written."""
    path = Path(workdir) / SUMMARY_FILE
    write_json(path, content)
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
