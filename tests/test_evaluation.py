"""Held-out evaluation: instances that training cannot see, counts that hide nothing."""

import asyncio
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from uirl_jax import evaluation, metrics, seeds
from uirl_jax.config import reading
from uirl_jax.config.schema import EvaluationConfig
from uirl_jax.errors import ConfigError, ShardError, UirlError
from uirl_jax.evaluation.results import to_result
from uirl_jax.evaluation.statistics import TaskRate
from uirl_jax.run import Run
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.record import TokenLayout
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn

LAYOUT = TokenLayout(vocab_size=50, image_token_id=7)
CLICK = TaskSpec("desktop/click_button", 0, "buttons=4")
ENTER = TaskSpec("desktop/enter_text", 0, max_turns=5)


def episode(task: TaskSpec, success: bool, reason: StopReason | None = None) -> Trajectory:
    image = f"{task}".encode()
    key = hashlib.sha256(image).hexdigest()
    turn = Turn(
        context_ids=np.array([1, 7, 2], np.int32),
        token_ids=np.array([3, 4], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        full_logprobs=np.array([-0.5, -0.25], np.float32),
        policy_versions=np.array([2, 2], np.int32),
        image_keys=(key,),
        text="click(1, 2)",
        action=Action("click", x=1, y=2),
    )
    return Trajectory(
        episode_id=f"{task.name}-{task.seed}-{reason}",
        group_id="g",
        task=task,
        instruction="Click it.",
        turns=(turn,),
        images={key: image},
        image_tokens={key: 1},
        stop_reason=reason or (StopReason.COMPLETED if success else StopReason.FAILED),
        reward=float(success),
        success=success,
        run_id="run",
    )


def run(workdir: Path, run_tasks: evaluation.RunTasks, tasks: Sequence[TaskSpec], stage="before"):
    return asyncio.run(
        evaluation.evaluate(run_tasks, tasks, stage, workdir, base_hash="a" * 64, layout=LAYOUT)
    )


@pytest.mark.parametrize(
    ("successes", "attempts", "low", "high"),
    [  # Newcombe 1998, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_published_table(
    successes: int, attempts: int, low: float, high: float
) -> None:
    assert evaluation.wilson_interval(successes, attempts) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_without_attempts_knows_nothing() -> None:
    assert evaluation.wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes in 2 attempts"):
        evaluation.wilson_interval(3, 2)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10_000), st.data())
def test_wilson_interval_bounds_solve_the_score_equation(attempts: int, data) -> None:
    successes = data.draw(st.integers(0, attempts))
    low, high = evaluation.wilson_interval(successes, attempts)
    share = successes / attempts
    assert 0.0 <= low <= share <= high <= 1.0
    for bound in {low, high} - {0.0, 1.0}:  # |share - p| = z sqrt(p (1 - p) / n)
        z = abs(share - bound) / (bound * (1 - bound) / attempts) ** 0.5
        assert z == pytest.approx(1.959964, rel=1e-5)
    mirrored = evaluation.wilson_interval(attempts - successes, attempts)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_wilson_interval_more_confidence_is_wider() -> None:
    assert evaluation.wilson_interval(5, 10, 0.99)[0] < evaluation.wilson_interval(5, 10, 0.9)[0]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**29 - 1))
def test_seeds_of_training_evaluation_and_tuning_never_meet(
    run_seed: int, index: int, instance: int
) -> None:
    assert 0 <= seeds.train_seed(run_seed, index) < 2**30
    assert 2**30 <= seeds.eval_seed(instance) < 2**30 + 2**29
    assert 2**30 + 2**29 <= seeds.tune_seed(instance) < 2**31


def test_seeds_of_evaluation_and_tuning_are_the_same_every_day() -> None:
    assert [seeds.eval_seed(index) for index in (0, 1, 2**29 - 1)] == [2**30, 2**30 + 1, 1610612735]
    assert [seeds.tune_seed(index) for index in (0, 1)] == [1610612736, 1610612737]


def test_seeds_differ_by_run_and_index_and_stay_the_same() -> None:
    drawn = {seeds.train_seed(run, idx) for run in range(20) for idx in range(100)}
    assert len(drawn) >= 1998
    # Recorded once: a run that carries on must draw the same instances as before.
    assert (seeds.train_seed(0, 0), seeds.train_seed(1, 2)) == (355386411, 107847921)


