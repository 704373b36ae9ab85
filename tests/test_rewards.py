import dataclasses

import numpy as np
import pytest

from tests.sample_trajectories import make_trajectory
from uirl_jax.errors import ConfigError, TrainingError
from uirl_jax.rl.rewards import RewardConfig, overlong_penalty, token_rewards

# Turns of two, three and four sampled tokens that were paid 0, 0.1 and 0.2; the episode 0.5.
EPISODE = make_trajectory(versions=(0, 0, 0), reward=0.5)


def test_token_rewards_outcome_stands_at_the_last_token():
    assert token_rewards(EPISODE, RewardConfig()).tolist() == [0.0] * 8 + [0.5]


def test_token_rewards_of_turns_stand_at_their_ends_and_mix_with_the_outcome():
    got = token_rewards(EPISODE, RewardConfig(outcome=2.0, turns=10.0))
    np.testing.assert_allclose(got, [0, 0, 0, 0, 1.0, 0, 0, 0, 2.0 + 1.0])


def test_token_rewards_kl_comes_off_token_by_token():
    kl_s = np.linspace(-1, 1, 9)
    got = token_rewards(EPISODE, RewardConfig(), kl_s=kl_s, kl_coefficient=0.1)
    np.testing.assert_allclose(got, np.array([0.0] * 8 + [0.5]) - 0.1 * kl_s)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0), (16, 0), (17, -0.25), (19, -0.75), (20, -1), (99, -1)]
)
def test_overlong_penalty_is_the_papers_ramp(tokens: int, penalty: float):
    cfg = RewardConfig(overlong_max_tokens=20, overlong_buffer_tokens=4)
    assert overlong_penalty(tokens, cfg) == pytest.approx(penalty)


def test_token_rewards_overlong_episode_is_paid_less():
    cfg = RewardConfig(overlong_max_tokens=10, overlong_buffer_tokens=2)
    assert token_rewards(EPISODE, cfg)[-1] == pytest.approx(0.5 - 0.5)


def test_token_rewards_that_are_not_finite_name_the_episode():
    broken = dataclasses.replace(EPISODE, reward=float("nan"))
    with pytest.raises(TrainingError, match="episode e0: reward nan"):
        token_rewards(broken, RewardConfig())
    length = len(token_rewards(EPISODE, RewardConfig()))
    with pytest.raises(TrainingError, match="episode e0: the KL of its tokens is not finite"):
        token_rewards(EPISODE, RewardConfig(), kl_s=np.full(length, np.nan), kl_coefficient=0.1)


def test_token_rewards_of_an_episode_without_a_turn_are_none():
    assert token_rewards(dataclasses.replace(EPISODE, turns=()), RewardConfig()).shape == (0,)


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_reward_config_overlong_buffer_that_is_impossible_raises(buffer: int):
    with pytest.raises(ConfigError, match=f"overlong_buffer_tokens={buffer}, expected 1 to"):
        RewardConfig(overlong_max_tokens=10, overlong_buffer_tokens=buffer)
