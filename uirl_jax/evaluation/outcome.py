"""What is counted of one episode: its end, wrong and repeated submissions, claims, costs.

Read from what the verifier counted and from the last action; a trajectory is then let go, and
50,000 episodes of an evaluation fit into memory. Pure functions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from uirl_jax.types import StopReason, Trajectory
from uirl_jax.verifiers.dialects import RAW_REWARD, ROWS, WRONG


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one episode; a count is 0 where the verifier counts no such thing.

    Attributes:
      claims_success: the policy ended it as a success.
      tokens: sampled.
      raw_reward: -1 to 1, of an episode that the task did not end -1; None: none was reported.
      judged: whether the verifier said anything of it; not after an invalid first action.
    """

    success: bool
    stop_reason: StopReason
    reward: float
    turns: int
    wrong_submissions: int
    duplicate_submissions: int
    claims_success: bool
    tokens: int
    seconds: float
    raw_reward: float | None = None
    judged: bool = True

    @property
    def false_claim(self) -> bool:
        return self.claims_success and not self.success

    @property
    def irreversible(self) -> int:
        """Mistakes that a user could not take back."""
        return self.wrong_submissions + self.duplicate_submissions


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Counts of an episode's last progress, and what its last action claimed."""
    turns = trajectory.turns
    progress = turns[-1].progress if turns else {}
    wrong, rows = progress.get(WRONG), progress.get(ROWS)
    action = turns[-1].action if turns else None
    # The status of `terminate` is in its text (actions.kinds).
    claims = action is not None and action.kind == "terminate" and action.text == "success"
    return Outcome(
        success=trajectory.success,
        stop_reason=trajectory.stop_reason,
        reward=trajectory.reward,
        turns=len(turns),
        wrong_submissions=wrong if type(wrong) is int and wrong > 0 else 0,
        duplicate_submissions=_repeated(rows) if isinstance(rows, list) else 0,
        claims_success=claims,
        tokens=sum(len(turn.token_ids) for turn in turns),
        seconds=trajectory.duration_s,
        raw_reward=_raw(progress),
        judged=bool(progress),
    )


def _raw(progress: Mapping[str, Any]) -> float | None:
    raw = progress.get(RAW_REWARD)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not -1 <= raw <= 1:
        return None
    return float(raw) if progress.get("done") is True else -1.0


def _repeated(rows: list) -> int:
    indices = [row for row in rows if type(row) is int]
    return len(indices) - len(set(indices))
