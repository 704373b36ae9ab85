"""Losses over token logprobs, as weighted sums. Pure JAX, no model.

Functions take float32[B,T] arrays whose position t is about token t itself, and weights: 0 where
the policy did not sample the token, else the token's share in the mean that the config selects
(rl.weights). The weights of an update's batches add up to 1, so the loss of an update is the sum of
its batches' losses, independent of rows, packing and padding.

    token      p  p  s  s  s  p  p  s  s  .        p prompt, s sampled, . padding
    weights    0  0 .2 .2 .2  0  0 .2 .2  0        token mean over this row alone
    turn_ids   0  0  1  1  1  0  0  2  2  0        one number per turn of the row
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, UserCodeError
from uirl_jax.types import METRIC_NAME

# Guards against overflow of exp in float32; a ratio of exp(20) is never meaningful.
MAX_LOG_RATIO = 20.0
# Of the histogram of policy / behaviour: how many tokens lie between two edges is the metric
# f"{RATIOS}/{n}". The first and last bin take all beyond.
RATIOS = "ratios"
RATIO_EDGES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0)

KlEstimator = Literal["k1", "k2", "k3"]


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The clipped policy-gradient loss with its KL and entropy terms. Defaults are GRPO's."""

    # PPO's range.
    clip_low: float = dataclasses.field(default=0.2, metadata={"min": 0.0, "max": 1000.0})
    # DAPO ("clip higher") raises only the upper bound, to 0.28.
    clip_high: float = dataclasses.field(default=0.2, metadata={"min": 0.0, "max": 1000.0})
    ratio: Literal["token", "turn"] = "token"  # turn: one ratio for all tokens of a turn (GSPO)
    # Against the base, adapters off.
    kl_coefficient: float = dataclasses.field(default=0.01, metadata={"min": 0.0, "max": 1000.0})
    # Of the KL to the base (Schulman): k1 and k3 are unbiased, k2 and k3 never negative.
    kl_estimator: KlEstimator = "k3"
    # reward: coefficient x k1 is subtracted from the rewards instead, before the advantages.
    kl_in: Literal["loss", "reward"] = "loss"
    # Bonus for the entropy of the sampled tokens' distributions.
    entropy_coefficient: float = dataclasses.field(
        default=0.0, metadata={"min": 0.0, "max": 1000.0}
    )
    # Importance weights old / behaviour, for the actor's staleness. truncate (TIS): capped. mask:
    # 0 for tokens above the cap or below its inverse. none: rollouts are treated as on-policy.
    importance: Literal["truncate", "mask", "none"] = "truncate"
    # The cap; at least 1 with mask.
    importance_cap: float = dataclasses.field(default=2.0, metadata={"above": 0.0, "max": 1e6})
    # Lower bound of the weights, with truncate. At 0 a stored success (algorithm.replay) that the
    # policy has since made unlikely has almost no weight; at 1 it counts as on-policy, as in ARPO.
    importance_floor: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 1e6})
    # "module:function" in place of clipped_policy_loss, with the same arguments and returns.
    function: str = ""

    def __post_init__(self) -> None:
        if self.function:
            user_code.check(self.function, "loss.function")
        if not 0 <= self.importance_floor <= self.importance_cap:
            raise ConfigError(
                f"loss.importance_floor={self.importance_floor}: expected between 0 and "
                f"loss.importance_cap={self.importance_cap}"
            )
        if self.importance == "mask" and self.importance_cap < 1:
            raise ConfigError(
                f"loss.importance_cap={self.importance_cap}: with loss.importance='mask' no ratio "
                "is both at most this and at least its inverse, so every weight would be 0; set 1 "
                "or more"
            )
        if self.importance_floor and self.importance != "truncate":
            raise ConfigError(
                f"loss.importance_floor={self.importance_floor}: needs loss.importance='truncate', "
                f"got {self.importance!r}"
            )


