"""Rewards -> advantages, per sampled token. numpy on the host: a step is some thousand floats.

The reward of a token is what its episode got at it: most are 0, and the outcome stands at the last
one (rl.rewards). From there, either a baseline within the group (`group_advantages`), or a value
function (`generalised_advantages`). Does not know rows or batches, reads no trajectory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from uirl_jax.errors import ConfigError, TrainingError

# What is taken off a group's returns, and what they are divided by:
#   group_std  mean and deviation of the group (GRPO, arXiv:2402.03300, section 4.1.2)
#   group_mean mean alone (Dr. GRPO, arXiv:2503.20783, section 3.2)
#   leave_one_out  mean of the others (RLOO, arXiv:2402.14740, eq. 4)
#   batch      mean and deviation of all tokens of the step (REINFORCE++, arXiv:2501.03262, eq. 8)
#   none       nothing (REINFORCE)
Normalise = Literal["group_std", "group_mean", "leave_one_out", "batch", "none"]


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How the reward of an episode becomes the advantages of its tokens."""

    estimator: Literal["group", "gae"] = "group"  # gae: needs the value head
    normalise: Normalise = "group_std"
    # episode: all tokens get their episode's return. turn: those of a turn get what it and the
    # turns after it were paid. token: what followed the token (with normalise batch or none).
    credit: Literal["episode", "turn", "token"] = "episode"
    # A return that one more member, who is none, would have had: at what the best are paid, a group
    # that failed as a whole is pushed away from what it did (NGRPO, arXiv:2509.18851).
    virtual_return: float | None = None
    turn_discount: float = 1.0  # gamma, from a turn to the one before it; within a turn it is 1
    gae_lambda: float = 0.95
    epsilon: float = 1e-6  # added to a deviation

    def __post_init__(self) -> None:
        within_groups = self.normalise not in ("batch", "none")
        if within_groups and (self.estimator == "gae" or self.credit == "token"):
            raise ConfigError(
                f"advantage.normalise={self.normalise!r}: tokens are not compared within a group; "
                f"with estimator={self.estimator!r}, credit={self.credit!r} it is 'batch' or 'none'"
            )
        if self.virtual_return is not None and not (within_groups and self.credit == "episode"):
            raise ConfigError(
                f"advantage.virtual_return={self.virtual_return}: is one more episode of a group; "
                "it needs advantage.credit='episode' and advantages within groups"
            )


def group_advantages(
    token_rewards: Sequence[np.ndarray], turn_lengths: Sequence[Sequence[int]], cfg: AdvantageConfig
) -> list[np.ndarray]:
    """Of one group: the return of an episode, or of a turn and what followed it, less a baseline.

    With credit by turn the baseline is over the group's turns of the same number: what came of a
    second turn is compared with what came of the others' second turns.

    Args:
      token_rewards: float[S] of each member.
      turn_lengths: sampled tokens of each of a member's turns; they add up to S.
    Returns: float32[S] of each member, the same for all tokens of a turn. With normalise="batch"
      returns as they are: `batch_normalised` needs all groups. Where all that is compared is equal
      it is exactly 0, and so it is in a group of one: there is nothing to compare it with.
    Raises: TrainingError: a reward that is not finite, lengths that do not add up, no member.
    """
    _check(token_rewards, turn_lengths)
    if cfg.credit == "episode":
        returns_g = np.array([rewards.sum() for rewards in token_rewards], np.float64)
        beside = () if cfg.virtual_return is None else (cfg.virtual_return,)
        values_g = normalised(returns_g, cfg.normalise, beside=beside, epsilon=cfg.epsilon)
        return [
            np.full(len(rewards), value, np.float32)
            for rewards, value in zip(token_rewards, values_g, strict=True)
        ]
    if cfg.credit == "token":
        return [np.cumsum(of[::-1])[::-1].astype(np.float32) for of in token_rewards]
    returns = [
        turn_returns(rewards, lengths, cfg.turn_discount)
        for rewards, lengths in zip(token_rewards, turn_lengths, strict=True)
    ]
    for turn in range(max(map(len, returns))):
        members = [of for of in returns if len(of) > turn]
        values_g = np.array([of[turn] for of in members])
        for of, value in zip(
            members, normalised(values_g, cfg.normalise, epsilon=cfg.epsilon), strict=True
        ):
            of[turn] = value
    return [
        np.repeat(of, lengths).astype(np.float32)
        for of, lengths in zip(returns, turn_lengths, strict=True)
    ]


