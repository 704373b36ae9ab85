"""Advantages against the papers' sentences in plain Python, and GAE against two loops."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uirl_jax.errors import TrainingError
from uirl_jax.rl import advantages
from uirl_jax.rl.advantages import AdvantageConfig, batch_normalised, group_advantages, normalised

REWARDS = [0.0, 1.0, 1.0, 0.25, 0.0, -2.0]
HOWS = ["group_std", "group_mean", "group_ratio", "leave_one_out", "batch", "none"]
WITHIN_GROUPS = HOWS[:4]


def oracle(rewards: list[float], how: str) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return {
        "group_std": [(r - mean) / (deviation + 1e-6) for r in rewards],
        "group_mean": [r - mean for r in rewards],
        "group_ratio": [(r - mean) / (mean or 1) for r in rewards],
        "leave_one_out": [r - other for r, other in zip(rewards, others, strict=True)],
        "batch": rewards,
        "none": rewards,
    }[how]


@pytest.mark.parametrize("how", HOWS)
def test_normalised_equals_oracle(how):
    rewards = not_below_0(REWARDS) if how == "group_ratio" else REWARDS
    np.testing.assert_allclose(
        normalised(np.array(rewards), how), oracle(rewards, how), rtol=1e-6, atol=1e-12
    )


def not_below_0(rewards: list[float]) -> list[float]:
    return [abs(reward) for reward in rewards]


@pytest.mark.parametrize("successes", [1, 3, 8])
def test_maxrl_advantages_add_up_to_the_mean_gradient_of_the_successes(successes: int):
    """The paper's estimator: the mean score of the successes, minus the mean score of all."""
    rewards = np.array([1.0] * successes + [0.0] * (8 - successes))
    scores_gp = np.random.default_rng(0).normal(size=(8, 5))  # gradients of the log-likelihoods
    expected = scores_gp[:successes].mean(axis=0) - scores_gp.mean(axis=0)
    got = (normalised(rewards, "group_ratio")[:, None] * scores_gp).mean(axis=0)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_maxrl_advantages_without_a_success_are_zero_and_below_0_an_error():
    assert not normalised(np.zeros(4), "group_ratio").any()
    # Rewards that cancel are a mean of 0 and none of them is below it, whatever rounding leaves.
    for rounded in (0.1 + 0.2 - 0.3, 0.3 - 0.2 - 0.1):
        assert rounded and not normalised(np.array([rounded, 0.0]), "group_ratio").any()
    with pytest.raises(TrainingError, match=r"at least 0, got -0\.5; use"):
        normalised(np.array([1.0, -0.5]), "group_ratio")


@pytest.mark.parametrize("how", WITHIN_GROUPS)
@pytest.mark.parametrize("rewards", [REWARDS, [0.0] * 4, [0.3]])
def test_group_advantages_with_a_virtual_member_equal_those_of_a_group_that_has_it(how, rewards):
    rewards = not_below_0(rewards) if how == "group_ratio" else rewards
    cfg = AdvantageConfig(normalise=how, virtual_return=1.0)
    got = group_advantages([np.array([0.0, r]) for r in rewards], [[1, 1]] * len(rewards), cfg)
    expected = np.repeat(oracle([*rewards, 1.0], how)[:-1], 2)
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-6, atol=1e-7)


def test_group_advantages_of_a_group_as_good_as_its_virtual_member_are_zero():
    cfg = AdvantageConfig(virtual_return=0.1)
    assert not np.concatenate(group_advantages([np.array([0.1])] * 7, [[1]] * 7, cfg)).any()