def clipped_policy_loss(
    logprobs_bt: jax.Array,
    *,
    old_bt: jax.Array,
    behaviour_bt: jax.Array,
    ref_bt: jax.Array,
    advantages_bt: jax.Array,
    weights_bt: jax.Array,
    turn_ids_bt: jax.Array,
    entropies_bt: jax.Array | None = None,
    cfg: PolicyLossConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-sum w c min(r A, clip(r) A) + beta KL(policy || base) - eta H.

    r = policy / old is clipped (PPO, arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300, eq. 3). With
    cfg.ratio="turn" r is the geometric mean over a turn's tokens, equal for all of them (GSPO,
    arXiv:2507.18071, eq. 5 and 7; the gradient is eq. 10's). c = old / behaviour corrects for the
    actor's staleness and has no gradient (AReaL's decoupled objective, arXiv:2505.24298, eq. 5).

    Args:
      logprobs_bt: of the policy that is trained; gradients flow only here and in entropies_bt.
      old_bt, behaviour_bt, ref_bt: of the learner's policy before the step, of the actor when it
        sampled, and of the base (adapters off).
      turn_ids_bt: int32, from 1, distinct for the turns of a row; 0 where nothing was sampled.
      entropies_bt: of the distributions that the tokens were sampled from; for the bonus.
    Returns:
      (loss, metrics): sums over the batch, to be added over an update's batches; metrics become
      means over sampled tokens when divided by "tokens".
    """
    mask_bt = (weights_bt > 0).astype(jnp.float32)
    old_bt, behaviour_bt, ref_bt = jax.lax.stop_gradient((old_bt, behaviour_bt, ref_bt))

    def log_ratio(upper_bt: jax.Array, lower_bt: jax.Array) -> jax.Array:
        # Masked before exp: undefined values at padding would become inf, or 0 * inf in gradients.
        masked_bt = jnp.where(mask_bt > 0, upper_bt - lower_bt, 0.0)
        return jnp.clip(masked_bt, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    policy_to_old_bt = log_ratio(logprobs_bt, old_bt)
    if cfg.ratio == "turn":
        policy_to_old_bt = turn_mean(policy_to_old_bt, mask_bt, turn_ids_bt)
    ratio_bt = jnp.exp(policy_to_old_bt)
    clipped_bt = jnp.clip(ratio_bt, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    surrogate_bt = jnp.minimum(ratio_bt * advantages_bt, clipped_bt * advantages_bt)
    correction_bt = importance_weights(log_ratio(old_bt, behaviour_bt), cfg)

    kl_bt = kl(log_ratio(ref_bt, logprobs_bt), cfg.kl_estimator) * mask_bt
    loss_bt = -correction_bt * surrogate_bt
    if cfg.kl_in == "loss":
        loss_bt += cfg.kl_coefficient * kl_bt
    if entropies_bt is not None:
        loss_bt -= cfg.entropy_coefficient * entropies_bt
    # where, not a product: values of tokens that were not sampled may be NaN, and 0 * NaN is NaN.
    loss = jnp.where(mask_bt > 0, loss_bt * weights_bt, 0.0).sum()

    def total(x_bt: jax.Array) -> jax.Array:
        return jnp.where(mask_bt > 0, x_bt, 0.0).sum()

    was_clipped_bt = ratio_bt * advantages_bt > clipped_bt * advantages_bt
    metrics = {
        "tokens": mask_bt.sum(),
        "actor/policy_loss": total(-correction_bt * surrogate_bt),
        "actor/kl_loss": total(kl_bt),
        "actor/clip_fraction": total(was_clipped_bt.astype(jnp.float32)),
        # Without entropies: the one-sample estimate from the sampled tokens.
        "actor/entropy": total(-logprobs_bt if entropies_bt is None else entropies_bt),
        "actor/old_kl": total(kl(log_ratio(logprobs_bt, old_bt), "k3")),  # KL(old || policy)
        "offpolicy/drift": total(jnp.abs(old_bt - behaviour_bt)),
        "offpolicy/weight": total(correction_bt),
        "offpolicy/weight_squared": total(jnp.square(correction_bt)),
        **{
            f"{RATIOS}/{number}": total(is_in_bt.astype(jnp.float32))
            for number, is_in_bt in enumerate(_in_bins(log_ratio(logprobs_bt, behaviour_bt)))
        },
    }
    return loss, metrics


def _in_bins(log_ratio_bt: jax.Array) -> list[jax.Array]:
    """Whether each ratio is in each bin of RATIO_EDGES; the outermost take all beyond."""
    bin_bt = jnp.searchsorted(jnp.log(jnp.array(RATIO_EDGES[1:-1])), log_ratio_bt, side="right")
    return [bin_bt == number for number in range(len(RATIO_EDGES) - 1)]


PolicyLoss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def find_policy_loss(cfg: PolicyLossConfig) -> PolicyLoss:
    """The policy loss that the config names. Raises: ConfigError: there is no such function."""
    if not cfg.function:
        return clipped_policy_loss
    own = user_code.load(cfg.function, "algorithm.loss.function")

    def checked(logprobs_bt: jax.Array, **arrays: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        with user_code.blamed(cfg.function):
            loss, metrics = own(logprobs_bt, **arrays)
            if jnp.shape(loss) or any(jnp.shape(value) for value in metrics.values()):
                raise UserCodeError(
                    f"{cfg.function}: the loss and its metrics must be sums over the batch, of "
                    f"shape (); the loss is {jnp.shape(loss)}"
                )
            _check_names(metrics, cfg.function)
        return loss, {**metrics, "tokens": (arrays["weights_bt"] > 0).astype(jnp.float32).sum()}

    return checked


def _check_names(metrics: Mapping[str, jax.Array], function: str) -> None:
    """Raises UserCodeError: metrics that the step cannot write, or lacks the other half of."""
    bad_names = [name for name in metrics if name != "tokens" and not METRIC_NAME.fullmatch(name)]
    if bad_names:
        raise UserCodeError(
            f"{function}: metrics are named group/name, of A-Z a-z 0-9 _ . -, got {bad_names}"
        )
    pair = {"offpolicy/weight", "offpolicy/weight_squared"}
    if len(pair & metrics.keys()) == 1:
        raise UserCodeError(
            f"{function}: the effective sample size needs both of {sorted(pair)}, got "
            f"{sorted(pair & metrics.keys())}; return both or none"
        )


def importance_weights(old_to_behaviour_bt: jax.Array, cfg: PolicyLossConfig) -> jax.Array:
    """Weights from log(old / behaviour): truncated at the cap (TIS), or 0 outside it (MIS)."""
    ratio_bt = jnp.exp(old_to_behaviour_bt)
    if cfg.importance == "truncate":
        return jnp.clip(ratio_bt, cfg.importance_floor, cfg.importance_cap)
    if cfg.importance == "mask":
        inside_bt = (ratio_bt <= cfg.importance_cap) & (ratio_bt >= 1.0 / cfg.importance_cap)
        return jnp.where(inside_bt, ratio_bt, 0.0)
    return jnp.ones_like(ratio_bt)


def kl(to_ref_bt: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Estimates KL(policy || ref) from one sample of the policy, d = log(ref / policy).

    k1 = -d is unbiased, but its gradient in a loss is 0 on average: use it in the reward.
    k2 = d**2 / 2. k3 = exp(d) - d - 1 is unbiased and never negative (GRPO's, arXiv:2402.03300,
    eq. 4). Source: J. Schulman, Approximating KL divergence, 2020.
    """
    if estimator == "k1":
        return -to_ref_bt
    if estimator == "k2":
        return jnp.square(to_ref_bt) / 2
    return jnp.exp(to_ref_bt) - to_ref_bt - 1.0


