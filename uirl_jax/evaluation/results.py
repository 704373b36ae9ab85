"""The files of an evaluation in a workdir: eval/<stage>.json, its episodes, and summary.json."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.evaluation.statistics import EvalResult, Rate
from uirl_jax.store import open_store
from uirl_jax.store.files import write_atomically

EVAL_DIR = "eval"
EPISODES_FILE = "episodes.tfrecord"
SUMMARY_FILE = "summary.json"
CHANCE = "random"  # the stage that no policy plays
RUN_STAGES = (CHANCE, "before", "cold_start", "after")  # that a run measures by itself
FATES = ("trained", "stale", "quarantined", "duplicate", "pending")


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
