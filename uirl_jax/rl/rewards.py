"""Rewards of an episode, assigned to its tokens. numpy on the host.

The last sampled token gets the outcome, a turn's last token the turn's own reward. Penalties
(length, KL) are subtracted here, so that they apply to every estimator of rl.advantages.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, TrainingError
from uirl_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class OwnReward:
    """A reward function of the user's own over a whole trajectory: Trajectory -> float."""

    function: str  # "module:function"
    # Of its value in the episode's reward.
    weight: float = dataclasses.field(default=1.0, metadata={"min": -1e6, "max": 1e6})

    def __post_init__(self) -> None:
        user_code.check(self.function, "reward.functions")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Weights of a record's rewards, and the penalty for long episodes."""

    # Weight of the episode's reward.
    outcome: float = dataclasses.field(default=1.0, metadata={"min": -1e6, "max": 1e6})
    # Weight of every turn's own reward.
    turns: float = dataclasses.field(default=0.0, metadata={"min": -1e6, "max": 1e6})
    # Overlong shaping (DAPO, arXiv:2503.14476, eq. 13): 0 up to max - buffer sampled tokens, then
    # linearly down to -1 at max. max 0: no shaping.
    overlong_max_tokens: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # The range of that fall.
    overlong_buffer_tokens: int = dataclasses.field(
        default=0, metadata={"min": 0, "max": 10_000_000}
    )
    # Added to the episode's weighted reward, each with its weight (learner.own_rewards).
    functions: tuple[OwnReward, ...] = ()

    def __post_init__(self) -> None:
        if self.overlong_max_tokens and not 0 < self.overlong_buffer_tokens <= (
            self.overlong_max_tokens
        ):
            raise ConfigError(
                f"reward.overlong_buffer_tokens={self.overlong_buffer_tokens}, expected 1 to "
                f"overlong_max_tokens={self.overlong_max_tokens}"
            )


def token_rewards(
    trajectory: Trajectory,
    cfg: RewardConfig,
    *,
    kl_s: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
) -> np.ndarray:
    """float64[S]: the reward of each sampled token, in the order of the turns.

    Args:
      kl_s: float[S], log(old / ref) of the sampled tokens: the k1 estimate, subtracted per token if
        the KL is in the reward (RLHF's form, arXiv:2203.02155, section 3.5).
    Raises: TrainingError: a reward or KL that is not finite.
    """
    lengths = turn_lengths(trajectory)
    rewards_s = np.zeros(sum(lengths))
    if len(rewards_s):
        for end, turn in zip(np.cumsum(lengths), trajectory.turns, strict=True):
            rewards_s[end - 1] += cfg.turns * turn.reward
        rewards_s[-1] += cfg.outcome * trajectory.reward + overlong_penalty(len(rewards_s), cfg)
    if not np.isfinite(rewards_s).all():
        raise TrainingError(
            f"episode {trajectory.episode_id}: reward {trajectory.reward}, turns "
            f"{[turn.reward for turn in trajectory.turns]}: not all finite"
        )
    if kl_s is None:
        return rewards_s
    if not np.isfinite(kl_s).all():
        raise TrainingError(
            f"episode {trajectory.episode_id}: the KL of its tokens is not finite: the policy has "
            "diverged"
        )
    return rewards_s - kl_coefficient * kl_s


def overlong_penalty(sampled_tokens: int, cfg: RewardConfig) -> float:
    """Penalty in [-1, 0]."""
    if not cfg.overlong_max_tokens:
        return 0.0
    free = cfg.overlong_max_tokens - cfg.overlong_buffer_tokens
    over = (sampled_tokens - free) / cfg.overlong_buffer_tokens
    return -float(np.clip(over, 0.0, 1.0))


def turn_lengths(trajectory: Trajectory) -> Sequence[int]:
    """Number of sampled tokens in each turn."""
    return [len(turn.token_ids) for turn in trajectory.turns]


def turn_screens(trajectory: Trajectory) -> Sequence[str]:
    """The content hash of the newest screenshot of each turn; "" where a turn has none."""
    return [turn.image_keys[-1] if turn.image_keys else "" for turn in trajectory.turns]