@pytest.mark.parametrize("index", [-1, 2**29])
@pytest.mark.parametrize("seed_of", [seeds.eval_seed, seeds.tune_seed])
def test_seed_outside_its_range_is_refused(seed_of: Callable[[int], int], index: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= index"):
        seed_of(index)


def test_eval_tasks_kinds_in_turn_with_distinct_held_out_seeds() -> None:
    tasks = evaluation.eval_tasks([CLICK, ENTER], 5)
    assert [t.name for t in tasks] == [CLICK.name, ENTER.name, CLICK.name, ENTER.name, CLICK.name]
    assert [(t.variant, t.max_turns) for t in tasks[:2]] == [("buttons=4", 1), ("", 5)]
    assert all(t.seed in seeds.EVAL_SEEDS for t in tasks) and len({t.seed for t in tasks}) == 5
    assert not {t.seed for t in tasks} & {t.seed for t in evaluation.eval_tasks([CLICK], 5, seed=1)}
    with pytest.raises(ValueError, match="instances"):
        evaluation.eval_tasks([], 3)


def test_eval_tasks_of_tuning_are_no_held_out_ones() -> None:
    tuning = evaluation.eval_tasks([CLICK], 5, seed=2, seeds="tuning")
    assert [task.seed for task in tuning] == [seeds.tune_seed(200_000 + n) for n in range(5)]


@pytest.mark.parametrize(("asked", "first"), [("held_out", 2**30), ("tuning", 2**30 + 2**29)])
def test_run_is_measured_on_the_seeds_of_its_config(tmp_path: Path, asked: str, first: int) -> None:
    cfg = reading.from_config(EvaluationConfig, ConfigDict({"episodes": 3, "seeds": asked}))
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(evaluation=cfg, kinds=[CLICK]),
        workdir=tmp_path,
        without_repeated_rows=lambda tasks, stage: tasks[:2],  # as if the third were the first
    )

    async def evaluate(stage: str, tasks: list[TaskSpec], *_: object, **__: object):
        return [task.seed for task in tasks]

    players: Any = SimpleNamespace(evaluate=evaluate)
    measured: Any = asyncio.run(Run.measure(run, players, "after", threading.Event()))
    assert measured == [first, first + 1]


def test_seeds_of_neither_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="seeds: got str 'train', expected 'held_out' or 'tuning'"
    ):
        reading.from_config(EvaluationConfig, ConfigDict({"seeds": "train"}))


def task_rate(successes: int, attempts: int) -> TaskRate:
    counted = dataclasses.asdict(evaluation.rate(successes, attempts))
    return TaskRate(**counted, mean_reward=successes / attempts)  # a success pays 1


def test_evaluate_counts_attempts_and_writes_them(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK, ENTER], 8)

    async def run_tasks(asked: Sequence[TaskSpec]) -> list[Trajectory]:
        played = [episode(t, k % 4 == 0) for k, t in enumerate(asked[:7])]
        broken = [episode(t, False, StopReason.ENV_ERROR) for t in (asked[0], asked[7])]
        return [*broken, *reversed(played)]

    result = run(tmp_path, run_tasks, tasks)
    assert (result.successes, result.attempts, result.env_errors, result.missing) == (2, 7, 2, 1)
    assert result.rate == pytest.approx(2 / 7)
    assert (result.low, result.high) == evaluation.wilson_interval(2, 7)
    assert result.per_task == {
        "desktop/click_button (buttons=4)": task_rate(2, 4),
        "desktop/enter_text": task_rate(0, 3),
    }
    assert result.stop_reasons == {"completed": 2, "env_error": 2, "failed": 5}
    assert (result.mean_reward, result.mean_turns) == (pytest.approx(2 / 7), 1.0)
    assert evaluation.read_results(tmp_path) == {"before": result}
    kept = read_shard(tmp_path / "eval" / "before" / evaluation.EPISODES_FILE)[1]
    assert [t.task for t in kept] == tasks[:7]  # in the order of the tasks, env_error left out


def test_evaluate_lists_how_pages_were_drawn_and_a_second_way_is_told(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK], 4)
    drawn = ["77aa", "", "5c5d", "77aa"]
    result = run(
        tmp_path,
        lambda asked: [
            dataclasses.replace(episode(t, True), renderer=name)
            for t, name in zip(asked, drawn, strict=True)
        ],
        tasks,
    )
    assert result.renderers == ["5c5d", "77aa"]
    assert evaluation.read_results(tmp_path) == {"before": result}
    path = tmp_path / "eval" / "before.json"  # of a version that did not list them
    flat = json.loads(path.read_text())
    del flat["renderers"]
    path.write_text(json.dumps(flat))
    assert evaluation.read_results(tmp_path)["before"].renderers == []
    assert evaluation.renderers_text({"a": ["5c5d"], "b": [], "c": ["5c5d"]}) == ""
    told = evaluation.renderers_text({"stage a": ["5c5d"], "b": [], "training": ["77aa"]})
    assert "(stage a: 5c5d; training: 77aa)" in told and "not comparable" in told