@pytest.mark.parametrize("how", WITHIN_GROUPS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-3, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_normalised_equal_rewards_are_exactly_zero(how: str, reward: float, size: int):
    # 0.1 summed seven times and divided is not 0.1: the result may not be left to rounding.
    assert not normalised(np.full(size, reward), how).any()


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=16), st.randoms())
def test_group_advantages_move_with_the_members(rewards: list[int], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    members = [np.array([0.0, r]) for r in rewards]
    straight = group_advantages(members, [[1, 1]] * len(rewards), AdvantageConfig())
    moved = [members[n] for n in order]
    shuffled = group_advantages(moved, [[1, 1]] * len(rewards), AdvantageConfig())
    for place, n in enumerate(order):
        np.testing.assert_allclose(shuffled[place], straight[n], atol=1e-6)


def test_group_advantages_by_episode_pay_every_token_the_same():
    members = [np.array([0.0, 0.5, 0.5]), np.array([0.0]), np.array([0.25, 0.25])]
    got = group_advantages(members, [[2, 1], [1], [1, 1]], AdvantageConfig())
    expected = oracle([1.0, 0.0, 0.5], "group_std")
    for of, value, lengths in zip(got, expected, (3, 1, 2), strict=True):
        np.testing.assert_allclose(of, [value] * lengths, rtol=1e-6)
        assert of.dtype == np.float32


def test_group_advantages_by_turn_compare_turns_of_a_number():
    """Two tokens a turn; rewards 1 then 2, 0 then 4, and 3 in a single turn; discount 1/2."""
    members = [np.array([1.0, 0, 0, 2]), np.array([0, 0, 4, 0.0]), np.array([0, 3.0])]
    cfg = AdvantageConfig(credit="turn", normalise="group_mean", turn_discount=0.5)
    got = group_advantages(members, [[2, 2], [2, 2], [2]], cfg)
    # Returns: first turns 1 + 2/2 = 2, 0 + 4/2 = 2, 3; second turns 2, 4.
    third = 1 / 3
    np.testing.assert_allclose(got[0], [-third, -third, -1, -1], atol=1e-6)
    np.testing.assert_allclose(got[1], [-third, -third, 1, 1], atol=1e-6)
    np.testing.assert_allclose(got[2], [2 * third] * 2, atol=1e-6)


# --------------------------------------------------------------------------------------- GiGPO


def random_group(seed: int) -> tuple[list, list, list]:
    """(token rewards, turn lengths, screenshots): five members of up to four turns, few screens."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 4, rng.integers(0 if m == 4 else 1, 5)).tolist() for m in range(5)]
    rewards = [rng.integers(0, 3, sum(of)).astype(float) for of in lengths]
    screens = [[str(rng.integers(3)) for _ in of] for of in lengths]
    return rewards, lengths, screens


def gigpo_oracle(rewards, lengths, screens, how, weight, discount) -> list[list[float]]:
    """The paper's two levels, a turn at a time; a set of one member or of equal returns gives 0."""

    def relative(value, others):
        index = others.index(value)
        return oracle(others, how)[index] if len(set(others)) > 1 else 0.0

    turns = []  # rewards of every turn of every member
    for of, counts in zip(rewards, lengths, strict=True):
        starts = [sum(counts[:n]) for n in range(len(counts))]
        turns.append([sum(of[a : a + n]) for a, n in zip(starts, counts, strict=True)])
    episodes = [sum(of) for of in turns]
    to_go = [
        [sum(discount ** (k - t) * of[k] for k in range(t, len(of))) for t in range(len(of))]
        for of in turns
    ]
    found = []
    for member, counts in enumerate(lengths):
        tokens = []
        for turn, count in enumerate(counts):
            anchor = [
                to_go[j][u]
                for j in range(len(turns))
                for u in range(len(turns[j]))
                if screens[j][u] == screens[member][turn]
            ]
            value = relative(episodes[member], episodes)
            value += weight * relative(to_go[member][turn], anchor)
            tokens += [value] * count
        found.append(tokens)
    return found


@pytest.mark.parametrize("how", WITHIN_GROUPS)
@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_gigpo_equals_oracle(how, discount, seed):
    rewards, lengths, screens = random_group(seed)
    cfg = AdvantageConfig(normalise=how, screen_weight=0.7, turn_discount=discount)
    got = group_advantages(rewards, lengths, cfg, turn_screens=screens)
    expected = gigpo_oracle(rewards, lengths, screens, how, 0.7, discount)
    for of, tokens in zip(got, expected, strict=True):
        np.testing.assert_allclose(of, tokens, rtol=1e-5, atol=1e-6)
        assert of.dtype == np.float32


def test_gigpo_by_hand():
    """Two members miss on screen "a" first; a third fails at once. Discount 1/2, weight 1."""
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 0.0, 1.0]), np.array([0.0])]
    screens = [["a", "a"], ["a", "b", "a"], ["a"]]
    cfg = AdvantageConfig(normalise="group_mean", screen_weight=1.0, turn_discount=0.5)
    got = group_advantages(rewards, [[1] * 2, [1] * 3, [1]], cfg, turn_screens=screens)
    # Episodes: 1, 1, 0 with mean 2/3. On "a": 1/2, 1, 1/4, 1, 0 with mean 11/20; "b" was seen once.
    third, mean = 1 / 3, 11 / 20
    np.testing.assert_allclose(got[0], [third + 1 / 2 - mean, third + 1 - mean], rtol=1e-6)
    expected = [third + 1 / 4 - mean, third, third + 1 - mean]
    np.testing.assert_allclose(got[1], expected, rtol=1e-6)
    np.testing.assert_allclose(got[2], [-2 * third - mean], rtol=1e-6)


