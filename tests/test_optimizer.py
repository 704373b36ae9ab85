"""The optimizers and their schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from uirl_jax.checkpoints import array_format
from uirl_jax.learner import state as learner_state
from uirl_jax.learner.state import OptimizerConfig

NAMES = ["adamw", "muon", "adafactor", "sgd"]
# Of a stacked projection, its bias and an embedding: only the first is decayed.
WEIGHTS = {
    "layers": {"kernel": jnp.linspace(-1.0, 2.0, 24).reshape(2, 3, 4), "bias": jnp.ones((2, 4))},
    "embed": {"embedding": jnp.ones((5, 4))},
}


def trained(cfg: OptimizerConfig, grads: list[dict], weights: dict = WEIGHTS) -> list[dict]:
    """The weights after each update."""
    optimizer = learner_state.make_optimizer(cfg, total_updates=10)
    state, after = optimizer.init(weights), []
    for grad in grads:
        updates, state = jax.jit(optimizer.update)(grad, state, weights)
        weights = optax.apply_updates(weights, updates)
        after.append(weights)
    return after


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_updates_without_gradient_take_lr_times_weight_decay_off_matrices(name, warmup_steps):
    cfg = OptimizerConfig(name, lr=0.1, warmup_steps=warmup_steps, weight_decay=0.5)
    schedule = learner_state.make_schedule(cfg, 10)
    expected = dict(WEIGHTS["layers"])["kernel"]
    none = jax.tree.map(jnp.zeros_like, WEIGHTS)
    for update, after in enumerate(trained(cfg, [none] * 3)):
        expected = expected * (1.0 - float(schedule(update)) * 0.5)
        # float32 rounds the product and the difference: a few 1e-7 of weights up to 2.
        np.testing.assert_allclose(after["layers"]["kernel"], expected, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(after["layers"]["bias"], WEIGHTS["layers"]["bias"])
        np.testing.assert_array_equal(after["embed"]["embedding"], 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_beside_the_gradients_part_of_an_update(name):
    """Momentum, moments and clipping see the gradient alone: the first update's decay adds up."""
    grad = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), WEIGHTS)
    plain = trained(OptimizerConfig(name, lr=0.1), [grad])[0]["layers"]["kernel"]
    decayed = trained(OptimizerConfig(name, lr=0.1, weight_decay=0.5), [grad])[0]
    expected = plain - 0.1 * 0.5 * WEIGHTS["layers"]["kernel"]
    np.testing.assert_allclose(decayed["layers"]["kernel"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_arrays_of_the_state_keep_the_names_that_checkpoints_have(weight_decay):
    def names(name: str) -> list[str]:
        cfg = OptimizerConfig(name, lr=0.1, weight_decay=weight_decay)
        state = learner_state.make_optimizer(cfg, 10).init({"kernel": jnp.ones((2, 3))})
        return list(array_format.named_leaves(state))

    assert names("sgd") == ["1/1/0/trace/kernel", "1/1/1/count"]
    assert names("adafactor") == [
        *("1/0/count", "1/0/v_row/kernel", "1/0/v_col/kernel", "1/0/v/kernel", "1/2/count"),
    ]


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_warm_up_rises_from_its_first_part_to_the_rate(kind):
    cfg = OptimizerConfig(lr=0.4, warmup_steps=4, schedule=kind)
    schedule = learner_state.make_schedule(cfg, 20)
    rates = [float(schedule(update)) for update in range(5)]
    np.testing.assert_allclose(rates, [0.1, 0.175, 0.25, 0.325, 0.4], rtol=1e-6)


def test_cosine_ends_at_a_tenth_of_the_rate():
    for warmup_steps in (0, 4):
        cfg = OptimizerConfig(lr=0.4, warmup_steps=warmup_steps, schedule="cosine")
        schedule = learner_state.make_schedule(cfg, 20)
        assert float(schedule(warmup_steps)) == pytest.approx(0.4)
        middle = warmup_steps + (20 - warmup_steps) // 2
        assert float(schedule(middle)) == pytest.approx((0.4 + 0.04) / 2)
        assert float(schedule(20)) == pytest.approx(0.04)
