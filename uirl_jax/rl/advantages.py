"""Token rewards -> advantages. numpy on the host: a step has a few thousand floats.

rl.rewards assigns rewards to tokens: most are 0, and the last token has the outcome. The baseline
is either the group's (`group_advantages`) or a value function (`generalised_advantages`). Arrays
are per episode; this module has no rows, batches or trajectories.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, TrainingError

# The baseline that is subtracted from a group's returns, and the divisor if any:
#   group_std      mean of the group, divided by its std (GRPO, arXiv:2402.03300, section 4.1.2)
#   group_mean     mean of the group (Dr. GRPO, arXiv:2503.20783, section 3.2)
#   group_ratio    mean of the group, divided by that mean: r / mean - 1 (MaxRL, arXiv:2602.02710,
#                  algorithm 1; with rewards 0 and 1 the mean is the group's success rate)
#   leave_one_out  mean of the other members (RLOO, arXiv:2402.14740, eq. 4)
#   batch          mean of all tokens of the step, divided by their std (REINFORCE++,
#                  arXiv:2501.03262, eq. 8)
#   none           no baseline (REINFORCE)
Normalise = Literal["group_std", "group_mean", "group_ratio", "leave_one_out", "batch", "none"]


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How the rewards of an episode become the advantages of its tokens."""

    estimator: Literal["group", "gae"] = "group"  # gae: needs the value head
    # group_std: minus the group's mean, over its standard deviation (GRPO). group_mean: minus the
    # mean (Dr. GRPO). group_ratio: minus the mean, over the mean (MaxRL; returns of at least 0).
    # leave_one_out: RLOO. batch: over the whole step (REINFORCE++). none: as is.
    normalise: Normalise = "group_std"
    # The return that a token gets. episode: the episode's. turn: of its turn and the turns after
    # it. token: of the token and those after it (with normalise batch or none).
    credit: Literal["episode", "turn", "token"] = "episode"
    # The return of one virtual member, added to the group's baseline. With the reward of a success
    # a group of failures gets negative advantages (NGRPO, arXiv:2509.18851).
    virtual_return: float | None = dataclasses.field(
        default=None, metadata={"min": -1e6, "max": 1e6}
    )
    # Weight of a second advantage, with credit episode: the return from a turn on, compared with
    # the turns of the group that saw the same screenshot (GiGPO, arXiv:2505.10978). 0: none.
    screen_weight: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 1000.0})
    # Factor of negative advantages, whichever way they came. Below 1 where a failure may have been
    # right: a recorded step names one of several right actions (GUI-Libra, arXiv:2602.22190).
    negative_weight: float = dataclasses.field(default=1.0, metadata={"min": 0.0, "max": 1000.0})
    # Gamma between turns; within a turn it is 1.
    turn_discount: float = dataclasses.field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    # With estimator gae: 0 trusts the critic, 1 the returns.
    gae_lambda: float = dataclasses.field(default=0.95, metadata={"min": 0.0, "max": 1.0})
    # "module:function" in place of the group's estimator; docs/own_code.md has its arguments.
    function: str = ""
    # Added to a standard deviation; with group_ratio the smallest mean that is not taken for 0.
    epsilon: float = dataclasses.field(default=1e-6, metadata={"above": 0.0, "max": 1.0})

    def __post_init__(self) -> None:
        if self.function:
            user_code.check(self.function, "advantage.function")
            if self.estimator == "gae":
                raise ConfigError("advantage.function: replaces estimator='group', not 'gae'")
        within_groups = self.within_groups
        if within_groups and (self.estimator == "gae" or self.credit == "token"):
            raise ConfigError(
                f"advantage.normalise={self.normalise!r}: tokens cannot be compared within a group "
                f"with estimator={self.estimator!r}, credit={self.credit!r}; use 'batch' or 'none'"
            )
        if self.virtual_return is not None and not (
            within_groups and self.credit == "episode" and not self.function
        ):
            raise ConfigError(
                f"advantage.virtual_return={self.virtual_return}: adds a virtual episode to each "
                "group; it needs advantage.credit='episode', advantages within groups and no "
                "function of your own"
            )
        if self.normalise == "group_ratio" and (self.virtual_return or 0.0) < 0:
            raise ConfigError(
                f"advantage.virtual_return={self.virtual_return}: advantage.normalise="
                "'group_ratio' divides by a mean of returns and needs them to be at least 0"
            )
        if self.screen_weight and not (
            within_groups and self.credit == "episode" and not self.function
        ):
            raise ConfigError(
                f"advantage.screen_weight={self.screen_weight}: is added to the advantages of "
                "episodes; it needs advantage.credit='episode', advantages within groups and no "
                "function of your own"
            )

    @property
    def within_groups(self) -> bool:
        """Whether an advantage compares the members of a group."""
        return self.normalise not in ("batch", "none")