@pytest.mark.parametrize("how", WITHIN_GROUPS)
@pytest.mark.parametrize("repeats", ["never", "no screenshots", "one turn"])
def test_gigpo_is_grpo_where_no_screen_repeats_and_a_multiple_in_one_turn(how, repeats):
    rewards, lengths, screens = random_group(0)
    factor = 1.0
    if repeats == "one turn":
        lengths, screens = [[len(of)] if len(of) else [] for of in rewards], [["a"]] * 5
        assert all(lengths)
        factor = 1.7
    else:
        screens = [
            [f"{member}-{turn}" if repeats == "never" else "" for turn in range(len(of))]
            for member, of in enumerate(screens)
        ]
    cfg = AdvantageConfig(normalise=how, screen_weight=0.7, turn_discount=0.9)
    got = group_advantages(rewards, lengths, cfg, turn_screens=screens)
    grpo = group_advantages(rewards, lengths, AdvantageConfig(normalise=how))
    assert np.concatenate(grpo).any()
    for of, expected in zip(got, grpo, strict=True):
        np.testing.assert_allclose(of, factor * expected, rtol=1e-5)


@given(st.integers(0, 99), st.randoms())
def test_gigpo_moves_with_the_members(seed: int, random):
    rewards, lengths, screens = random_group(seed)
    order = list(range(5))
    random.shuffle(order)
    cfg = AdvantageConfig(screen_weight=1.0, turn_discount=0.9)
    straight = group_advantages(rewards, lengths, cfg, turn_screens=screens)
    moved = [[of[n] for n in order] for of in (rewards, lengths, screens)]
    shuffled = group_advantages(moved[0], moved[1], cfg, turn_screens=moved[2])
    for index, n in enumerate(order):
        np.testing.assert_allclose(shuffled[index], straight[n], atol=1e-5)


def test_group_advantages_of_a_group_of_one_or_without_tokens():
    assert not group_advantages([np.array([0.0, 1.0])], [[2]], AdvantageConfig())[0].any()
    got = group_advantages([np.zeros(0), np.array([1.0])], [[], [1]], AdvantageConfig())
    assert got[0].shape == (0,)
    np.testing.assert_allclose(got[1], [1.0], rtol=1e-5)


def test_batch_normalised_is_over_all_tokens():
    tokens = [np.array([1.0, 1.0, 0.0]), np.array([]), np.array([-2.0])]
    every = [1.0, 1.0, 0.0, -2.0]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every)
    got = np.concatenate(batch_normalised(tokens))
    np.testing.assert_allclose(got, [(x - mean) / (deviation + 1e-6) for x in every], rtol=1e-6)
    assert not np.concatenate(batch_normalised([np.full(3, 0.1), np.full(4, 0.1)])).any()
    assert [len(of) for of in batch_normalised([np.array([])])] == [0]


@pytest.mark.parametrize(
    ("rewards", "lengths", "message"),
    [
        ([np.array([1.0, np.nan])], [[2]], "not all finite: member 0"),
        ([np.zeros(1), np.array([np.inf])], [[1], [1]], "not all finite: member 1"),
        ([], [], "the group has no member"),
        ([np.zeros(3)], [[1, 1]], r"3 sampled tokens in turns of \[1, 1\]"),
        ([np.zeros(2)], [[2, 0]], r"turns of \[2, 0\]"),
    ],
)
def test_group_advantages_of_unusable_rewards_raise(rewards, lengths, message):
    with pytest.raises(TrainingError, match=message):
        group_advantages(rewards, lengths, AdvantageConfig())


