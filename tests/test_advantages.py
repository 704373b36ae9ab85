import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uirl_jax.errors import TrainingError
from uirl_jax.rl.advantages import group_normalised


def oracle(rewards: list[float], epsilon: float) -> list[float]:
    """The paper's sentence, in plain Python."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + epsilon) for r in rewards]


def test_group_normalised_of_mixed_rewards_equals_oracle():
    rewards = [0.0, 1.0, 1.0, 0.25, 0.0, -2.0]
    np.testing.assert_allclose(
        group_normalised(np.array(rewards)), oracle(rewards, 1e-6), rtol=1e-6
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-3, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_group_normalised_of_equal_rewards_is_exactly_zero(reward: float, size: int):
    # 0.1 summed seven times and divided is not 0.1: the result may not be left to rounding.
    assert not group_normalised(np.full(size, reward)).any()


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=16), st.randoms())
def test_group_normalised_moves_with_its_members(rewards: list[int], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_normalised(np.array(rewards, np.float32))
    shuffled = group_normalised(np.array(rewards, np.float32)[order])
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-6)
    assert abs(straight.sum()) < 1e-4


@pytest.mark.parametrize("rewards", [[1.0, np.nan], [np.inf, 0.0], [], [[1.0, 2.0]]])
def test_group_normalised_of_unusable_rewards_raises(rewards):
    with pytest.raises(TrainingError, match="rewards of a group"):
        group_normalised(np.array(rewards))
