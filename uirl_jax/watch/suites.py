"""Reads the scores of suites (`--role=eval --tasks=...`) in a workdir, for the pages of a run.

Rates are counted again from successes and attempts: the files may be a stranger's.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from uirl_jax import evaluation
from uirl_jax.evaluation import SCORES_FILE, SUITES_DIR

MAX_POLICIES = 40  # shown of a suite
_MAX_ATTEMPTS = 2**53
_NOT_SCORES = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class SuiteScores:
    """The policies of one suite, in the order of their names.

    Attributes:
      by_task: of every policy; comparisons: of the last command, a sentence for each pair.
    """

    name: str
    policies: dict[str, evaluation.Rate]
    by_task: dict[str, dict[str, evaluation.Rate]]
    comparisons: list[str]

    @property
    def tasks(self) -> list[str]:
        return sorted({task for rates in self.by_task.values() for task in rates})


def read_suites(workdir: Path, notes: list[str]) -> list[SuiteScores]:
    """Suites with scores; files that are not such get a note."""
    found = []
    for suite in sorted((workdir / SUITES_DIR).glob("*/")):
        policies, by_task = {}, {}
        for path in sorted(suite.glob(f"*/{SCORES_FILE}"))[:MAX_POLICIES]:
            try:
                content = json.loads(path.read_bytes())
                policies[path.parent.name] = _rate(content["all"])
                by_task[path.parent.name] = {
                    task: _rate(scores) for task, scores in content["by_task"].items()
                }
            except (OSError, *_NOT_SCORES) as error:
                notes.append(f"{path.relative_to(workdir)}: no scores ({type(error).__name__})")
                policies.pop(path.parent.name, None)
        if policies:
            compared = _comparisons(suite / SCORES_FILE, notes)
            found.append(SuiteScores(suite.name, policies, by_task, compared))
    return found


def scores_files(workdir: Path) -> list[Path]:
    """All that `read_suites` reads."""
    suites = workdir / SUITES_DIR
    return [*suites.glob(f"*/{SCORES_FILE}"), *suites.glob(f"*/*/{SCORES_FILE}")]


def _rate(scores: Any) -> evaluation.Rate:
    """Raises: ValueError, KeyError, TypeError."""
    successes, attempts = scores["success"]["successes"], scores["success"]["attempts"]
    if type(successes) is not int or type(attempts) is not int or attempts > _MAX_ATTEMPTS:
        raise TypeError("counts are not whole numbers")
    return evaluation.rate(successes, attempts)


def _comparisons(path: Path, notes: list[str]) -> list[str]:
    try:
        pairs = json.loads(path.read_bytes())["comparisons"]
        return [evaluation.format_comparisons([evaluation.Comparison(**pair)]) for pair in pairs]
    except FileNotFoundError:
        return []
    except (OSError, *_NOT_SCORES) as error:
        notes.append(f"{path.parent.name}/{path.name}: no comparisons ({type(error).__name__})")
        return []
