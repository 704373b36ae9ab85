import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uirl_jax.errors import TrainingError
from uirl_jax.rl.weights import token_weights

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(LENGTHS)
def test_token_mean_and_trajectory_mean_are_the_means_of_plain_loops(lengths: list[int]):
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=n) for n in lengths]

    def weighted(aggregation, **options):
        weights = token_weights(lengths, aggregation, **options)
        return sum(w * of.sum() for w, of in zip(weights, losses, strict=True))

    every = np.concatenate(losses)
    assert weighted("token_mean") == pytest.approx(every.mean() if len(every) else 0.0)
    means = [of.mean() if len(of) else 0.0 for of in losses]
    assert weighted("trajectory_mean") == pytest.approx(np.mean(means))
    constant = sum(of.sum() for of in losses) / (len(losses) * 20)
    assert weighted("constant_length", max_tokens=20) == pytest.approx(constant)


def test_token_weights_of_nothing_are_zero_or_finite():
    assert token_weights([], "token_mean") == []
    assert np.isfinite(token_weights([0, 0], "token_mean")).all()


def test_constant_length_without_a_length_raises():
    with pytest.raises(TrainingError, match="constant_length over 0 tokens"):
        token_weights([3], "constant_length")
