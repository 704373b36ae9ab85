"""Losses against loops over the papers' equations, values and gradients (finite differences)."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uirl_jax.rl import losses
from uirl_jax.rl.losses import PolicyLossConfig

CFG = PolicyLossConfig(clip_low=0.2, clip_high=0.3, kl_coefficient=0.05, importance_cap=1.5)
VARIANTS = [
    dataclasses.replace(
        CFG, ratio=ratio, kl_estimator=kl, kl_in=kl_in, importance=importance, entropy_coefficient=h
    )
    for ratio, kl, kl_in, importance, h in [
        *itertools.product(("token", "turn"), ("k1", "k2", "k3"), ["loss"], ["truncate"], [0.0]),
        ("token", "k3", "reward", "truncate", 0.0),
        ("token", "k3", "loss", "mask", 0.1),
        ("turn", "k3", "loss", "none", 0.1),
    ]
] + [dataclasses.replace(CFG, importance_floor=0.9)]


def example(seed: int = 0, rows: int = 3, tokens: int = 11) -> dict[str, np.ndarray]:
    """Rows of a few turns each, of one to three tokens, with something between them."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, (rows, tokens))
    turn_ids = np.zeros((rows, tokens), np.int32)
    for row in turn_ids:
        at = int(rng.integers(0, 2))
        for turn in itertools.count(1):
            length = int(rng.integers(1, 4))
            row[at : at + length] = turn
            at += length + int(rng.integers(0, 3))
            if at >= tokens:
                break
    arrays = {
        "logprobs_bt": logprobs,
        "old_bt": logprobs + rng.normal(0, 0.4, logprobs.shape),
        "behaviour_bt": logprobs + rng.normal(0, 0.6, logprobs.shape),
        "ref_bt": logprobs + rng.normal(0, 0.5, logprobs.shape),
        "advantages_bt": rng.normal(0, 1, logprobs.shape),
        "weights_bt": rng.random(logprobs.shape) * (turn_ids > 0),
        "entropies_bt": rng.random(logprobs.shape),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()} | {
        "turn_ids_bt": turn_ids
    }


def oracle(e: dict[str, np.ndarray], cfg: PolicyLossConfig) -> float:
    """Equation by equation, token by token, in float64."""
    total = 0.0
    for at in np.ndindex(e["logprobs_bt"].shape):
        if not e["weights_bt"][at]:
            continue
        policy, old, behaviour, ref, advantage = (
            float(e[name][at])
            for name in ("logprobs_bt", "old_bt", "behaviour_bt", "ref_bt", "advantages_bt")
        )
        ratio = math.exp(policy - old)
        if cfg.ratio == "turn":  # (p(y) / p_old(y)) ** (1 / |y|)
            row, turn = at[0], e["turn_ids_bt"][at]
            of = (e["turn_ids_bt"][row] == turn) & (e["weights_bt"][row] > 0)
            both = (e[name][row][of].astype(np.float64).sum() for name in ("logprobs_bt", "old_bt"))
            upper, lower = both
            ratio = math.exp(upper - lower) ** (1 / of.sum())
        clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
        lag = math.exp(old - behaviour)
        correction = {
            "truncate": max(min(lag, cfg.importance_cap), cfg.importance_floor),
            "mask": lag if 1 / cfg.importance_cap <= lag <= cfg.importance_cap else 0.0,
            "none": 1.0,
        }[cfg.importance]
        loss = -correction * min(ratio * advantage, clipped * advantage)
        kl = {
            "k1": policy - ref,
            "k2": (policy - ref) ** 2 / 2,
            "k3": math.exp(ref - policy) - (ref - policy) - 1,
        }[cfg.kl_estimator]
        if cfg.kl_in == "loss":
            loss += cfg.kl_coefficient * kl
        loss -= cfg.entropy_coefficient * float(e["entropies_bt"][at])
        total += float(e["weights_bt"][at]) * loss
    return total


def loss(e: dict[str, np.ndarray], cfg: PolicyLossConfig = CFG):
    rest = {name: array for name, array in e.items() if name != "logprobs_bt"}
    return losses.clipped_policy_loss(e["logprobs_bt"], **rest, cfg=cfg)