def turn_returns(
    token_rewards_s: np.ndarray, turn_lengths: Sequence[int], discount: float
) -> np.ndarray:
    """float64[U]: the rewards of a turn's tokens, and discounted those of the turns after it."""
    ends = np.cumsum(turn_lengths, dtype=np.int64)
    returns_u = np.array(
        [token_rewards_s[end - n : end].sum() for end, n in zip(ends, turn_lengths, strict=True)],
        np.float64,
    )
    for turn in range(len(returns_u) - 2, -1, -1):
        returns_u[turn] += discount * returns_u[turn + 1]
    return returns_u


def normalised(
    values_g: np.ndarray, how: Normalise, *, beside: Sequence[float] = (), epsilon: float = 1e-6
) -> np.ndarray:
    """float64[G]: values less their baseline, as the table above has it; batch and none as is.

    The deviation is the population's: the group is all that is compared.

    Args:
      beside: values that are compared with as if they were the group's, and get no advantage.
    """
    if how in ("none", "batch"):
        return np.asarray(values_g, np.float64)
    compared = np.concatenate([values_g, beside])
    if np.ptp(compared) == 0:
        # Not left to rounding: the mean of G equal floats may differ from them by an ulp, and an
        # ulp over an epsilon is an advantage.
        return np.zeros(len(values_g))
    centred_g = values_g - compared.mean()
    if how == "group_mean":
        return centred_g
    if how == "leave_one_out":  # v - mean of the others = (v - mean) n / (n - 1)
        return centred_g * len(compared) / (len(compared) - 1)
    return centred_g / (compared.std() + epsilon)


def batch_normalised(
    advantages: Sequence[np.ndarray], *, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """All tokens of a step, less their mean, over their deviation; 0 where all are equal.

    Source: REINFORCE++, arXiv:2501.03262, eq. 8; PPO's usual normalisation.
    """
    every = np.concatenate([np.asarray(of, np.float64) for of in advantages])
    if not len(every) or np.ptp(every) == 0:
        return [np.zeros(len(of), np.float32) for of in advantages]
    mean, deviation = every.mean(), every.std()
    return [((of - mean) / (deviation + epsilon)).astype(np.float32) for of in advantages]


def generalised_advantages(
    token_rewards_s: np.ndarray,
    values_s: np.ndarray,
    turn_lengths: Sequence[int],
    *,
    discount: float,
    gae_lambda: float,
    bootstrap: float,
) -> tuple[np.ndarray, np.ndarray]:
    """GAE over the sampled tokens of one episode: (advantages, returns), float32[S] each.

    One chain through all turns: the state after a turn's last token is the one before the next
    turn's first. Discount and lambda act where a turn ends and not within it, so that neither long
    answers nor many small actions are punished for their length (a token is no unit of time; a turn
    is). With one turn it is the episode's return less the value.

        delta_t = r_t + d_t V_{t+1} - V_t,   A_t = delta_t + d_t l_t A_{t+1}
        d_t = discount and l_t = gae_lambda at a turn's last token, both 1 before it

    Args:
      token_rewards_s: float[S].
      values_s: float[S], of the state before each token was sampled.
      turn_lengths: sampled tokens of each turn.
      bootstrap: value of the state after the last token: 0 where the episode ended (terminated),
        the critic's where it was cut short (truncated).
    Returns: advantages, and returns = advantages + values, which the value head is trained on.
    Raises: TrainingError: something is not finite, or lengths do not add up.
    Source: arXiv:1506.02438, eq. 16.
    """
    _check([token_rewards_s, values_s], [turn_lengths, turn_lengths])
    tokens = len(values_s)
    ends = np.zeros(tokens, bool)
    ends[np.cumsum(turn_lengths, dtype=np.int64) - 1] = tokens > 0
    discounts_s = np.where(ends, discount, 1.0)
    decays_s = np.where(ends, gae_lambda, 1.0)
    next_values_s = np.append(values_s[1:], bootstrap)[:tokens]
    deltas_s = token_rewards_s + discounts_s * next_values_s - values_s
    advantages_s = np.zeros(tokens)
    following = 0.0
    for t in range(tokens - 1, -1, -1):
        following = deltas_s[t] + discounts_s[t] * decays_s[t] * following
        advantages_s[t] = following
    return advantages_s.astype(np.float32), (advantages_s + values_s).astype(np.float32)


def _check(token_rewards: Sequence[np.ndarray], turn_lengths: Sequence[Sequence[int]]) -> None:
    if not len(token_rewards):
        raise TrainingError("advantages of a group without a member")
    for number, (rewards_s, lengths) in enumerate(zip(token_rewards, turn_lengths, strict=True)):
        if not np.isfinite(rewards_s).all():
            raise TrainingError(
                f"rewards of a group are not all finite: member {number} has "
                f"{np.asarray(rewards_s).tolist()}"
            )
        if min(lengths, default=1) < 1 or sum(lengths) != len(rewards_s):
            raise TrainingError(
                f"member {number} has {len(rewards_s)} sampled tokens in turns of {list(lengths)}"
            )
