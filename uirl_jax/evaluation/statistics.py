"""Success rates with confidence intervals, from trajectories. Pure functions."""

import collections
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

from uirl_jax.evaluation.outcome import outcome_of
from uirl_jax.types import StopReason, TaskSpec, Trajectory


@dataclasses.dataclass(frozen=True)
class Rate:
    """Successes among attempts, with the Wilson interval of the share."""

    successes: int
    attempts: int
    rate: float  # 0 without attempts
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class EvalResult(Rate):
    """The success of one stage of a run (its base model, its policy after training)."""

    stage: str
    per_task: dict[str, Rate]  # by name and variant: "desktop/click_button"
    env_errors: int  # env_error episodes; they are not attempts
    missing: int  # tasks without an attempt, because of env_errors or a stopped run
    stop_reasons: dict[str, int]  # of all episodes, including env_error
    mean_reward: float  # over the attempts
    mean_turns: float
    finished_unix_s: float
    # Fingerprints of how its pages were drawn (Trajectory.renderer).
    renderers: list[str] = dataclasses.field(default_factory=list)
    mistakes: int = 0  # that a user could not take back: wrong and repeated submissions
    false_claims: int = 0  # episodes that the policy ended as a success and that are none


def wilson_interval(successes: int, attempts: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success rate; valid also near 0 and 1, unlike the normal one.

    Args:
        successes: 0 <= successes <= attempts.
        confidence: in (0, 1), two-sided.
    Returns: (low, high) within [0, 1]; (0, 1) without attempts.
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
    # Exact at 0 and 1, where the formula has a rounding error.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == attempts else (centre + spread) / scale
    return low, high


def rate(successes: int, attempts: int) -> Rate:
    low, high = wilson_interval(successes, attempts)
    return Rate(successes, attempts, successes / attempts if attempts else 0.0, low, high)


def count(stage: str, tasks: Sequence[TaskSpec], trajectories: Sequence[Trajectory]) -> EvalResult:
    """Counts the trajectories of one stage.

    Episodes that ended as env_error are not attempts: they are counted separately.
    """
    attempts = [t for t in trajectories if t.stop_reason is not StopReason.ENV_ERROR]
    surplus = collections.Counter(t.task for t in attempts) - collections.Counter(tasks)
    if surplus:
        raise ValueError(
            f"{stage}: {sum(surplus.values())} episodes too many, such as {min(surplus, key=str)}"
        )
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in attempts:
        by_task.setdefault(task_label(trajectory.task), []).append(trajectory)
    outcomes = [outcome_of(t) for t in attempts]
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
        renderers=sorted({t.renderer for t in attempts} - {""}),
        mistakes=sum(outcome.irreversible for outcome in outcomes),
        false_claims=sum(outcome.false_claim for outcome in outcomes),
    )


def task_label(task: TaskSpec) -> str:
    return f"{task.name} ({task.variant})" if task.variant else task.name


def renderers_text(seen: Mapping[str, Sequence[str]]) -> str:
    """Says that pages were drawn in several ways; empty: they were not.

    Args:
        seen: fingerprints by where they were seen: "stage before".
    """
    if len({name for names in seen.values() for name in names}) <= 1:
        return ""
    places = "; ".join(f"{where}: {', '.join(names)}" for where, names in seen.items() if names)
    return (
        f"pages were not drawn alike ({places}): another version of Chromium or its fonts changes "
        "pixels, so results are not comparable and a policy sees screens that it was not trained "
        "on. Run all verifiers with the same versions (docs/bundled_server.md)"
    )


def _mean(values: Sequence[float]) -> float:
    return float(statistics.fmean(values)) if values else 0.0