@pytest.mark.parametrize("cfg", VARIANTS, ids=str)
def test_clipped_policy_loss_equals_oracle(cfg):
    for seed in range(3):
        e = example(seed)
        # float32 against float64
        assert float(loss(e, cfg)[0]) == pytest.approx(oracle(e, cfg), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("cfg", VARIANTS, ids=str)
def test_clipped_policy_loss_gradient_equals_finite_differences(cfg):
    e = example(1, rows=2, tokens=7)
    gradient = jax.grad(lambda x: loss(e | {"logprobs_bt": x}, cfg)[0])(e["logprobs_bt"])
    step = 1e-5
    for at in np.ndindex(e["logprobs_bt"].shape):
        sides = []
        for sign in (1, -1):
            moved = {name: array.astype(np.float64) for name, array in e.items()}
            moved["turn_ids_bt"] = e["turn_ids_bt"]
            moved["logprobs_bt"][at] += sign * step
            sides.append(oracle(moved, cfg))
        expected = (sides[0] - sides[1]) / (2 * step)
        assert float(gradient[at]) == pytest.approx(expected, abs=1e-5)


def test_clipped_policy_loss_entropy_bonus_has_the_gradient_of_its_weight():
    cfg = dataclasses.replace(CFG, entropy_coefficient=0.25)
    e = example(1)
    gradient = jax.grad(lambda x: loss(e | {"entropies_bt": x}, cfg)[0])(e["entropies_bt"])
    np.testing.assert_allclose(gradient, -0.25 * e["weights_bt"], atol=1e-7)


def test_clipped_policy_loss_metrics_are_the_sums_that_they_say():
    e = example(2)
    cfg = dataclasses.replace(CFG, importance="mask")
    _, metrics = loss(e, cfg)
    inside = e["weights_bt"] > 0
    lag = np.exp(e["old_bt"] - e["behaviour_bt"])[inside]
    weight = np.where((lag <= 1.5) & (lag >= 1 / 1.5), lag, 0.0)
    ratio = np.exp(e["logprobs_bt"] - e["old_bt"])[inside]
    advantage = e["advantages_bt"][inside]
    was_clipped = np.where(advantage > 0, ratio > 1.3, ratio < 0.8)
    expected = {
        "tokens": inside.sum(),
        "offpolicy/weight": weight.sum(),
        "offpolicy/weight_squared": (weight**2).sum(),
        "offpolicy/drift": np.abs(e["old_bt"] - e["behaviour_bt"])[inside].sum(),
        "actor/clip_fraction": was_clipped.sum(),
        "actor/entropy": e["entropies_bt"][inside].sum(),
        "actor/old_kl": (ratio - 1 - np.log(ratio)).sum(),
    }
    bins = np.histogram(
        np.clip(np.exp(e["logprobs_bt"] - e["behaviour_bt"])[inside], 0.01, 3.99),
        losses.RATIO_EDGES,
    )[0]
    assert np.count_nonzero(bins) > 3
    expected |= {f"{losses.RATIOS}/{number}": count for number, count in enumerate(bins)}
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4), name


def test_old_kl_is_on_average_that_of_the_old_policy_to_the_new_one():
    """Both tokens that the old policy may sample, with its chances for them."""
    old, new = np.array([0.1, 0.9]), np.array([0.005, 0.995])
    e = {name: array[:, :1] for name, array in example(rows=2).items()}
    e |= {"weights_bt": np.ones((2, 1), np.float32), "turn_ids_bt": np.ones((2, 1), np.int32)}
    e |= {"logprobs_bt": np.log(new)[:, None], "old_bt": np.log(old)[:, None]}
    alone = [{name: array[row : row + 1] for name, array in e.items()} for row in range(2)]
    sampled = [float(loss(one, CFG)[1]["actor/old_kl"]) for one in alone]
    assert old @ sampled == pytest.approx(float(old @ np.log(old / new)), rel=1e-5)


def test_clipped_policy_loss_outside_the_mask_has_gradient_exactly_zero():
    for cfg in VARIANTS:
        e = example(2)
        inside = e["weights_bt"] > 0
        garbage = np.where(inside, e["logprobs_bt"], np.nan).astype(np.float32)
        e["entropies_bt"] = np.where(inside, e["entropies_bt"], np.nan).astype(np.float32)
        gradient = jax.grad(lambda x, e=e, cfg=cfg: loss(e | {"logprobs_bt": x}, cfg)[0])(garbage)
        assert np.isfinite(gradient).all(), cfg
        assert not np.asarray(gradient)[~inside].any(), cfg
        assert np.isfinite(float(loss(e | {"logprobs_bt": garbage}, cfg)[0])), cfg


def test_clipped_policy_loss_with_zero_advantages_and_no_kl_has_no_gradient():
    for ratio in ("token", "turn"):
        e = example(3) | {"advantages_bt": np.zeros((3, 11), np.float32)}
        cfg = PolicyLossConfig(kl_coefficient=0.0, ratio=ratio)
        gradient = jax.grad(lambda x, e=e, cfg=cfg: loss(e | {"logprobs_bt": x}, cfg)[0])(
            e["logprobs_bt"]
        )
        assert not np.asarray(gradient).any()


