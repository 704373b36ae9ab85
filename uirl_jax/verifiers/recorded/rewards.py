"""Weights of the rules, and the reward that they make of what a recorded session tells.

The session tells every rule's value in `progress` ("parts"). Its own reward is 1 for success. A run
with weights of its own (verifier.recorded.rewards) judges the parts on its side, whether the
session is in its process, on the bundled server or elsewhere; and stored progress can be scored
again under other weights (`python -m tools.score_again RUN --rewards=type=0.2,point_in_box=1`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.types import Judgement, Rule, StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers.client.rules import FindOwnRule
from uirl_jax.verifiers.recorded import rules
from uirl_jax.verifiers.tasks import variants

PREFIX = "recorded/"
PARTS = "parts"  # of progress
MAX_WEIGHT = 1000.0
_SET = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclasses.dataclass(frozen=True)
class RecordedConfig:
    """Recorded sets, and what a step of them pays (docs/recorded.md)."""

    # Name -> parquet file of tools.prepare_gui_data; tasks recorded/<name> play it.
    sets: dict[str, str] = dataclasses.field(default_factory=dict)
    # Rule -> weight, as {"point_in_box": 1.0, "type": 0.1}. Empty: 1 for a success, else 0.
    rewards: dict[str, float] = dataclasses.field(
        default_factory=dict, metadata={"min": -MAX_WEIGHT, "max": MAX_WEIGHT}
    )
    # Play recorded tasks in the actor's process, without HTTP, if a run has no other tasks.
    in_process: bool = True

    def __post_init__(self) -> None:
        faults = [
            f"recorded.sets: the name {name!r}, expected 1-64 of a-z, 0-9, _ and -"
            for name in self.sets
            if not _SET.fullmatch(name)
        ]
        try:
            check_weights(self.rewards)
        except ConfigError as error:
            faults.append(f"recorded.rewards: {error}")
        if faults:
            raise ConfigError("; ".join(faults))


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ConfigError for a rule that there is none of, or a weight that cannot be."""
    for name, weight in weights.items():
        if name not in rules.NAMES:
            raise ConfigError(f"no rule {name!r}{variants.nearest(name, rules.NAMES)}")
        if not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise ConfigError(f"{name}={weight!r}, expected -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")


def read_weights(text: str) -> dict[str, float]:
    """Reads "type=0.2,point_in_box=1" of a command line. Raises: ConfigError."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            weights[name] = float(value)
        except ValueError:
            raise ConfigError(f"{part!r}: expected rule=weight, as in type=0.2") from None
    check_weights(weights)
    return weights


def read_sets(texts: list[str]) -> dict[str, str]:
    """Reads ["name=file.parquet", "file.parquet"]; a file alone is named by its stem.

    Raises: ConfigError: an invalid name, or the same name twice.
    """
    sets: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals:
            name, path = Path(text).stem, text
        if name in sets:
            raise ConfigError(f"--recorded-set: {name!r} is given twice; write NAME=FILE")
        sets[name] = path
    RecordedConfig(sets=sets)
    return sets


def weighted_rule(weights: Mapping[str, float]) -> Rule:
    """The rule of recorded tasks with these weights; the instruction is the session's own."""

    def judge(progress: Mapping[str, Any], turns: int) -> Judgement:
        done, success = progress.get("done"), progress.get("success")
        found = progress.get(PARTS)
        if not isinstance(done, bool) or not isinstance(success, bool):
            raise VerifierError(
                f"progress has done={str(done)[:40]!r}, success={str(success)[:40]!r}: not that of "
                "a recorded task"
            )
        if not isinstance(found, Mapping):
            raise VerifierError(f"progress has no {PARTS}: not that of a recorded task")
        reward = sum(weight * _part(found, name) for name, weight in weights.items())
        return Judgement(done, reward, success)

    return Rule("", judge)


def with_weights(weights: Mapping[str, float], find_own_rule: FindOwnRule) -> FindOwnRule:
    """Rules of tasks: the user's own come first, then the weights for recorded tasks."""
    if not weights:
        return find_own_rule
    weighted = weighted_rule(weights)

    def find(task: TaskSpec) -> Rule | None:
        own = find_own_rule(task)
        return weighted if own is None and task.name.startswith(PREFIX) else own

    return find


def parts_of(trajectory: Trajectory) -> dict[str, float] | None:
    """Every rule's value after the last turn, 0 for what is no number from 0 to 1; None: of another
    task, or without a turn.

    All are 0 if an invalid action ended it: it forfeits the steps that were walked before.
    """
    if not trajectory.task.name.startswith(PREFIX) or not trajectory.turns:
        return None
    if trajectory.stop_reason is StopReason.FORMAT_ERROR:
        return dict.fromkeys(rules.NAMES, 0.0)
    told = trajectory.turns[-1].progress.get(PARTS)
    found = told if isinstance(told, Mapping) else {}
    return {name: _usable(found.get(name)) or 0.0 for name in rules.NAMES}


def _usable(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return None
    return float(value)


def _part(found: Mapping[str, Any], name: str) -> float:
    value = _usable(found.get(name))
    if value is None:
        raise VerifierError(
            f"progress has {PARTS}.{name}={str(found.get(name))[:40]!r}: expected a number from 0 "
            "to 1"
        )
    return value
