"""Compares two policies on the same instances: McNemar's exact test, and a bootstrap over tasks.

Two success rates with overlapping intervals may still differ surely, because both were measured on
the same instances: what one solves and the other does not is what tells. Pure functions.

Source: Q. McNemar, "Note on the sampling error of the difference between correlated proportions or
percentages", 1947; B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from uirl_jax.types import TaskSpec

RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two contenders on the instances that both were measured on.

    Attributes:
      difference: of the success rates, second minus first, every instance weighted alike.
      low, high: 95 % interval of the difference, by the bootstrap.
      first_only, second_only: pairs of episodes that one of them alone solved; attempt k of an
        instance is paired with attempt k.
      p_value: of McNemar's exact test, two-sided. With several attempts it takes the attempts of an
        instance as independent, which the bootstrap does not.
    """

    first: str
    second: str
    instances: int
    difference: float
    low: float
    high: float
    first_only: int
    second_only: int
    p_value: float


def pairs_of(
    first: str, second: str, successes: Mapping[str, Mapping[TaskSpec, Sequence[bool | None]]]
) -> list[list[tuple[bool, bool]]]:
    """Of each instance that both played: its attempts' successes. Args: as of `compare`."""
    pairs: list[list[tuple[bool, bool]]] = []
    theirs = successes[second]
    for instance, attempts in successes[first].items():
        played = [
            (bool(one), bool(other))
            for one, other in zip(attempts, theirs.get(instance, ()), strict=False)
            if one is not None and other is not None
        ]
        if played:
            pairs.append(played)
    return pairs


def compare(
    first: str,
    second: str,
    successes: Mapping[str, Mapping[TaskSpec, Sequence[bool | None]]],
    *,
    confidence: float = 0.95,
) -> Comparison:
    """Compares two contenders.

    Args:
      successes: contender -> instance -> its attempts in order; None: not played.
    Raises: ValueError: no instance was played by both.
    """
    pairs = pairs_of(first, second, successes)
    if not pairs:
        raise ValueError(f"{first} and {second} have no instance in common")
    flat = [pair for played in pairs for pair in played]
    first_only = sum(one and not other for one, other in flat)
    second_only = sum(other and not one for one, other in flat)
    differences_i = np.array(
        [np.mean([other - one for one, other in played]) for played in pairs], np.float64
    )
    low, high = _bootstrap(differences_i, confidence)
    return Comparison(
        first,
        second,
        instances=len(pairs),
        difference=float(differences_i.mean()),
        low=low,
        high=high,
        first_only=first_only,
        second_only=second_only,
        p_value=mcnemar(first_only, second_only),
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """The two-sided p-value: how likely a split as uneven is, if neither is better."""
    from scipy import stats  # half a second, and only here

    discordant = first_only + second_only
    if not discordant:
        return 1.0
    return float(stats.binomtest(first_only, discordant, 0.5).pvalue)


def _bootstrap(differences_i: np.ndarray, confidence: float) -> tuple[float, float]:
    """The percentile interval of the mean over instances; the same call gives the same interval."""
    rng = np.random.default_rng(0)
    count = len(differences_i)
    means = np.empty(RESAMPLES)
    for index in range(RESAMPLES):
        means[index] = differences_i[rng.integers(0, count, count)].mean()
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)
