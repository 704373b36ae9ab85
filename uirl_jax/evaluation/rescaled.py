"""Pix2Act's score on MiniWoB++: raw rewards of -1 to 1, rescaled to 0 to 1. Pure functions.

    raw reward of an episode    1     0.5    0    -0.5    -1    not ended by the task
    its score                   1     0.75   0     0       0     0

The rule that only a positive reward counts is that of Pix2Act's program; without it the score is
(mean_raw + 1) / 2.

Source: arXiv:2306.00245, section 5; google-deepmind/pix2act (fedaad6), tasks/miniwob/eval/
run_eval.py.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from uirl_jax.evaluation.outcome import Outcome
from uirl_jax.types import TaskSpec

RESAMPLES = 10_000
CONFIDENCE = 0.95
_CHUNK = 2**21  # numbers that are drawn at once

Episodes = Mapping[TaskSpec, Sequence[Outcome | None]]


@dataclasses.dataclass(frozen=True)
class RescaledReward:
    """Over tasks, each weighted alike, and over the instances of a task.

    Attributes:
      score: 0 to 1.
      low, high: 95 % interval of it, by a bootstrap over the instances of every task.
      mean_raw: -1 to 1; an episode that the task did not end has -1.
    """

    score: float
    low: float
    high: float
    mean_raw: float
    tasks: int
    episodes: int


def rescale(raw: float) -> float:
    """The score of an episode."""
    return (raw + 1) / 2 if raw > 0 else 0.0


def reporting(played: Episodes) -> frozenset[str]:
    """Tasks (by their label) whose verifier reports raw rewards.

    A task of which every episode ended before its verifier said anything counts, with 0, where
    another one reports: a policy gains nothing by invalid actions.
    """
    silent: set[str] = set()
    speaking: set[str] = set()
    for task, attempts in played.items():
        for one in attempts:
            if one is not None and one.raw_reward is not None:
                speaking.add(task.label)
            elif one is not None and one.judged:
                silent.add(task.label)
    known = {task.label for task in played} if speaking else set()
    return frozenset(known - (silent - speaking))


def score_rescaled(played: Episodes, tasks: Collection[str]) -> RescaledReward | None:
    """The score of the episodes of `tasks`; None if there is none.

    Args: tasks: of `reporting`; in them an episode without a raw reward has -1.
    """
    raws: dict[str, list[list[float]]] = {}  # task -> instance -> attempt
    for task, attempts in played.items():
        ended = [one for one in attempts if one is not None]
        if ended and task.label in tasks:
            found = [-1.0 if one.raw_reward is None else one.raw_reward for one in ended]
            raws.setdefault(task.label, []).append(found)
    if not raws:
        return None
    scores = [np.array([_mean(map(rescale, one)) for one in each]) for each in raws.values()]
    low, high = _bootstrap(scores)
    return RescaledReward(
        score=_mean(_mean(each) for each in scores),
        low=low,
        high=high,
        mean_raw=_mean(_mean(map(_mean, each)) for each in raws.values()),
        tasks=len(raws),
        episodes=sum(len(one) for each in raws.values() for one in each),
    )


def _bootstrap(scores_i: Sequence[np.ndarray]) -> tuple[float, float]:
    """The percentile interval of the mean of the tasks' means; equal calls give equal intervals.

    The tasks are given, not drawn: the instances of each are resampled among themselves.

    Args: scores_i: for every task float64[instances].
    Source: B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13.
    """
    rng = np.random.default_rng(0)
    means_r = np.zeros(RESAMPLES)
    for one_i in scores_i:
        count = len(one_i)
        step = max(1, _CHUNK // count)
        for first in range(0, RESAMPLES, step):
            rows = min(step, RESAMPLES - first)
            means_r[first : first + rows] += one_i[rng.integers(0, count, (rows, count))].mean(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_r / len(scores_i), (tail, 1 - tail))
    return float(low), float(high)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
