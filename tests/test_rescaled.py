"""Pix2Act's score, against tables worked by hand and scipy's bootstrap."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from tests.sample_trajectories import make_trajectory
from tests.test_scores import outcome
from uirl_jax import evaluation
from uirl_jax.evaluation import rescaled, scores
from uirl_jax.evaluation.outcome import outcome_of
from uirl_jax.types import StopReason, TaskSpec

CLICK = [TaskSpec("miniwob/click-test", seed) for seed in range(40)]
POINT = [TaskSpec("miniwob/circle-center", seed) for seed in range(40)]
DESKTOP = TaskSpec("desktop/click_button", 0)


def paid(raw, **counts):
    return outcome(raw == 1.0, raw_reward=raw, **counts)


@pytest.mark.parametrize(
    ("progress", "raw", "judged"),
    [
        ({"done": True, "raw_reward": 1, "reward": 1.0}, 1.0, True),
        ({"done": True, "raw_reward": -0.75, "reward": 0.0}, -0.75, True),  # paid 0 in training
        ({"done": True, "raw_reward": 0}, 0.0, True),
        ({"done": False, "raw_reward": 0, "reward": None}, -1.0, True),  # out of turns
        ({"done": True, "reward": 1.0}, None, True),
        ({}, None, False),
        ({"done": True, "raw_reward": True}, None, True),
        ({"done": True, "raw_reward": "1"}, None, True),
        ({"done": True, "raw_reward": None}, None, True),
        ({"done": True, "raw_reward": 1.5}, None, True),
        ({"done": True, "raw_reward": float("nan")}, None, True),
    ],
)
def test_raw_reward_is_that_of_the_last_progress(progress, raw, judged):
    one = make_trajectory()
    last = dataclasses.replace(one.turns[-1], progress=progress)
    found = outcome_of(dataclasses.replace(one, turns=(*one.turns[:-1], last)))
    assert (found.raw_reward, found.judged) == (raw, judged)


@pytest.mark.parametrize(
    ("raw", "score"), [(1.0, 1.0), (0.5, 0.75), (0.01, 0.505), (0.0, 0.0), (-0.5, 0.0), (-1.0, 0.0)]
)
def test_only_a_positive_raw_reward_has_a_score(raw, score):
    assert rescaled.rescale(raw) == pytest.approx(score)


def test_score_is_the_mean_of_the_tasks_means():
    """By hand: click-test (1 + 0 + 0 + 1) / 4 = 0.5, circle-center 0.99; raw 0 and 0.98."""
    played = {
        CLICK[0]: [paid(1.0)],
        CLICK[1]: [paid(-1.0)],
        CLICK[2]: [paid(-1.0)],
        CLICK[3]: [paid(1.0)],
        POINT[0]: [paid(0.98), None],
        DESKTOP: [outcome(False)],  # its verifier reports no raw reward
    }
    found = scores.score(played)
    assert found.rescaled is not None and found.success.attempts == 6
    assert found.rescaled.score == pytest.approx((0.5 + 0.99) / 2)
    assert found.rescaled.mean_raw == pytest.approx((0.0 + 0.98) / 2)
    assert (found.rescaled.tasks, found.rescaled.episodes) == (2, 5)
    by_task = scores.score_by_task(played)
    assert by_task["desktop/click_button"].rescaled is None
    assert by_task["miniwob/circle-center"].rescaled.score == pytest.approx(0.99)
    assert by_task["miniwob/click-test"].rescaled.score == pytest.approx(0.5)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_attempts_of_an_instance_weigh_as_one():
    played = {CLICK[0]: [paid(1.0), paid(1.0), paid(-1.0), None], CLICK[1]: [paid(-1.0)] * 4}
    assert scores.score(played).rescaled.score == pytest.approx((2 / 3 + 0) / 2)


def test_episode_that_no_verifier_judged_counts_as_nothing_but_does_not_make_a_task_report():
    invalid = outcome(False, judged=False, stop_reason=StopReason.FORMAT_ERROR)
    played = {CLICK[0]: [paid(1.0)], CLICK[1]: [invalid], POINT[0]: [invalid], POINT[1]: [invalid]}
    found = scores.score(played).rescaled
    assert (found.score, found.tasks, found.episodes) == (pytest.approx((0.5 + 0) / 2), 2, 4)
    assert scores.score_by_task(played)["miniwob/circle-center"].rescaled.score == 0.0
    assert scores.score({POINT[0]: [invalid], DESKTOP: [outcome(True)]}).rescaled is None
    assert scores.score({POINT[0]: [None]}).rescaled is None


def test_interval_of_one_task_is_that_of_scipys_bootstrap():
    raws = np.random.default_rng(2).choice([-1.0, 0.5, 1.0], 40)
    found = scores.score({task: [paid(raw)] for task, raw in zip(CLICK, raws, strict=True)})
    values = np.where(raws > 0, (raws + 1) / 2, 0)
    oracle = stats.bootstrap((values,), np.mean, method="percentile", rng=0).confidence_interval
    # 10,000 resamples of 40: the ends differ by chance, by about 0.003.
    assert (found.rescaled.low, found.rescaled.high) == pytest.approx(tuple(oracle), abs=0.015)


def test_interval_over_tasks_resamples_the_instances_of_each():
    """Tasks that are always and never solved have no spread; drawing tasks would give one."""
    played = {task: [paid(1.0)] for task in CLICK} | {task: [paid(-1.0)] for task in POINT}
    found = scores.score(played).rescaled
    assert (found.low, found.score, found.high) == (0.5, 0.5, 0.5)
    half = {task: [paid(1.0 if task.seed % 2 else -1.0)] for task in (*CLICK, *POINT)}
    found = scores.score(half).rescaled
    # The mean of 80 draws of 0 or 1: standard deviation sqrt(0.25 / 80) = 0.0559.
    assert (found.low, found.high) == pytest.approx((0.5 - 0.1096, 0.5 + 0.1096), abs=0.02)


def test_interval_in_chunks_counts_every_resample(monkeypatch):
    half = {task: [paid(1.0 if task.seed % 2 else -1.0)] for task in CLICK}
    monkeypatch.setattr(rescaled, "_CHUNK", 40 * 3001)
    found = scores.score(half).rescaled
    assert (found.low, found.high) == pytest.approx((0.5 - 0.155, 0.5 + 0.155), abs=0.03)


def test_tables_have_the_score_where_one_is():
    with_raw = {CLICK[0]: [paid(1.0)], POINT[0]: [paid(0.98)], DESKTOP: [outcome(True)]}
    without = {DESKTOP: [outcome(True)]}
    table = evaluation.format_scores({"a": scores.score(with_raw), "b": scores.score(without)})
    header, _, first, second = table.splitlines()
    assert "score" in header and " 99.5%  99.5% to 99.5%" in first and " -      " in second
    plain = evaluation.format_scores({"b": scores.score(without)})
    assert "score" not in plain

    by_task = {"a": scores.score_by_task(with_raw), "b": scores.score_by_task(with_raw)}
    lines = [line.split() for line in evaluation.format_tasks(by_task).splitlines()]
    assert lines[0] == ["a", "score", "b", "score"]
    assert lines[2:] == [
        ["desktop/click_button", "1/1", "-", "1/1", "-"],
        ["miniwob/circle-center", "0/1", "99.0%", "0/1", "99.0%"],
        ["miniwob/click-test", "1/1", "100.0%", "1/1", "100.0%"],
    ]
    only = evaluation.format_tasks({"b": scores.score_by_task(without)}).splitlines()
    assert only[0].split() == ["b"] and only[2].split() == ["desktop/click_button", "1/1"]
