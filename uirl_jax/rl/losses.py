"""Losses over token logprobs, as unreduced sums with their denominator. Pure JAX, no model.

Every function here takes float32[B,T] arrays whose position t is about token t itself, and a
completion mask that is 1 where the policy sampled that token. The caller divides once, after the
microbatches; an empty mask has denominator 0 and the caller's quotient is defined as 0.

    token      p  p  s  s  s  p  p  s  s  .        p prompt, s sampled, . padding
    mask       0  0  1  1  1  0  0  1  1  0        denominator 5
"""

import dataclasses

import jax
import jax.numpy as jnp

# A ratio of exp(20) is beyond any use, and exp of more overflows float32 (a guard, not a
# tuning knob).
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """The clipped policy-gradient loss with a KL penalty against the base."""

    clip_low: float = 0.2  # PPO's range; DAPO raises the upper side only
    clip_high: float = 0.2
    kl_coefficient: float = 0.01  # of the k3 estimator against the base, adapters off
    importance_cap: float = 2.0  # truncates old / behaviour (TIS), 1 at staleness 0; 0: not used


def clipped_policy_loss(
    logprobs_bt: jax.Array,
    *,
    old_bt: jax.Array,
    behaviour_bt: jax.Array,
    ref_bt: jax.Array,
    advantages_bt: jax.Array,
    completion_mask_bt: jax.Array,
    cfg: GrpoConfig,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """-E[w min(r A, clip(r) A)] + beta KL(policy || base), token by token.

    r = policy / old is clipped (PPO, arXiv:1707.06347, eq. 7; GRPO, arXiv:2402.03300, eq. 3),
    w = min(old / behaviour, cap) corrects for the actor's lag without gradient (AReaL's decoupled
    objective, arXiv:2505.24298, eq. 5, truncated), and the KL term is k3, exp(d) - d - 1 with
    d = ref - policy (arXiv:2402.03300, eq. 4).

    Args:
      logprobs_bt: of the policy that is being trained; the only argument with a gradient.
      old_bt, behaviour_bt, ref_bt: of the learner's policy at the start of the update, of the actor
        when it sampled, and of the base (adapters off).
      advantages_bt: 0 outside the mask.
    Returns:
      (sum, denominator, sums of metrics over the same tokens), each a float32 scalar.
    """
    mask_bt = completion_mask_bt.astype(jnp.float32)
    old_bt, behaviour_bt, ref_bt = jax.lax.stop_gradient((old_bt, behaviour_bt, ref_bt))

    def log_ratio(upper_bt: jax.Array, lower_bt: jax.Array) -> jax.Array:
        # Masked before exp, so that garbage at padding can become neither inf nor, in the gradient,
        # 0 * inf.
        masked_bt = jnp.where(mask_bt > 0, upper_bt - lower_bt, 0.0)
        return jnp.clip(masked_bt, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    ratio_bt = jnp.exp(log_ratio(logprobs_bt, old_bt))
    clipped_bt = jnp.clip(ratio_bt, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    surrogate_bt = jnp.minimum(ratio_bt * advantages_bt, clipped_bt * advantages_bt)
    weight_bt = jnp.ones_like(mask_bt)
    if cfg.importance_cap > 0:
        weight_bt = jnp.minimum(jnp.exp(log_ratio(old_bt, behaviour_bt)), cfg.importance_cap)

    to_ref_bt = log_ratio(ref_bt, logprobs_bt)
    kl_bt = jnp.exp(to_ref_bt) - to_ref_bt - 1.0

    policy_sum = -(weight_bt * surrogate_bt * mask_bt).sum()
    kl_sum = (kl_bt * mask_bt).sum()
    was_clipped_bt = (ratio_bt * advantages_bt > clipped_bt * advantages_bt).astype(jnp.float32)
    drift_bt = jnp.abs(old_bt - behaviour_bt)
    metrics = {
        "actor/policy_loss": policy_sum,
        "actor/kl_loss": kl_sum,
        "actor/clip_fraction": (was_clipped_bt * mask_bt).sum(),
        # Of the sampled tokens: a one-sample estimate of the entropy at temperature 1.
        "actor/entropy": -(jnp.where(mask_bt > 0, logprobs_bt, 0.0)).sum(),
        "offpolicy/drift": jnp.where(mask_bt > 0, drift_bt, 0.0).sum(),
        "offpolicy/weight": (weight_bt * mask_bt).sum(),
    }
    return policy_sum + cfg.kl_coefficient * kl_sum, mask_bt.sum(), metrics


def supervised_loss(
    logprobs_bt: jax.Array, *, completion_mask_bt: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the demonstrated tokens: (sum, denominator, sums of metrics)."""
    mask_bt = completion_mask_bt.astype(jnp.float32)
    nll_sum = -(jnp.where(mask_bt > 0, logprobs_bt, 0.0)).sum()
    return nll_sum, mask_bt.sum(), {"sft/loss": nll_sum}
