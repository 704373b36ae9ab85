"""The result of a stage, counted from its trajectories. Pure functions."""

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence

from uirl_jax.evaluation.outcome import outcome_of
from uirl_jax.evaluation.rates import Rate, mean, rate
from uirl_jax.evaluation.recorded import RecordedResult, recorded_results
from uirl_jax.types import StopReason, TaskSpec, Trajectory


@dataclasses.dataclass(frozen=True)
class TaskRate(Rate):
    """The success of one stage on one kind of task."""

    mean_reward: float | None = None  # over the attempts; None: of an earlier release


@dataclasses.dataclass(frozen=True)
class EvalResult(Rate):
    """The success of one stage of a run (its base model, its policy after training)."""

    stage: str
    per_task: dict[str, TaskRate]  # by name and variant: "desktop/click_button"
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
    policy_version: int | None = None  # None: without a turn, or of an earlier release
    # Of recorded sets: by platform and kind of element, and the mean of every rule.
    recorded: dict[str, RecordedResult] = dataclasses.field(default_factory=dict)


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
        by_task.setdefault(trajectory.task.label, []).append(trajectory)
    outcomes = [outcome_of(t) for t in attempts]
    overall = rate(sum(t.success for t in attempts), len(attempts))
    return EvalResult(
        **dataclasses.asdict(overall),
        stage=stage,
        per_task={
            label: TaskRate(
                **dataclasses.asdict(rate(sum(t.success for t in group), len(group))),
                mean_reward=mean([t.reward for t in group]),
            )
            for label, group in sorted(by_task.items())
        },
        env_errors=len(trajectories) - len(attempts),
        missing=len(tasks) - len(attempts),
        stop_reasons=dict(
            sorted(collections.Counter(str(t.stop_reason) for t in trajectories).items())
        ),
        mean_reward=mean([t.reward for t in attempts]),
        mean_turns=mean([len(t.turns) for t in attempts]),
        finished_unix_s=time.time(),
        renderers=sorted({t.renderer for t in attempts} - {""}),
        mistakes=sum(outcome.irreversible for outcome in outcomes),
        false_claims=sum(outcome.false_claim for outcome in outcomes),
        policy_version=max(
            (v for t in attempts if t.turns for v in t.policy_versions), default=None
        ),
        recorded=recorded_results(attempts),
    )


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
