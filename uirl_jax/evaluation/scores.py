"""What a contender's episodes of a suite come to: rates, pass@k, conduct, costs. Pure functions."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from uirl_jax.evaluation.outcome import Outcome
from uirl_jax.evaluation.rates import Rate, mean, rate
from uirl_jax.evaluation.rescaled import RescaledReward, reporting, score_rescaled
from uirl_jax.types import TaskSpec

# Instance -> its attempts in order; None: not played, or broken by the environment.
Played = Mapping[TaskSpec, Sequence[Outcome | None]]


@dataclasses.dataclass(frozen=True)
class Scores:
    """One contender on one suite, or on one of its tasks.

    Attributes:
      success: over all episodes that were played to an end.
      pass_at: k -> chance that at least one of k attempts succeeds, averaged over instances.
      pass_all: k -> chance that k attempts all succeed (pass^k).
      missing: episodes that could not be played, because of the environment or a stop.
      wrong_submissions, duplicate_submissions, false_claims: sums over the episodes.
      seconds_per_success, tokens_per_success: of all episodes, shared among the successes; None
        without a success.
      rescaled: Pix2Act's score of the tasks whose verifier reports raw rewards; None: of none.
    """

    success: Rate
    pass_at: dict[int, float]
    pass_all: dict[int, float]
    mean_reward: float
    mean_turns: float
    stop_reasons: dict[str, int]
    missing: int
    wrong_submissions: int
    duplicate_submissions: int
    false_claims: int
    seconds_per_success: float | None
    tokens_per_success: float | None
    rescaled: RescaledReward | None = None


def pass_at(attempts: int, successes: int, k: int) -> float:
    """Chance that of k attempts, drawn from those made, at least one succeeded.

    Source: arXiv:2107.03374, equation 1.
    """
    return 1 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def pass_all(attempts: int, successes: int, k: int) -> float:
    """Chance that k attempts, drawn from those made, all succeeded: pass^k of arXiv:2406.12045."""
    return math.comb(successes, k) / math.comb(attempts, k)


def score(played: Played) -> Scores:
    """Counts; episodes that the environment broke are missing, not failed."""
    return _score(played, reporting(played))


def _score(played: Played, rescaled: Collection[str]) -> Scores:
    """Args: rescaled: tasks that have Pix2Act's score."""
    episodes = [one for attempts in played.values() for one in attempts if one is not None]
    successes = sum(episode.success for episode in episodes)

    def per_success(amounts: Iterable[float]) -> float | None:
        return sum(amounts) / successes if successes else None

    asked = sum(len(attempts) for attempts in played.values())
    return Scores(
        success=rate(successes, len(episodes)),
        pass_at=_over_instances(played, pass_at),
        pass_all=_over_instances(played, pass_all),
        mean_reward=mean([episode.reward for episode in episodes]),
        mean_turns=mean([episode.turns for episode in episodes]),
        stop_reasons=dict(
            sorted(collections.Counter(str(one.stop_reason) for one in episodes).items())
        ),
        missing=asked - len(episodes),
        wrong_submissions=sum(one.wrong_submissions for one in episodes),
        duplicate_submissions=sum(one.duplicate_submissions for one in episodes),
        false_claims=sum(one.false_claim for one in episodes),
        seconds_per_success=per_success(one.seconds for one in episodes),
        tokens_per_success=per_success(one.tokens for one in episodes),
        rescaled=score_rescaled(played, rescaled),
    )


def score_by_task(played: Played) -> dict[str, Scores]:
    """Of each name and variant."""
    groups: dict[str, dict[TaskSpec, Sequence[Outcome | None]]] = {}
    for task, attempts in played.items():
        groups.setdefault(task.label, {})[task] = attempts
    rescaled = reporting(played)
    return {label: _score(group, rescaled) for label, group in sorted(groups.items())}


def successes(played: Played) -> dict[TaskSpec, list[bool | None]]:
    """Of every attempt, as `paired.compare` takes them."""
    return {
        task: [None if one is None else one.success for one in attempts]
        for task, attempts in played.items()
    }


def _over_instances(played: Played, chance: Callable[[int, int, int], float]) -> dict[int, float]:
    """By k = 1, 2, 4, ..., and the attempts that every instance has."""
    counted = [
        (len(ended), sum(one.success for one in ended))
        for attempts in played.values()
        for ended in [[one for one in attempts if one is not None]]
    ]
    fewest = min((attempts for attempts, _ in counted), default=0)
    chosen = {2**power for power in range(fewest.bit_length())} | {fewest}
    return {
        k: mean([chance(attempts, right, k) for attempts, right in counted])
        for k in sorted(chosen - {0})
    }