def test_evaluate_keeps_only_the_first_episodes(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK], 20)
    run(tmp_path, lambda asked: [episode(t, True) for t in asked], tasks)
    header, kept = read_shard(tmp_path / "eval" / "before" / evaluation.EPISODES_FILE)
    assert [t.task for t in kept] == tasks[: evaluation.KEPT_EPISODES]
    assert header.base_hash == "a" * 64


def test_evaluate_everything_broken_by_environment_is_no_rate_of_zero(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK], 3)
    broken = [episode(t, False, StopReason.ENV_ERROR) for t in tasks]
    result = run(tmp_path, lambda _: broken, tasks)
    assert (result.attempts, result.low, result.high, result.missing) == (0, 0.0, 1.0, 3)
    table = evaluation.format_table([result])
    assert "3 episodes broken by the environment (not counted), 3 tasks without" in table


def test_evaluate_foreign_or_repeated_episode_is_refused(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK], 2)
    twice = [episode(tasks[0], True), episode(tasks[0], True), episode(tasks[1], True)]
    with pytest.raises(ValueError, match="1 episodes too many"):
        run(tmp_path, lambda _: twice, tasks)
    with pytest.raises(ValueError, match="1 episodes too many"):
        run(tmp_path, lambda _: [episode(dataclasses.replace(CLICK, seed=5), True)], tasks)
    assert evaluation.read_results(tmp_path) == {}


@pytest.mark.parametrize("stage", ["../x", "", "Before", "a b"])
def test_evaluate_stage_that_is_no_name_is_refused(tmp_path: Path, stage: str) -> None:
    with pytest.raises(ValueError, match="stage"):
        run(tmp_path, lambda _: [], [], stage)


def test_evaluate_killed_while_writing_leaves_the_stage_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = evaluation.eval_tasks([CLICK], 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.os, "replace", full)
    with pytest.raises((UirlError, ShardError), match="No space left"):
        run(tmp_path, lambda asked: [episode(t, True) for t in asked], tasks)
    assert evaluation.read_results(tmp_path) == {}
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_stage_name_of_the_run_itself_is_refused_but_at_its_end() -> None:
    assert evaluation.stage_name("", 3, 5) == "version_3"
    assert evaluation.stage_name("trained", 3, 5) == "trained"
    assert evaluation.stage_name("after", 5, 5) == "after"
    for asked, version in (("after", 3), ("before", 0), ("cold_start", 0), ("random", 5)):
        with pytest.raises(ConfigError, match=f"--stage={asked}: .* version {version} of 5"):
            evaluation.stage_name(asked, version, 5)


@pytest.mark.parametrize("done", ["nothing", "episodes", "episodes and result"])
def test_rename_stage_completes_what_an_interrupted_one_began(tmp_path: Path, done: str) -> None:
    tasks = evaluation.eval_tasks([CLICK], 2)
    before = run(tmp_path, lambda asked: [episode(t, True) for t in asked], tasks, stage="after")
    root, name = tmp_path / "eval", "version_3"
    if done != "nothing":
        (root / "after").rename(root / name)
    if done == "episodes and result":
        evaluation.write_json(root / f"{name}.json", dataclasses.asdict(before) | {"stage": name})
    for _ in range(2):  # again: nothing is left to do
        evaluation.rename_stage(tmp_path, "after", name)
        assert evaluation.read_results(tmp_path) == {name: dataclasses.replace(before, stage=name)}
        assert [t.task for t in read_shard(root / name / evaluation.EPISODES_FILE)[1]] == tasks
        assert not (root / "after").exists()


def test_rename_stage_keeps_what_has_the_new_name(tmp_path: Path) -> None:
    tasks = evaluation.eval_tasks([CLICK], 2)
    judged = run(tmp_path, lambda asked: [episode(t, False) for t in asked], tasks, "version_3")
    run(tmp_path, lambda asked: [episode(t, True) for t in asked], tasks, "after")
    evaluation.rename_stage(tmp_path, "after", "version_3")
    assert evaluation.read_results(tmp_path) == {"version_3": judged}
    assert not (tmp_path / "eval" / "after").exists()


def test_read_results_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for content in ('{"stage": "before", "per_task": {}}', "[" * 200_000):
        (tmp_path / "eval" / "before.json").write_text(content)
        with pytest.raises(UirlError, match=r"before\.json: not a result of this version"):
            evaluation.read_results(tmp_path)


def result(stage: str, successes: int, attempts: int) -> evaluation.EvalResult:
    tasks = evaluation.eval_tasks([CLICK], attempts)
    return evaluation.count(stage, tasks, [episode(t, k < successes) for k, t in enumerate(tasks)])


