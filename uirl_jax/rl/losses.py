"""Losses over token logprobs, as weighted sums. Pure JAX, no model.

Every function here takes float32[B,T] arrays whose position t is about token t itself, and weights:
0 where the policy did not sample the token, elsewhere the token's share in the mean that the config
asks for (rl.weights). The weights of all of a step's batches add up to 1, so the loss of a step is
the plain sum of its batches' losses, and rows, packing and padding mean nothing.

    token      p  p  s  s  s  p  p  s  s  .        p prompt, s sampled, . padding
    weights    0  0 .2 .2 .2  0  0 .2 .2  0        token mean over this row alone
    turn_ids   0  0  1  1  1  0  0  2  2  0        one number a turn, within the row
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from uirl_jax.errors import ConfigError

# A ratio of exp(20) is beyond any use, and exp of more overflows float32 (a guard, not a
# tuning knob).
MAX_LOG_RATIO = 20.0

KlEstimator = Literal["k1", "k2", "k3"]


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The clipped policy-gradient loss and what is added to it. Defaults are GRPO's."""

    clip_low: float = 0.2  # PPO's range
    clip_high: float = 0.2  # DAPO ("clip higher") raises the upper side only, to 0.28
    ratio: Literal["token", "turn"] = "token"  # turn: one ratio for all a turn's tokens, GSPO
    kl_coefficient: float = 0.01  # against the base, adapters off
    kl_estimator: KlEstimator = "k3"
    # reward: the coefficient times k1 is taken off the rewards instead, before the advantages.
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coefficient: float = (
        0.0  # a bonus for the entropy of every sampled token's distribution
    )
    # old / behaviour, for the actor's lag: truncate (TIS) caps it; mask leaves a token out whose
    # weight is beyond the cap or its inverse; none for rollouts that are taken as on-policy.
    importance: Literal["truncate", "mask", "none"] = "truncate"
    importance_cap: float = 2.0
    # With truncate: no weight is less. A stored success (algorithm.replay) of what the policy has
    # lost since weighs next to nothing at 0; at 1 it counts as if it were sampled now, as in ARPO.
    importance_floor: float = dataclasses.field(default=0.0, metadata={"min": 0.0})

    def __post_init__(self) -> None:
        if not 0 <= self.importance_floor <= self.importance_cap:
            raise ConfigError(
                f"loss.importance_floor={self.importance_floor}: expected between 0 and "
                f"loss.importance_cap={self.importance_cap}"
            )
        if self.importance_floor and self.importance != "truncate":
            raise ConfigError(
                f"loss.importance_floor={self.importance_floor}: only loss.importance='truncate' "
                f"has one, and it is {self.importance!r}"
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
    cfg.ratio="turn" it is the geometric mean over a turn's tokens, the same for all of them (GSPO,
    arXiv:2507.18071, eq. 5 and 7; the gradient is eq. 10's). c = old / behaviour corrects for the
    actor's lag without gradient (AReaL's decoupled objective, arXiv:2505.24298, eq. 5).

    Args:
      logprobs_bt: of the policy that is being trained; with entropies_bt the only gradient.
      old_bt, behaviour_bt, ref_bt: of the learner's policy at the start of the update, of the actor
        when it sampled, and of the base (adapters off).
      turn_ids_bt: int32, from 1, different for the turns of a row; 0 where nothing was sampled.
      entropies_bt: of the distributions that the tokens were sampled from; for the bonus.
    Returns:
      (loss, metrics): both sums over the batch, which add up over a step's batches; metrics are
      means over sampled tokens once they are divided by "tokens".
    """
    mask_bt = (weights_bt > 0).astype(jnp.float32)
    old_bt, behaviour_bt, ref_bt = jax.lax.stop_gradient((old_bt, behaviour_bt, ref_bt))

    def log_ratio(upper_bt: jax.Array, lower_bt: jax.Array) -> jax.Array:
        # Masked before exp, so that garbage at padding can become neither inf nor, in the gradient,
        # 0 * inf.
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
    # Where nothing was sampled there is anything, even NaN: not multiplied by 0, left out.
    loss = jnp.where(mask_bt > 0, loss_bt * weights_bt, 0.0).sum()

    def total(x_bt: jax.Array) -> jax.Array:
        return jnp.where(mask_bt > 0, x_bt, 0.0).sum()

    was_clipped_bt = ratio_bt * advantages_bt > clipped_bt * advantages_bt
    metrics = {
        "tokens": mask_bt.sum(),
        "actor/policy_loss": total(-correction_bt * surrogate_bt),
        "actor/kl_loss": total(kl_bt),
        "actor/clip_fraction": total(was_clipped_bt.astype(jnp.float32)),
        # Without the distributions' own: the one-sample estimate, of the sampled tokens.
        "actor/entropy": total(-logprobs_bt if entropies_bt is None else entropies_bt),
        "actor/old_kl": total(kl(log_ratio(logprobs_bt, old_bt), "k3")),  # KL(old || policy)
        "offpolicy/drift": total(jnp.abs(old_bt - behaviour_bt)),
        "offpolicy/weight": total(correction_bt),
        "offpolicy/weight_squared": total(jnp.square(correction_bt)),
    }
    return loss, metrics


def importance_weights(old_to_behaviour_bt: jax.Array, cfg: PolicyLossConfig) -> jax.Array:
    """Of log(old / behaviour): truncated at the cap (TIS), or 0 beyond it on either side (MIS)."""
    ratio_bt = jnp.exp(old_to_behaviour_bt)
    if cfg.importance == "truncate":
        return jnp.clip(ratio_bt, cfg.importance_floor, cfg.importance_cap)
    if cfg.importance == "mask":
        inside_bt = (ratio_bt <= cfg.importance_cap) & (ratio_bt >= 1.0 / cfg.importance_cap)
        return jnp.where(inside_bt, ratio_bt, 0.0)
    return jnp.ones_like(ratio_bt)


def kl(to_ref_bt: jax.Array, estimator: KlEstimator) -> jax.Array:
    """KL(policy || ref) from one sample of the policy, d = log(ref / policy).

    k1 = -d is unbiased, and its gradient in a loss is 0 on average: it belongs in the reward.
    k2 = d**2 / 2. k3 = exp(d) - d - 1 is unbiased and never negative (GRPO's, arXiv:2402.03300,
    eq. 4). Source: J. Schulman, Approximating KL divergence, 2020.
    """
    if estimator == "k1":
        return -to_ref_bt
    if estimator == "k2":
        return jnp.square(to_ref_bt) / 2
    return jnp.exp(to_ref_bt) - to_ref_bt - 1.0


def turn_mean(x_bt: jax.Array, mask_bt: jax.Array, turn_ids_bt: jax.Array) -> jax.Array:
    """Every token's value becomes the mean over its turn's sampled tokens; 0 outside of turns."""
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
    """sum w max((v - R)**2, (v_old + clip(v - v_old) - R)**2) / 2; clip 0 takes the first alone.

    Args: as above; values and returns at position t are of the state before token t was sampled.
    Source: PPO as released, openai/baselines ppo2/model.py.
    """
    old_values_bt, returns_bt = jax.lax.stop_gradient((old_values_bt, returns_bt))
    squared_bt = jnp.square(values_bt - returns_bt)
    if clip > 0:
        near_bt = old_values_bt + jnp.clip(values_bt - old_values_bt, -clip, clip)
        squared_bt = jnp.maximum(squared_bt, jnp.square(near_bt - returns_bt))
    inside_bt = weights_bt > 0
    loss = jnp.where(inside_bt, 0.5 * squared_bt * weights_bt, 0.0).sum()
    error_bt = jnp.where(inside_bt, values_bt - returns_bt, 0.0)
    return loss, {"critic/error": jnp.abs(error_bt).sum(), "critic/squared": (error_bt**2).sum()}


def supervised_loss(
    logprobs_bt: jax.Array, *, weights_bt: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the demonstrated (or kept) tokens."""
    inside_bt = weights_bt > 0
    loss = -jnp.where(inside_bt, logprobs_bt * weights_bt, 0.0).sum()
    nll_sum = -jnp.where(inside_bt, logprobs_bt, 0.0).sum()
    return loss, {"tokens": inside_bt.sum().astype(jnp.float32), "sft/loss": nll_sum}