def group_advantages(
    token_rewards: Sequence[np.ndarray],
    turn_lengths: Sequence[Sequence[int]],
    cfg: AdvantageConfig,
    *,
    turn_screens: Sequence[Sequence[str]] = (),
) -> list[np.ndarray]:
    """Advantages of one group's tokens: the return of the episode or turn, minus the baseline.

    With credit="turn" the baseline is over the members' turns of the same index: the return of a
    second turn is compared with the returns of the other members' second turns.

    With a screen_weight w, GiGPO (arXiv:2505.10978, section 4): for turn t of member i

        A_it = (R_i - mean_j R_j) / std_j R_j  +  w (R_it - mean(S)) / std(S)
        R_i  = sum over k of r_ik,   R_it = sum over k >= t of turn_discount^(k - t) r_ik
        S    = the R_ju of all turns of the group that saw the screenshot of turn t of i

    with the baseline and divisor of `normalise` in both terms. A screenshot that was seen once adds
    0. Nothing is bootstrapped where an episode was truncated: its returns are what it earned. In
    groups of one turn both terms are the same, and A is 1 + w times GRPO's.

    Args:
      token_rewards: float[S] per member.
      turn_lengths: number of sampled tokens in each turn, per member; they add up to S.
      turn_screens: the content hash of each turn's newest screenshot, per member; "" where there
        is none. Needed with a screen_weight.
    Returns: float32[S] per member, equal for all tokens of a turn (or after each token with
      credit="token"). With normalise="batch" or "none" the plain returns; `batch_normalised` needs
      all groups. Exactly 0 where all compared returns are equal, as in a group of one member.
    Raises: TrainingError: a reward that is not finite, lengths that do not add up, or no member.
    """
    _check(token_rewards, turn_lengths)
    if cfg.credit == "token":
        return [np.cumsum(rewards[::-1])[::-1].astype(np.float32) for rewards in token_rewards]
    if cfg.credit == "turn":
        turns = [range(len(lengths)) for lengths in turn_lengths]
        by_turn = _compared(token_rewards, turn_lengths, turns, cfg)
    else:
        returns_g = np.array([rewards.sum() for rewards in token_rewards], np.float64)
        virtual = () if cfg.virtual_return is None else (cfg.virtual_return,)
        values_g = normalised(returns_g, cfg.normalise, virtual=virtual, epsilon=cfg.epsilon)
        by_turn = [
            np.full(len(lengths), value)
            for value, lengths in zip(values_g, turn_lengths, strict=True)
        ]
        if cfg.screen_weight:
            by_screen = _compared(token_rewards, turn_lengths, turn_screens, cfg)
            by_turn = [
                episode_u + cfg.screen_weight * screen_u
                for episode_u, screen_u in zip(by_turn, by_screen, strict=True)
            ]
    return [
        np.repeat(values_u, lengths).astype(np.float32)
        for values_u, lengths in zip(by_turn, turn_lengths, strict=True)
    ]


def _compared(
    token_rewards: Sequence[np.ndarray],
    turn_lengths: Sequence[Sequence[int]],
    turn_keys: Sequence[Sequence[int | str]],
    cfg: AdvantageConfig,
) -> list[np.ndarray]:
    """float64[U] per member: the return of each turn, minus the baseline of the turns of its key.

    Turns with the key "" are compared with none and get 0.
    """
    returns = [
        turn_returns(rewards, lengths, cfg.turn_discount)
        for rewards, lengths in zip(token_rewards, turn_lengths, strict=True)
    ]
    advantages = [np.zeros(len(returns_u)) for returns_u in returns]
    alike: dict[int | str, list[tuple[int, int]]] = {}  # (member, turn) by key
    for member, (keys_u, returns_u) in enumerate(zip(turn_keys, returns, strict=True)):
        for turn, (key, _) in enumerate(zip(keys_u, returns_u, strict=True)):
            if key != "":
                alike.setdefault(key, []).append((member, turn))
    for turns in alike.values():
        values = normalised(
            np.array([returns[member][turn] for member, turn in turns]),
            cfg.normalise,
            epsilon=cfg.epsilon,
        )
        for (member, turn), value in zip(turns, values, strict=True):
            advantages[member][turn] = value
    return advantages


def turn_returns(
    token_rewards_s: np.ndarray, turn_lengths: Sequence[int], discount: float
) -> np.ndarray:
    """float64[U]: the sum of a turn's rewards plus the discounted return of the next turn."""
    ends = np.cumsum(turn_lengths, dtype=np.int64)
    returns_u = np.array(
        [token_rewards_s[end - n : end].sum() for end, n in zip(ends, turn_lengths, strict=True)],
        np.float64,
    )
    for turn in range(len(returns_u) - 2, -1, -1):
        returns_u[turn] += discount * returns_u[turn + 1]
    return returns_u