def turn_mean(x_bt: jax.Array, mask_bt: jax.Array, turn_ids_bt: jax.Array) -> jax.Array:
    """Each token's value is replaced by the mean over its turn's sampled tokens; 0 elsewhere."""
    tokens = x_bt.shape[1]

    def one_row(x_t: jax.Array, mask_t: jax.Array, turn_ids_t: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(x_t * mask_t, turn_ids_t, tokens + 1)
        counts = jax.ops.segment_sum(mask_t, turn_ids_t, tokens + 1)
        return (sums / jnp.maximum(counts, 1.0))[turn_ids_t] * mask_t

    return jax.vmap(one_row)(x_bt, mask_bt, turn_ids_bt)


def value_loss(
    values_bt: jax.Array,
    *,
    old_values_bt: jax.Array,
    returns_bt: jax.Array,
    weights_bt: jax.Array,
    clip: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """sum w max((v - R)**2, (v_old + clip(v - v_old) - R)**2) / 2; without the max if clip is 0.

    Values and returns at position t are of the state before token t was sampled. The sums are over
    the tokens with a weight; `explained_variance` takes them.
    Source: PPO's reference implementation, openai/baselines ppo2/model.py.
    """
    old_values_bt, returns_bt = jax.lax.stop_gradient((old_values_bt, returns_bt))
    squared_bt = jnp.square(values_bt - returns_bt)
    if clip > 0:
        near_bt = old_values_bt + jnp.clip(values_bt - old_values_bt, -clip, clip)
        squared_bt = jnp.maximum(squared_bt, jnp.square(near_bt - returns_bt))
    inside_bt = weights_bt > 0
    loss = jnp.where(inside_bt, 0.5 * squared_bt * weights_bt, 0.0).sum()
    error_bt = jnp.where(inside_bt, values_bt - returns_bt, 0.0)
    kept_bt = jnp.where(inside_bt, returns_bt, 0.0)
    return loss, {
        "critic/error": jnp.abs(error_bt).sum(),
        "critic/squared": (error_bt**2).sum(),
        "critic/bias": error_bt.sum(),
        "critic/return": kept_bt.sum(),
        "critic/return_squared": (kept_bt**2).sum(),
    }


def explained_variance(means: Mapping[str, jax.Array]) -> jax.Array:
    """1 - Var(v - R) / Var(R), of the means of `value_loss`'s sums.

    1: the critic knows every return; 0: it knows no more than their mean; 0 where all are equal.
    Source: openai/baselines common/math_util.py.
    """
    error_variance = means["critic/squared"] - means["critic/bias"] ** 2
    variance = means["critic/return_squared"] - means["critic/return"] ** 2
    known = variance > 1e-8
    return jnp.where(known, 1.0 - error_variance / jnp.where(known, variance, 1.0), 0.0)


def supervised_loss(
    logprobs_bt: jax.Array, *, weights_bt: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the demonstrated (or kept) tokens, as a weighted sum."""
    inside_bt = weights_bt > 0
    loss = -jnp.where(inside_bt, logprobs_bt * weights_bt, 0.0).sum()
    nll_sum = -jnp.where(inside_bt, logprobs_bt, 0.0).sum()
    return loss, {"tokens": inside_bt.sum().astype(jnp.float32), "sft/loss": nll_sum}