def test_clipped_policy_loss_on_policy_has_the_gradient_of_reinforce():
    e = example(4)
    same = {name: e["logprobs_bt"] for name in ("old_bt", "behaviour_bt", "ref_bt")}
    gradient = jax.grad(lambda x: loss(e | same | {"logprobs_bt": x})[0])(e["logprobs_bt"])
    expected = -e["advantages_bt"] * e["weights_bt"]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_clipped_policy_loss_by_turns_on_policy_shares_a_turns_advantage():
    """GSPO at ratio 1: every token's gradient is the turn's weighted mean of the advantages."""
    e = example(4)
    same = {name: e["logprobs_bt"] for name in ("old_bt", "behaviour_bt", "ref_bt")}
    cfg = dataclasses.replace(CFG, ratio="turn")
    gradient = jax.grad(lambda x: loss(e | same | {"logprobs_bt": x}, cfg)[0])(e["logprobs_bt"])
    for row in range(3):
        for turn in range(1, e["turn_ids_bt"][row].max() + 1):
            of = e["turn_ids_bt"][row] == turn
            expected = -(e["advantages_bt"] * e["weights_bt"])[row][of].sum() / of.sum()
            np.testing.assert_allclose(np.asarray(gradient)[row][of], expected, atol=1e-6)


def test_clipped_policy_loss_of_nothing_sampled_is_zero():
    e = example(5) | {"weights_bt": np.zeros((3, 11), np.float32)}
    total, metrics = loss(e)
    assert float(total) == 0.0
    assert all(float(value) == 0.0 for value in metrics.values())


def test_clipped_policy_loss_with_absurd_logprobs_stays_finite():
    for cfg in VARIANTS:
        e = example(6) | {"old_bt": np.full((3, 11), -500.0, np.float32)}
        assert np.isfinite(float(loss(e, cfg)[0]))


def test_value_loss_equals_the_larger_of_clipped_and_unclipped():
    rng = np.random.default_rng(0)
    values, old, returns, weights = rng.normal(size=(4, 3, 5)).astype(np.float32)
    weights = np.maximum(weights, 0)

    def total(values, clip):
        result = 0.0
        for at in np.ndindex(values.shape):
            squares = [(values[at] - returns[at]) ** 2]
            if clip:
                near = old[at] + min(max(values[at] - old[at], -clip), clip)
                squares.append((near - returns[at]) ** 2)
            result += 0.5 * weights[at] * max(squares)
        return result

    for clip in (0.0, 0.3):

        def loss(x, clip=clip):
            return losses.value_loss(
                x, old_values_bt=old, returns_bt=returns, weights_bt=weights, clip=clip
            )[0]

        assert float(loss(values)) == pytest.approx(total(values, clip), rel=1e-5)
        gradient = jax.grad(loss)(values)
        for at in np.ndindex(values.shape):
            sides = [values.astype(np.float64) for _ in range(2)]
            sides[0][at] += 1e-6
            sides[1][at] -= 1e-6
            expected = (total(sides[0], clip) - total(sides[1], clip)) / 2e-6
            assert float(gradient[at]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
def test_explained_variance_is_the_share_of_the_returns_that_the_critic_knows(skill):
    rng = np.random.default_rng(1)
    returns, noise = rng.normal(3.0, 2.0, size=(2, 4, 6)).astype(np.float32)
    values = skill * returns + (1 - skill) * noise + 0.5  # a constant error explains as much
    weights = (rng.random((4, 6)) < 0.7).astype(np.float32)
    _, sums = losses.value_loss(
        jnp.asarray(values),
        old_values_bt=values,
        returns_bt=returns,
        weights_bt=weights,
        clip=0.2,
    )
    means = {name: value / weights.sum() for name, value in sums.items()}
    inside = weights > 0
    error = (values - returns)[inside]
    assert float(means["critic/bias"]) == pytest.approx(float(error.mean()), rel=1e-5)
    expected = 1 - error.var() / returns[inside].var()
    assert float(losses.explained_variance(means)) == pytest.approx(float(expected), abs=1e-4)
    assert skill < 1.0 or expected == pytest.approx(1.0)


def test_explained_variance_of_equal_returns_is_0():
    same = jnp.full((1, 3), 0.5)
    _, sums = losses.value_loss(
        same + 1.0, old_values_bt=same, returns_bt=same, weights_bt=jnp.ones((1, 3)), clip=0.0
    )
    assert float(losses.explained_variance({n: s / 3 for n, s in sums.items()})) == 0.0


def test_supervised_loss_is_the_weighted_sum_of_cross_entropies():
    e = example(7)
    total, metrics = losses.supervised_loss(
        jnp.asarray(e["logprobs_bt"]), weights_bt=jnp.asarray(e["weights_bt"])
    )
    inside = e["weights_bt"] > 0
    assert float(total) == pytest.approx(float(-(e["logprobs_bt"] * e["weights_bt"]).sum()), 1e-6)
    assert float(metrics["tokens"]) == inside.sum()
    assert float(metrics["sft/loss"]) == pytest.approx(float(-e["logprobs_bt"][inside].sum()), 1e-6)
