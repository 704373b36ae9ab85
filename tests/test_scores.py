"""Scores of an evaluation, against counting by hand, by enumeration and by scipy."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy import stats

from tests.sample_trajectories import make_trajectory
from uirl_jax.evaluation import paired, scores
from uirl_jax.evaluation.outcome import Outcome, outcome_of
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory

TASKS = [TaskSpec("desktop/click_button", seed) for seed in range(40)]


def outcome(success: bool, **counts) -> Outcome:
    plain = {
        "stop_reason": StopReason.COMPLETED if success else StopReason.FAILED,
        "reward": float(success),
        "turns": 2,
        "wrong_submissions": 0,
        "duplicate_submissions": 0,
        "claims_success": False,
        "tokens": 10,
        "seconds": 3.0,
    }
    return Outcome(success=success, **plain | counts)


def ended(progress: dict, action: Action | None = None, success: bool = False) -> Trajectory:
    one = make_trajectory()
    last = dataclasses.replace(one.turns[-1], progress=progress, action=action)
    return dataclasses.replace(one, turns=(*one.turns[:-1], last), success=success)


@pytest.mark.parametrize(
    ("progress", "wrong", "duplicates"),
    [
        ({"num_incorrect_submissions": 3, "submitted_row_indices": [4, 2, 4, 4]}, 3, 2),
        ({"num_incorrect_submissions": 0, "submitted_row_indices": [4, 2]}, 0, 0),
        ({}, 0, 0),
        ({"num_incorrect_submissions": True, "submitted_row_indices": "44"}, 0, 0),
        ({"num_incorrect_submissions": -2, "submitted_row_indices": [[4], [4], None, 1, 1]}, 0, 1),
    ],
)
def test_submissions_are_counted_from_the_last_progress(progress, wrong, duplicates):
    found = outcome_of(ended(progress))
    assert (found.wrong_submissions, found.duplicate_submissions) == (wrong, duplicates)
    assert found.irreversible == wrong + duplicates
    assert found.tokens == 2 + 3  # of make_trajectory's two turns


@pytest.mark.parametrize(
    ("action", "success", "false_claim"),
    [
        (Action("terminate", text="success"), False, True),
        (Action("terminate", text="success"), True, False),
        (Action("terminate", text="failure"), False, False),
        (Action("answer", text="success"), False, False),
        (None, False, False),
    ],
)
def test_claim_of_success_is_false_where_the_verifier_saw_none(action, success, false_claim):
    assert outcome_of(ended({}, action, success)).false_claim is false_claim


@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
@hypothesis.settings(deadline=None, max_examples=60)
def test_pass_at_k_and_pass_all_are_shares_of_all_draws(attempts, data):
    k = data.draw(st.integers(1, len(attempts)))
    draws = list(itertools.combinations(attempts, k))
    any_share = np.mean([any(draw) for draw in draws])
    all_share = np.mean([all(draw) for draw in draws])
    assert scores.pass_at(len(attempts), sum(attempts), k) == pytest.approx(any_share)
    assert scores.pass_all(len(attempts), sum(attempts), k) == pytest.approx(all_share)


def test_score_counts_episodes_and_leaves_out_what_was_not_played():
    played = {
        TASKS[0]: [outcome(True), outcome(False, wrong_submissions=2, seconds=5.0), None],
        TASKS[1]: [outcome(True, tokens=20), outcome(True, turns=5), outcome(False, reward=0.5)],
    }
    found = scores.score(played)
    assert (found.success.successes, found.success.attempts, found.missing) == (3, 5, 1)
    # k up to the two attempts that every instance has.
    assert found.pass_at == pytest.approx({1: (1 / 2 + 2 / 3) / 2, 2: 1.0})
    assert found.pass_all == pytest.approx({1: (1 / 2 + 2 / 3) / 2, 2: (0 + 1 / 3) / 2})
    assert found.mean_reward == pytest.approx(3.5 / 5)
    assert found.mean_turns == pytest.approx((2 + 2 + 2 + 5 + 2) / 5)
    assert found.stop_reasons == {"completed": 3, "failed": 2}
    assert (found.wrong_submissions, found.duplicate_submissions, found.false_claims) == (2, 0, 0)
    assert found.seconds_per_success == pytest.approx((3 * 4 + 5) / 3)
    assert found.tokens_per_success == pytest.approx((10 * 4 + 20) / 3)


def test_score_without_success_or_episode_has_no_costs():
    assert scores.score({TASKS[0]: [outcome(False)]}).seconds_per_success is None
    nothing = scores.score({TASKS[0]: [None]})
    assert (nothing.pass_at, nothing.missing, nothing.success.attempts) == ({}, 1, 0)


def test_scores_by_task_split_by_name_and_variant():
    other = TaskSpec("desktop/enter_text", 1, "words=2")
    by_task = scores.score_by_task({TASKS[0]: [outcome(True)], other: [outcome(False)]})
    assert {label: one.success.successes for label, one in by_task.items()} == {
        "desktop/click_button": 1,
        "desktop/enter_text (words=2)": 0,
    }


@pytest.mark.parametrize(
    ("first_only", "second_only", "expected"),
    [
        (0, 0, 1.0),
        (0, 5, 2 / 2**5),
        (5, 0, 2 / 2**5),
        (1, 9, 2 * (1 + 10) / 2**10),  # 2 P(at most 1 of 10)
        (4, 4, 1.0),
    ],
)
def test_mcnemar_is_the_exact_binomial_sum(first_only, second_only, expected):
    assert paired.mcnemar(first_only, second_only) == pytest.approx(expected)


def test_comparison_pairs_attempts_of_the_same_instance_and_skips_the_rest():
    successes = {
        "a": {TASKS[0]: [True, False], TASKS[1]: [False, None], TASKS[2]: [True]},
        "b": {TASKS[0]: [False, True], TASKS[1]: [True, True], TASKS[3]: [True]},
    }
    found = paired.compare("a", "b", successes)
    assert (found.instances, found.first_only, found.second_only) == (2, 1, 2)
    assert found.difference == pytest.approx((0 + 1) / 2)


def test_interval_of_the_difference_is_that_of_scipys_bootstrap():
    rng = np.random.default_rng(3)
    tasks = [TaskSpec("desktop/click_button", seed) for seed in range(400)]
    first, second = rng.random((2, 400)) < np.array([[0.4], [0.65]])
    successes = {
        name: {task: [bool(one)] for task, one in zip(tasks, values, strict=True)}
        for name, values in (("a", first), ("b", second))
    }
    found = paired.compare("a", "b", successes)
    expected = stats.bootstrap(
        (second.astype(float) - first,),
        np.mean,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    # Both are resampled; an instance is 0.0025. The 90 % interval ends 0.011 further in.
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.004)
    assert found == paired.compare("a", "b", successes), "the same call gives the same interval"


def test_policies_without_an_instance_in_common_are_not_compared():
    with pytest.raises(ValueError, match="a and b have no instance in common"):
        paired.compare("a", "b", {"a": {TASKS[0]: [True]}, "b": {TASKS[0]: [None]}})
