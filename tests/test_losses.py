"""Losses against loops over the papers' equations, values and gradients (finite differences)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uirl_jax.rl import losses

CFG = losses.GrpoConfig(clip_low=0.2, clip_high=0.3, kl_coefficient=0.05, importance_cap=1.5)


def example(seed: int = 0, rows: int = 3, tokens: int = 11) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (rows, tokens))
    arrays = {
        "logprobs_bt": logprobs,
        "old_bt": logprobs + rng.normal(0, 0.4, logprobs.shape),
        "behaviour_bt": logprobs + rng.normal(0, 0.6, logprobs.shape),
        "ref_bt": logprobs + rng.normal(0, 0.5, logprobs.shape),
        "advantages_bt": rng.normal(0, 1, logprobs.shape),
        "completion_mask_bt": (rng.random(logprobs.shape) < 0.6).astype(np.float64),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def oracle(e: dict[str, np.ndarray], cfg: losses.GrpoConfig) -> tuple[float, float]:
    """Equation by equation, token by token, in float64."""
    total = count = 0.0
    for at in np.ndindex(e["logprobs_bt"].shape):
        if not e["completion_mask_bt"][at]:
            continue
        policy, old, behaviour, ref, advantage = (
            float(e[name][at])
            for name in ("logprobs_bt", "old_bt", "behaviour_bt", "ref_bt", "advantages_bt")
        )
        ratio = math.exp(policy - old)
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        weight = min(math.exp(old - behaviour), cfg.importance_cap)
        k3 = math.exp(ref - policy) - (ref - policy) - 1
        total += -weight * min(ratio * advantage, clipped * advantage) + cfg.kl_coefficient * k3
        count += 1
    return total, count


def loss(e: dict[str, np.ndarray], cfg: losses.GrpoConfig = CFG):
    rest = {name: array for name, array in e.items() if name != "logprobs_bt"}
    return losses.clipped_policy_loss(e["logprobs_bt"], **rest, cfg=cfg)


def test_clipped_policy_loss_equals_oracle():
    for seed in range(5):
        e = example(seed)
        total, count, _ = loss(e)
        expected_total, expected_count = oracle(e, CFG)
        assert float(total) == pytest.approx(expected_total, rel=1e-5)  # float32 against float64
        assert float(count) == expected_count


def test_clipped_policy_loss_gradient_equals_finite_differences():
    e = example(1, rows=2, tokens=6)
    gradient = jax.grad(lambda x: loss(e | {"logprobs_bt": x})[0])(e["logprobs_bt"])
    step = 1e-5
    for at in np.ndindex(e["logprobs_bt"].shape):
        sides = []
        for sign in (1, -1):
            moved = {name: array.astype(np.float64) for name, array in e.items()}
            moved["logprobs_bt"][at] += sign * step
            sides.append(oracle(moved, CFG)[0])
        assert float(gradient[at]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-4)


def test_clipped_policy_loss_outside_mask_has_gradient_exactly_zero():
    e = example(2)
    garbage = np.where(e["completion_mask_bt"] > 0, e["logprobs_bt"], -1e30).astype(np.float32)
    gradient = jax.grad(lambda x: loss(e | {"logprobs_bt": x})[0])(garbage)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[e["completion_mask_bt"] == 0].any()


def test_clipped_policy_loss_with_zero_advantages_and_no_kl_has_no_gradient():
    e = example(3) | {"advantages_bt": np.zeros((3, 11), np.float32)}
    cfg = losses.GrpoConfig(kl_coefficient=0.0)
    gradient = jax.grad(lambda x: loss(e | {"logprobs_bt": x}, cfg)[0])(e["logprobs_bt"])
    assert not np.asarray(gradient).any()


def test_clipped_policy_loss_on_policy_has_the_gradient_of_reinforce():
    e = example(4)
    same = {name: e["logprobs_bt"] for name in ("old_bt", "behaviour_bt", "ref_bt")}
    gradient = jax.grad(lambda x: loss(e | same | {"logprobs_bt": x})[0])(e["logprobs_bt"])
    expected = -e["advantages_bt"] * e["completion_mask_bt"]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_clipped_policy_loss_of_empty_mask_is_zero_over_zero_tokens():
    e = example(5) | {"completion_mask_bt": np.zeros((3, 11), np.float32)}
    total, count, metrics = loss(e)
    assert float(total) == 0.0 and float(count) == 0.0
    assert all(float(value) == 0.0 for value in metrics.values())


def test_clipped_policy_loss_with_absurd_logprobs_stays_finite():
    e = example(6) | {"old_bt": np.full((3, 11), -500.0, np.float32)}
    assert np.isfinite(float(loss(e)[0]))


def test_supervised_loss_is_the_masked_sum_of_cross_entropies():
    e = example(7)
    total, count, _ = losses.supervised_loss(
        jnp.asarray(e["logprobs_bt"]), completion_mask_bt=jnp.asarray(e["completion_mask_bt"])
    )
    expected = -(e["logprobs_bt"] * e["completion_mask_bt"]).sum()
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(count) == e["completion_mask_bt"].sum()
