"""Which task a group plays: every instance in turn, more of what fails, the same in any process."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from tests import sample_trajectories
from uirl_jax import seeds
from uirl_jax.errors import PolicyError
from uirl_jax.learner.curriculum import Curriculum, CurriculumConfig
from uirl_jax.metrics import MetricsWriter
from uirl_jax.types import TaskSpec

KINDS = [
    TaskSpec("desktop/click_button", 0, max_turns=1),
    TaskSpec("desktop/click_button", 0, variant="buttons=2", max_turns=1),
    TaskSpec("desktop/enter_text", 0, max_turns=4),
]


def records(task: TaskSpec, successes: int, failures: int) -> list:
    one = sample_trajectories.make_trajectory()
    return [
        dataclasses.replace(one, task=task, success=success, reward=float(success))
        for success in [True] * successes + [False] * failures
    ]


def test_task_without_instances_takes_kinds_in_turn_with_seeds_of_their_own():
    curriculum = Curriculum(CurriculumConfig(), KINDS, run_seed=7)
    tasks = [curriculum.task(index) for index in range(30)]
    assert [task.name for task in tasks[:3]] == [kind.name for kind in KINDS]
    assert [task.seed for task in tasks] == [seeds.train_seed(7, index) for index in range(30)]
    assert len({task.seed for task in tasks}) == 30


def test_task_with_instances_plays_each_once_before_any_twice():
    curriculum = Curriculum(CurriculumConfig(instances=5), KINDS, run_seed=7)
    rounds = [[curriculum.task(index) for index in range(n * 15, n * 15 + 15)] for n in range(3)]
    assert all(len(set(tasks)) == 15 for tasks in rounds)
    assert set(rounds[0]) == set(rounds[1]) == set(rounds[2])
    assert rounds[0] != rounds[1], "every round has an order of its own"
    assert collections.Counter(task.variant for task in rounds[0])["buttons=2"] == 5
    assert not {task.seed for task in rounds[0]} & set(seeds.EVAL_SEEDS[: 2**20])


@pytest.mark.parametrize(
    ("weight_by", "sharpness", "tallies", "weights"),
    [
        # (failed + 1) / (played + 1): 1 / 10, never played 1, 10 / 10.
        ("failure", 1.0, {"0": [0.0, 9.0], "2": [9.0, 9.0]}, [0.1, 1.0, 1.0]),
        ("failure", 3.0, {"0": [4.0, 9.0], "2": [9.0, 9.0]}, [0.125, 1.0, 1.0]),  # 5 / 10
        # 4 p (1 - p) with p = (failed + 1) / (played + 2): 1 / 10, never played 1 / 2, 3 / 4.
        ("variance", 1.0, {"0": [0.0, 8.0, 0.0], "2": [5.0, 6.0, 6.0]}, [0.36, 1.0, 0.75]),
    ],
)
def test_tasks_are_drawn_with_the_shares_that_the_config_says(
    weight_by, sharpness, tallies, weights
):
    """Frequencies against the shares by hand: 0.1 + 0.9 x weight."""
    cfg = CurriculumConfig(weight_by=weight_by, sharpness=sharpness)
    curriculum = Curriculum(cfg, KINDS, run_seed=3)
    drawn = collections.Counter(
        curriculum.task(i, tallies).variant + curriculum.task(i, tallies).name for i in range(4000)
    )
    shares = 0.1 + 0.9 * np.array(weights)
    expected = 4000 * shares / shares.sum()
    seen = [drawn[kind.variant + kind.name] for kind in KINDS]
    # chi-square, 2 degrees of freedom: 13.8 is p = 0.001; the draws are seeded, so it is no chance
    assert ((seen - expected) ** 2 / expected).sum() < 13.8


def test_count_remembers_the_latest_window_of_episodes():
    curriculum = Curriculum(CurriculumConfig(window=10), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    for _ in range(5):
        curriculum.count(tallies, records(KINDS[0], 0, 8))
    assert tallies.played_e[0] == 10 and tallies.failed_e[0] == 10
    curriculum.count(tallies, records(KINDS[0], 8, 2))
    # By hand: 20 episodes of which 12 failed, faded to 10.
    assert (tallies.failed_e[0], tallies.played_e[0]) == (6.0, 10.0)
    assert tallies.failure_rates()[1] == 1.0, "what was never played counts as failing"


def test_count_by_instance_tells_instances_apart_and_passes_strangers_over():
    curriculum = Curriculum(CurriculumConfig(instances=2), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    first, second = (curriculum.task(index) for index in range(2))
    curriculum.count(tallies, records(first, 3, 1) + records(second, 0, 4))
    curriculum.count(tallies, records(dataclasses.replace(first, seed=5), 0, 4))
    assert sorted(tallies.to_json().values()) == [[1.0, 4.0, 4.0, 3.0], [4.0, 4.0, 0.0, 0.0]]
    metrics = curriculum.describe(tallies)
    assert metrics["curriculum/played"] == pytest.approx(2 / 6)
    assert metrics["curriculum/failure_rate"] == pytest.approx((0.25 + 1.0) / 2)


def test_count_tells_a_kind_of_which_half_always_fails_from_one_that_varies():
    curriculum = Curriculum(CurriculumConfig(window=32), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    for alike in (records(KINDS[0], 8, 0), records(KINDS[0], 0, 8)) * 2:
        curriculum.count(tallies, alike)
    for _ in range(4):
        curriculum.count(tallies, records(KINDS[1], 7, 1))
    # By hand: p = 17/34 and 5/34; no group of 32 episodes varied, and every one did.
    np.testing.assert_allclose(tallies.variances()[:2], [1.0, 4 * 5 / 34 * 29 / 34])
    np.testing.assert_array_equal(tallies.varied_e, [0.0, 32.0, 0.0])


def test_rewards_that_differ_are_a_signal_though_all_fail():
    curriculum = Curriculum(CurriculumConfig(), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    group = records(KINDS[0], 0, 8)
    curriculum.count(tallies, [*group[1:], dataclasses.replace(group[0], reward=0.5)])
    assert tallies.to_json() == {"0": [8.0, 8.0, 8.0, 0.5]}
    assert curriculum.describe(tallies)["task/desktop/click_button/reward"] == 0.5 / 8


@pytest.mark.parametrize(("paid", "mean"), [(4e-5, 4e-5), (1e306, 1e300 / 8), (-1e308, -1e300 / 8)])
def test_rewards_of_any_size_are_counted_and_published(paid, mean):
    curriculum = Curriculum(CurriculumConfig(), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    group = [dataclasses.replace(record, reward=paid) for record in records(KINDS[0], 0, 8)]
    for _ in range(3):
        curriculum.count(tallies, group)
    content = json.loads(json.dumps(tallies.to_json(), allow_nan=False))
    again = curriculum.tallies(content)
    assert again.to_json() == tallies.to_json()
    shown = curriculum.describe(again)["task/desktop/click_button/reward"]
    assert shown == pytest.approx(mean if abs(paid) < 1 else mean / 3)


@pytest.mark.parametrize(
    ("old", "read"),
    [([2.0, 7.0], [2.0, 7.0, 7.0, 5.0]), ([2.0, 7.0, 3.0], [2.0, 7.0, 3.0, 5.0])],
)
def test_tallies_of_a_run_that_did_not_count_signals_or_rewards_are_read(old, read):
    curriculum = Curriculum(CurriculumConfig(), KINDS, run_seed=0)
    assert curriculum.tallies({"1": old}).to_json() == {"1": read}


def test_describe_tells_of_every_kind_what_its_instances_did():
    curriculum = Curriculum(CurriculumConfig(instances=2), KINDS, run_seed=0)
    tallies = curriculum.tallies()
    by_label = {task.label: [] for task in KINDS}
    for task in {curriculum.task(index) for index in range(6)}:
        by_label[task.label].append(task)
    hard, easy = by_label["desktop/click_button (buttons=2)"]
    curriculum.count(tallies, records(hard, 0, 8))
    curriculum.count(tallies, records(easy, 6, 2))
    metrics = curriculum.describe(tallies)
    assert {name: value for name, value in metrics.items() if name.startswith("task/")} == {
        "task/desktop/click_button_buttons_2/success": 6 / 16,
        "task/desktop/click_button_buttons_2/reward": 6 / 16,
        "task/desktop/click_button_buttons_2/signal": 8 / 16,
    }


def test_describe_names_any_task_so_that_the_metrics_file_takes_it(tmp_path):
    kinds = [
        TaskSpec("own/büro//task", 0, 'said="a b"', max_turns=1),
        TaskSpec("own/büro//task", 0, 'said="a b"', max_turns=2),
        TaskSpec("desktop/enter_text", 0, "words=2"),
    ]
    curriculum = Curriculum(CurriculumConfig(), kinds, run_seed=0)
    tallies = curriculum.tallies()
    for kind, successes in zip(kinds, (8, 0, 2), strict=True):
        curriculum.count(tallies, records(kind, successes, 8 - successes))
    metrics = curriculum.describe(tallies)
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(1, metrics)
    # Two limits on turns are one task to a reader: 8 and 0 of 16 episodes.
    assert metrics["task/own/b_ro/_/task_said_a_b/success"] == 0.5
    assert metrics["task/own/b_ro/_/task_said_a_b/signal"] == 0.0
    assert metrics["task/desktop/enter_text_words_2/success"] == 0.25


def test_describe_of_a_single_kind_has_no_metric_of_tasks():
    curriculum = Curriculum(CurriculumConfig(), KINDS[:1], run_seed=0)
    tallies = curriculum.tallies()
    curriculum.count(tallies, records(KINDS[0], 4, 4))
    assert set(curriculum.describe(tallies)) == {"curriculum/played", "curriculum/failure_rate"}


def test_tallies_that_went_through_json_choose_the_same_tasks():
    cfg = CurriculumConfig(weight_by="failure", instances=20, window=7)
    curriculum = Curriculum(cfg, KINDS, run_seed=1)
    tallies = curriculum.tallies()
    rng = np.random.default_rng(0)
    for index in range(100):
        failures = int(rng.integers(0, 9))
        curriculum.count(tallies, records(curriculum.task(index), 8 - failures, failures))
    again = curriculum.tallies(json.loads(json.dumps(tallies.to_json())))
    for copy in (tallies, again):
        curriculum.count(copy, records(curriculum.task(0), 1, 2))
    assert again.to_json() == tallies.to_json()
    other = Curriculum(cfg, KINDS, run_seed=1)
    assert [other.task(i, again.to_json()) for i in range(50)] == [
        curriculum.task(i, tallies.to_json()) for i in range(50)
    ]


@pytest.mark.parametrize(
    "content",
    [
        {"3": [0, 1]},
        {"-1": [0, 1]},
        {"x": [0, 1]},
        {"0": [2, 1]},
        {"0": [float("nan"), 1]},
        {"0": [0, float("inf")]},
        {"0": [0]},
        {"0": None},
        {"0": [-1, 1]},
        {"0": [0, 1, 2]},
        {"0": [0, 1, -1]},
        {"0": [0, 1, 1, 1, 1]},
        {"0": [0, 1, 1, float("nan")]},
        {"0": [0, 1, float("nan")]},
        [1],
        "0",
    ],
)
def test_tallies_of_another_shape_are_refused_in_one_line(content):
    curriculum = Curriculum(CurriculumConfig(weight_by="failure"), KINDS, run_seed=0)
    with pytest.raises(PolicyError, match=r"tallies of tasks are .*another config"):
        curriculum.task(0, content)