# ----------------------------------------------------------------------------------------- GAE


def gae(rewards, values, lengths, *, discount, gae_lambda, bootstrap):
    return advantages.generalised_advantages(
        np.array(rewards, float),
        np.array(values, float),
        lengths,
        discount=discount,
        gae_lambda=gae_lambda,
        bootstrap=bootstrap,
    )


def published_gae(rewards, values, next_value, done, gamma, lam):
    """openai/baselines ppo2/runner.py, its loop over steps, for one environment."""
    result = [0.0] * len(rewards)
    last = 0.0
    for t in reversed(range(len(rewards))):
        if t == len(rewards) - 1:
            nonterminal, following = 1.0 - done, next_value
        else:
            nonterminal, following = 1.0, values[t + 1]
        delta = rewards[t] + gamma * following * nonterminal - values[t]
        result[t] = last = delta + gamma * lam * nonterminal * last
    return result


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=8),
    st.booleans(),
    st.floats(-2, 2),
)
def test_gae_of_one_token_turns_equals_the_published_loop(steps, done, next_value):
    """Every token a turn: then our chain is the ordinary one, step by step."""
    rewards, values = zip(*steps, strict=True)
    got, returns = gae(
        rewards,
        values,
        [1] * len(steps),
        discount=0.9,
        gae_lambda=0.8,
        bootstrap=0.0 if done else next_value,
    )
    expected = published_gae(rewards, values, next_value, float(done), 0.9, 0.8)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(returns, np.add(expected, values), atol=1e-5)


def test_gae_over_turns_equals_the_double_sum():
    """A_t = sum_k (product of d l from t to k - 1) delta_k, straight from the definition."""
    rng = np.random.default_rng(0)
    lengths, discount, lam, bootstrap = [3, 1, 4], 0.9, 0.7, 0.4
    rewards, values = rng.normal(size=(2, 8))
    last = {2, 3, 7}
    decay = [discount * lam if t in last else 1.0 for t in range(8)]
    following = [*values[1:], bootstrap]
    delta = [
        rewards[t] + (discount if t in last else 1.0) * following[t] - values[t] for t in range(8)
    ]
    expected = [sum(np.prod(decay[t:k]) * delta[k] for k in range(t, 8)) for t in range(8)]
    got, _ = gae(rewards, values, lengths, discount=discount, gae_lambda=lam, bootstrap=bootstrap)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_gae_of_one_turn_is_the_return_less_the_value_however_long_it_is():
    values = [0.3, -0.2, 0.5, 0.1]
    got, returns = gae([0, 0, 0, 1.0], values, [4], discount=0.5, gae_lambda=0.1, bootstrap=0.0)
    np.testing.assert_allclose(got, [1.0 - v for v in values], atol=1e-6)
    np.testing.assert_allclose(returns, [1.0] * 4, atol=1e-6)


def test_gae_truncated_episode_bootstraps_and_terminated_one_does_not():
    cut, _ = gae([0.0], [0.2], [1], discount=0.9, gae_lambda=0.95, bootstrap=2.0)
    ended, _ = gae([0.0], [0.2], [1], discount=0.9, gae_lambda=0.95, bootstrap=0.0)
    assert cut[0] == pytest.approx(0.9 * 2.0 - 0.2) and ended[0] == pytest.approx(-0.2)


def test_gae_of_no_token_is_empty_and_of_nan_an_error():
    got, returns = gae([], [], [], discount=0.9, gae_lambda=0.95, bootstrap=0.0)
    assert got.shape == returns.shape == (0,)
    for reward, value, after, said in (
        (0.0, np.nan, 0.0, "1 of the critic's 2 values of an episode are not finite"),
        (0.0, 0.0, np.inf, "1 of the critic's 2 values of an episode are not finite"),
        (np.nan, 0.0, 0.0, "rewards of a group are not all finite"),
    ):
        with pytest.raises(TrainingError, match=said):
            gae([reward], [value], [1], discount=0.9, gae_lambda=0.95, bootstrap=after)