def normalised(
    values_g: np.ndarray, how: Normalise, *, virtual: Sequence[float] = (), epsilon: float = 1e-6
) -> np.ndarray:
    """float64[G]: values minus their baseline, see `Normalise`; unchanged for batch and none.

    The standard deviation is the population's, not the sample's.

        group_std    A_g = (r_g - mean(r)) / (std(r) + epsilon)
        group_ratio  A_g = (r_g - mean(r)) / mean(r), and 0 where mean(r) <= epsilon: MaxRL leaves
                     out groups without a success (arXiv:2602.02710, algorithm 1)

    Args:
      virtual: values that count for the baseline and get no advantage themselves.
    Raises: TrainingError: group_ratio of returns that differ, one of them below 0: over a negative
      mean the better member would get the lower advantage.
    """
    if how in ("none", "batch"):
        return np.asarray(values_g, np.float64)
    compared = np.concatenate([values_g, virtual])
    if np.ptp(compared) == 0:
        # The mean of G equal floats may differ from them by an ulp, and an ulp divided by epsilon
        # would be an advantage.
        return np.zeros(len(values_g))
    centred_g = values_g - compared.mean()
    if how == "group_mean":
        return centred_g
    if how == "group_ratio":
        return _over_the_mean(centred_g, compared, epsilon)
    if how == "leave_one_out":  # v - mean of the others = (v - mean) n / (n - 1)
        return centred_g * len(compared) / (len(compared) - 1)
    return centred_g / (compared.std() + epsilon)


def _over_the_mean(centred_g: np.ndarray, compared: np.ndarray, epsilon: float) -> np.ndarray:
    if compared.min() < -epsilon:
        raise TrainingError(
            "advantage.normalise='group_ratio' divides by a mean of returns and needs them to be "
            f"at least 0, got {compared.min():g}; use 'group_mean', or rewards of at least 0"
        )
    mean = compared.mean()
    return centred_g / mean if mean > epsilon else np.zeros(len(centred_g))


def batch_normalised(
    advantages: Sequence[np.ndarray], *, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """Advantages of all tokens of a step, minus their mean, divided by their std; 0 if all equal.

    Source: REINFORCE++, arXiv:2501.03262, eq. 8; PPO's usual normalisation.
    """
    flat = np.concatenate([np.asarray(values_s, np.float64) for values_s in advantages])
    if not len(flat) or np.ptp(flat) == 0:
        return [np.zeros(len(values_s), np.float32) for values_s in advantages]
    mean, std = flat.mean(), flat.std()
    return [((values_s - mean) / (std + epsilon)).astype(np.float32) for values_s in advantages]


def with_negative_weight(advantages: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
    """A where A >= 0, weight A elsewhere; float[S] per member. Scaling the loss term of a token
    scales its gradient, clipped or not, because the clip looks at the ratio and the sign of A.

    Source: the scaling of negative gradients in GUI-Libra (arXiv:2602.22190), with a weight that is
    given; its own falls with the group's success.
    """
    if weight == 1.0:
        return list(advantages)
    return [
        np.where(values_s < 0, np.asarray(weight, values_s.dtype) * values_s, values_s)
        for values_s in advantages
    ]


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

    All turns form one chain: the state after a turn's last token is the state before the next
    turn's first. Discount and lambda apply only at a turn's last token: the unit of time is a turn,
    not a token, so long answers are not discounted more. With one turn the advantage is the
    episode's return minus the value.

        delta_t = r_t + d_t V_{t+1} - V_t,   A_t = delta_t + d_t l_t A_{t+1}
        d_t = discount and l_t = gae_lambda at a turn's last token, both 1 before it

    Args:
      token_rewards_s: float[S].
      values_s: float[S], of the state before each token was sampled.
      turn_lengths: number of sampled tokens in each turn.
      bootstrap: value of the state after the last token: 0 if the episode terminated, the critic's
        value if it was truncated.
    Returns: advantages, and returns = advantages + values, the targets of the value head.
    Raises: TrainingError: a reward or value that is not finite, or lengths that do not add up.
    Source: arXiv:1506.02438, eq. 16.
    """
    _check([token_rewards_s], [turn_lengths])
    _check([np.zeros(len(values_s))], [turn_lengths])
    finite = np.isfinite([*values_s, bootstrap])
    if not finite.all():
        raise TrainingError(
            f"{(~finite).sum()} of the critic's {len(finite)} values of an episode are not finite: "
            "it has diverged"
        )
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
        raise TrainingError("advantages: the group has no member")
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