def test_count_has_the_reward_of_every_task_beside_its_success(tmp_path: Path) -> None:
    near, far = (dataclasses.replace(CLICK, name=f"own/{name}") for name in ("near", "far"))
    played = [
        dataclasses.replace(episode(dataclasses.replace(task, seed=seed), False), reward=reward)
        for task, seed, reward in ((near, 1, 0.75), (near, 2, 0.25), (far, 3, -1.0))
    ]
    counted = evaluation.count("before", [t.task for t in played], played)
    assert {task: one.mean_reward for task, one in counted.per_task.items()} == {
        near.label: 0.5,
        far.label: -1.0,
    }
    of_a_file = json.loads(json.dumps(dataclasses.asdict(counted)))
    assert to_result(of_a_file) == counted
    for task in of_a_file["per_task"].values():  # as an earlier release left it
        del task["mean_reward"]
    assert [one.mean_reward for one in to_result(of_a_file).per_task.values()] == [None, None]


def test_format_table_is_aligned() -> None:
    table = evaluation.format_table(
        [result("before", 8, 20), result("cold_start", 11, 20), result("after", 20, 20)]
    )
    assert table == (
        "stage       success    95 % interval  episodes\n"
        "----------------------------------------------\n"
        "before        40.0%   21.9% to 61.3%      8/20\n"
        "cold start    55.0%   34.2% to 74.2%     11/20\n"
        "after        100.0%  83.9% to 100.0%     20/20"
    )


def test_format_table_has_the_reward_where_other_than_successes_were_paid() -> None:
    near = dataclasses.replace(result("before", 0, 20), mean_reward=0.606)
    table = evaluation.format_table([near, result("after", 1, 20)])
    assert table == (
        "stage   success  95 % interval  episodes  reward\n"
        "------------------------------------------------\n"
        "before     0.0%  0.0% to 16.1%      0/20   0.606\n"
        "after      5.0%  0.9% to 23.6%      1/20   0.050"
    )


ACCOUNTING = {
    "published": 20, "trained": 12, "stale": 3, "quarantined": 2, "duplicate": 1, "pending": 2,
}  # fmt: skip


def test_summary_has_the_run_in_it(tmp_path: Path) -> None:
    content = evaluation.summary(
        {"before": result("before", 8, 20), "after": result("after", 19, 20)},
        seed=4,
        train_seconds=12.3456,
        peak_rss_gib=1.5,
        accounting=ACCOUNTING,
        lost=1,
        env_error=5,
        report=tmp_path / "report.html",
    )
    path = evaluation.write_summary(tmp_path, content)
    read = json.loads(path.read_text())
    assert path.name == "summary.json" and read == content
    low, high = evaluation.wilson_interval(19, 20)
    assert read["after"] == {
        "successes": 19, "attempts": 20, "rate": 0.95, "low": low, "high": high,
    }  # fmt: skip
    assert read["before"]["successes"] == 8 and "cold_start" not in read
    assert (read["seed"], read["train_seconds"], read["peak_rss_gib"]) == (4, 12.346, 1.5)
    episodes = read["episodes"]
    assert episodes["identity_holds"] and (episodes["lost"], episodes["env_error"]) == (1, 5)
    assert episodes["published"] == sum(episodes[name] for name in evaluation.FATES)
    assert read["report"].endswith("report.html")


def test_episodes_that_do_not_add_up_are_said_so() -> None:
    good = evaluation.episodes_summary(ACCOUNTING, lost=0, env_error=0)
    assert evaluation.format_episodes(good) == (
        "published 20 = 12 trained + 3 stale + 2 quarantined + 1 duplicate + 2 pending; "
        "never published: 0 lost, 0 env_error"
    )
    bad = evaluation.episodes_summary(ACCOUNTING | {"trained": 13}, lost=0, env_error=0)
    assert not bad["identity_holds"] and "published 20 IS NOT 13" in evaluation.format_episodes(bad)


@pytest.mark.parametrize(("version", "expected"), [(20, "version_20"), (None, "version_60")])
def test_final_stage_keeps_the_version_at_which_the_run_ended(tmp_path, version, expected) -> None:
    tasks = evaluation.eval_tasks([CLICK], 2)
    after = run(tmp_path, lambda asked: [episode(t, True) for t in asked], tasks, "after")
    flat = dataclasses.asdict(after) | {"policy_version": version}
    evaluation.write_json(tmp_path / "eval" / "after.json", flat)
    evaluation.keep_final(tmp_path, 60)  # its steps were 60
    assert list(evaluation.read_results(tmp_path)) == [expected]
