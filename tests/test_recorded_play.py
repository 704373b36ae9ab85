"""Recorded tasks through the actor, and what comes after: records, scores, tables, advantages."""

import asyncio
import contextlib
import dataclasses
import json
import re
import threading

import numpy as np
import pytest

from tests import actor_world as world
from tests.recorded_rows import InMemory, click, grounding_set, row, step, walk_row
from tools import score_again
from uirl_jax import evaluation, seeds
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.config import schema
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation.recorded import from_json, recorded_results
from uirl_jax.evaluation.suite import Suite, SuiteTask
from uirl_jax.learner import loop
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.rl.advantages import AdvantageConfig, group_advantages, with_negative_weight
from uirl_jax.roles.eval import run_suite
from uirl_jax.run import Run
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.rules import no_own_rule
from uirl_jax.verifiers.recorded import rewards
from uirl_jax.verifiers.recorded.draw import Draw
from uirl_jax.verifiers.recorded.in_process import RecordedClient
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.server import serve

NAME = "recorded/made"
WEIGHTS = {"point_in_box": 1.0, "type": 0.1}


def play(rows, *texts, task=None, weights=WEIGHTS, remote=False):
    """One episode of an engine that says these texts."""
    task = task or TaskSpec(NAME, 0, max_turns=1)
    find = rewards.with_weights(weights, no_own_rule)

    async def run():
        sets = RecordedSets({"made": rows})
        async with serve(recorded=sets) as port:
            client = RecordedClient(sets, find_own_rule=find)
            if remote:
                client = VerifierClient(f"http://127.0.0.1:{port}", find_own_rule=find)
            async with client:
                engine = world.ScriptedEngine(lambda turn: texts[turn])
                setup = RolloutSetup(client, engine, world.chat(), world.inputs(), RolloutConfig())
                return await run_episode(task, setup, seed=0, group_id="g")

    return asyncio.run(run())


@pytest.mark.parametrize("remote", [False, True])
def test_an_episode_of_one_step_is_a_record_with_every_part(remote):
    trajectory = play(grounding_set(), "click(40,60)", remote=remote)
    (turn,) = trajectory.turns
    assert (turn.action.x, turn.action.y) == (40, 60)
    assert trajectory.stop_reason is StopReason.COMPLETED and trajectory.success
    assert trajectory.reward == pytest.approx(1.1)
    assert turn.progress["parts"]["gaussian"] == 1.0 and turn.progress["row"] == "r0"


@pytest.mark.parametrize("remote", [False, True])
def test_a_recorded_end_is_judged_and_another_claim_is_not_paid(remote):
    claim = 'terminate("success")'
    ends = InMemory([row(0, [step(Action("terminate", text="success"))])])
    right = play(ends, claim, remote=remote)
    assert right.success and right.reward == pytest.approx(0.1)  # its type; there is no box
    wrong = play(grounding_set(), claim, remote=remote)
    assert wrong.stop_reason is StopReason.FAILED and wrong.reward == 0.0


@pytest.mark.parametrize("remote", [False, True])
def test_an_invalid_action_is_unpaid_and_says_its_row(remote):
    trajectory = play(grounding_set(), "I would rather not", remote=remote)
    assert trajectory.stop_reason is StopReason.FORMAT_ERROR and trajectory.reward == 0.0
    progress = trajectory.turns[-1].progress
    assert progress["row"] == "r0" and not any(progress["parts"].values())


def test_a_walk_of_the_seeds_example_is_walked_to_its_end():
    task = TaskSpec(NAME, 0, "walk=1", max_turns=20)
    said = ("click(0,0)", "click(40,60)", 'type("Musk")', 'terminate("success")')
    weights = {"match": 1.0, "completion": 0.5}
    trajectory = play(InMemory([walk_row()]), *said, task=task, weights=weights)
    assert trajectory.success and trajectory.reward == pytest.approx(1.5)
    assert len(trajectory.turns) == 4  # a wrong action costs a turn
    earned = [turn.reward for turn in trajectory.turns]
    assert earned == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3 + 0.5])


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_an_invalid_action_in_a_walk_forfeits_what_was_walked_in_every_account(weight):
    task = TaskSpec(NAME, 0, "walk=1", max_turns=20)
    weights = {"match": weight}
    walked = play(InMemory([walk_row()]), "click(40,60)", "hm", task=task, weights=weights)
    assert walked.stop_reason is StopReason.FORMAT_ERROR and len(walked.turns) == 2
    assert walked.reward == pytest.approx(min(0.0, weight / 3))
    assert walked.turns[-1].progress["parts"]["match"] == pytest.approx(1 / 3)
    find = score_again.rule_finder("", "", f"match={weight}")
    (again,) = score_again.score_again([walked], find, score_again.collections.Counter())
    assert again.reward == pytest.approx((walked.reward, walked.reward))
    assert again.success == (False, False)
    (result,) = recorded_results([walked]).values()
    assert result.attempts == 1 and not any(result.parts.values())


def test_stored_progress_is_scored_again_under_other_weights():
    trajectories = [play(grounding_set(), text) for text in ("click(40,60)", "click(0,0)")]
    find = score_again.rule_finder("", "", "gaussian=2,form=0.5")
    found = list(score_again.score_again(trajectories, find, score_again.collections.Counter()))
    assert [again.success for again in found] == [(True, True), (False, False)]
    far = np.exp(-(2.0**2 + 3.0**2) / 2)  # of (0, 0) from (40, 60), sigma 20
    assert [again.reward[1] for again in found] == pytest.approx([2.5, 2 * far + 0.5])
    with pytest.raises(ConfigError, match="give one of"):
        score_again.rule_finder("a:b", "", "form=1")


def labelled(platform, ui_type):
    return {"platform": platform, "ui_type": ui_type}


def test_evaluation_counts_by_platform_and_kind_and_writes_it_down():
    labels = [labelled("mobile", "text"), labelled("mobile", "icon"), labelled("web", "icon")]
    rows = InMemory([row(n, [click()], "test", each) for n, each in enumerate(labels)])
    kind = TaskSpec(NAME, 0, max_turns=1)
    tasks = evaluation.eval_tasks([kind], 3)
    said = ("click(40,60)", "click(0,0)", "nothing")  # on row 0, 1, 2
    order = [Draw(rows).pick(task).row for task in tasks]
    played = [play(rows, said[n], task=task) for n, task in zip(order, tasks, strict=True)]
    result = evaluation.count("after", tasks, played)
    found = result.recorded[NAME]
    assert (found.attempts, found.rows) == (3, 3)
    cells = {(c.platform, c.ui_type): (c.hits.successes, c.hits.attempts) for c in found.cells}
    assert cells == {
        ("mobile", "text"): (1, 1),
        ("mobile", "icon"): (0, 1),
        ("web", "icon"): (0, 1),
    }
    assert found.parts["point_in_box"] == pytest.approx(1 / 3)
    assert found.parts["form"] == pytest.approx(2 / 3)  # one was no action
    assert from_json(dataclasses.asdict(found)) == found
    table = evaluation.format_recorded(result.recorded).splitlines()
    assert table[0] == "recorded/made: 3 episodes on 3 rows"
    assert table[2].split() == ["point_in_box", "text", "icon", "all"]
    assert table[4].split() == ["mobile", "100.0%", "(1/1)", "0.0%", "(0/1)", "50.0%", "(1/2)"]
    assert table[6].split() == ["all", "100.0%", "(1/1)", "0.0%", "(0/2)", "33.3%", "(1/3)"]
    assert table[7] == "mean of the 3 cells: 33.3%"
    assert any(line.split() == ["aitw", "33.3%"] for line in table)


def test_a_suite_prints_the_table_of_each_policy(tmp_path, monkeypatch, capsys):
    rows = InMemory([row(n, [click()], "test", labelled("web", "icon")) for n in range(2)])
    sets = RecordedSets({"made": rows})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)

    class Clicking:
        """In place of `Players`: clicks at one place."""

        def __init__(self, text):
            self._text = text

        async def play_suite(self, suite, directory, contender, stop):
            async def play_missing(missing, on_done):
                for number, spec in missing:
                    ended = await asyncio.to_thread(play, rows, self._text, task=spec)
                    on_done(dataclasses.replace(ended, group_id=f"{number:08d}"))

            return await evaluation.play_suite(play_missing, suite, directory, contender)

    @contextlib.asynccontextmanager
    async def playing(run, checkpoint):
        contender = evaluation.Contender(checkpoint, {}, "hash", world.layout())
        yield Clicking("click(40,60)" if checkpoint == "good" else "click(0,0)"), contender

    monkeypatch.setattr("uirl_jax.roles.contenders.playing", playing)
    cfg = run_config([NAME], recorded=rewards.RecordedConfig({"made": "made.parquet"}))
    suite = Suite("s", (SuiteTask(NAME, instances=2),))
    for _ in range(2):  # the second reads what the first has played
        run_suite(Run(cfg, tmp_path, "id"), threading.Event(), suite, ["good", "bad"])
        printed = capsys.readouterr().out
        good, bad = printed.index("\ngood\nrecorded/made: 2"), printed.index("\nbad\nrecorded/made")
        assert re.search(r"web +100\.0% \(2/2\)", printed[good:bad])
        assert re.search(r"web +0\.0% \(0/2\)", printed[bad:])


def test_evaluation_of_other_tasks_and_of_sets_without_labels_has_no_cells():
    assert evaluation.count("after", [], []).recorded == {}
    spec = TaskSpec(NAME, 0, max_turns=1)
    (found,) = evaluation.count(
        "after", [spec], [play(grounding_set(), "click(0,0)")]
    ).recorded.values()
    assert found.cells == [] and evaluation.format_recorded({NAME: found}).count("\n") == 12


def test_several_recorded_kinds_leave_out_no_row():
    kinds = [TaskSpec(NAME, 0), TaskSpec("recorded/other", 0), TaskSpec("desktop/click_button", 0)]
    tasks = evaluation.eval_tasks(kinds, 9)
    numbers = [task.seed - seeds.EVAL_SEEDS.start for task in tasks]
    assert numbers == [0, 0, 2, 1, 1, 5, 2, 2, 8]  # the others are what they were


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_negative_advantages_are_weighted(weight):
    rewards_g = [1.0, 0.0, 0.0, 0.0]
    members = [np.array([0.0, reward]) for reward in rewards_g]
    plain = group_advantages(members, [[2]] * 4, AdvantageConfig())
    found = with_negative_weight(plain, weight)
    for member, reward in enumerate(rewards_g):
        advantage = (reward - 0.25) / (np.std(rewards_g) + 1e-6)
        expected = advantage if advantage >= 0 else weight * advantage
        np.testing.assert_allclose(found[member], [expected] * 2, rtol=1e-6)
        assert found[member].dtype == np.float32


def run_config(tasks, **verifier):
    return schema.RunConfig(
        schema.ModelConfig("asset:tiny-ui-base"),
        tuple(schema.TaskConfig(name) for name in tasks),
        schema.LearnerConfig(steps=1, groups_per_step=1),
        verifier=schema.VerifierConfig(**verifier),
    )


def test_a_run_of_recorded_tasks_alone_needs_no_server():
    recorded = rewards.RecordedConfig({"made": "made.parquet"})
    over_http = dataclasses.replace(recorded, in_process=False)
    assert not run_config([NAME], recorded=recorded).needs_server
    assert run_config([NAME], recorded=over_http).needs_server
    assert run_config([NAME, "desktop/click_button"], recorded=recorded).needs_server
    assert not run_config([NAME], urls=("http://127.0.0.1:1",)).needs_server
    with pytest.raises(ConfigError, match=r"'recorded/made' is not in verifier\.recorded\.sets"):
        run_config([NAME])


def test_recordings_demonstrate_themselves(monkeypatch):
    sets = RecordedSets({"made": InMemory([walk_row()])})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        trajectory = demonstrator.demonstrate(
            TaskSpec(NAME, 0, "walk=1", max_turns=5),
            world.chat(),
            world.inputs(),
            np.random.default_rng(0),
        )
    assert trajectory.success
    assert [turn.action.kind for turn in trajectory.turns] == ["click", "type", "terminate"]


def test_server_process_and_a_run_in_process_play_a_file(tmp_path):
    pytest.importorskip("pyarrow")
    from uirl_jax.verifiers.recorded import parquet, sets
    from uirl_jax.verifiers.server import supervisor

    path = tmp_path / "made.parquet"
    parquet.write_rows(path, [row(n, [click(shade=n)], "train") for n in range(3)])
    port_file = tmp_path / "port"

    async def progress_of(client):
        async with client:
            session = await client.create(TaskSpec(NAME, 1))
            await client.act(session.id, Action("click", x=50, y=60), "a")
            return session.instruction, await client.progress(session.id)

    with supervisor.bundled_server(port_file, tmp_path / "log", recorded={"made": str(path)}):
        (url,) = supervisor.read_urls(port_file)
        remote = asyncio.run(progress_of(VerifierClient(url)))
    local = asyncio.run(progress_of(RecordedClient(sets.load({"made": str(path)}))))
    assert remote == local and local[1]["parts"]["point_in_box"] == 1.0
    with pytest.raises(ConfigError, match=r"recorded sets: b: .*none\.parquet"):
        sets.load({"a": str(path), "b": str(tmp_path / "none.parquet")})


def test_a_steps_metrics_have_every_rule_of_recorded_episodes():
    group = [play(grounding_set(), text) for text in ("click(40,60)", "click(0,0)", "no")]
    found = loop._describe([group], AlgorithmConfig(), 0)
    assert found["recorded/point_in_box"] == pytest.approx(1 / 3)
    assert found["recorded/form"] == pytest.approx(2 / 3)
    other = dataclasses.replace(group[0], task=TaskSpec("desktop/click_button", 0))
    names = loop._describe([[other]], AlgorithmConfig(), 0)
    assert not any(name.startswith("recorded/") for name in names)


def test_a_set_with_too_large_a_picture_is_refused_before_the_run(tmp_path, monkeypatch):
    sets = RecordedSets({"made": InMemory([row(0, [click(), click(size=(800, 600))])])})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    cfg = run_config([NAME], recorded=rewards.RecordedConfig({"made": "made.parquet"}))
    planned = Run(cfg, tmp_path, "id")
    inputs = world.inputs()  # at most 12 visual tokens, whatever the picture
    assert planned._recorded_sets(inputs).sizes() == {(100, 200), (800, 600)}
    few = dataclasses.replace(cfg.engine, image_row_patches=16)
    planned = dataclasses.replace(planned, cfg=dataclasses.replace(cfg, engine=few))
    with pytest.raises(ConfigError, match=r"800x600 pixels has \d+ patches, .* take 16; set"):
        planned._recorded_sets(inputs)
    narrow = dataclasses.replace(cfg.verifier.limits, max_image_pixels=100_000)
    verifier = dataclasses.replace(cfg.verifier, limits=narrow)
    planned = dataclasses.replace(planned, cfg=dataclasses.replace(cfg, verifier=verifier))
    with pytest.raises(ConfigError, match=r"800x600, at most 100000 pixels .* --longest_px"):
        planned._recorded_sets(inputs)
    # So is one that the run's server plays.
    served = dataclasses.replace(verifier.recorded, in_process=False)
    verifier = dataclasses.replace(verifier, recorded=served)
    planned = dataclasses.replace(planned, cfg=dataclasses.replace(cfg, verifier=verifier))
    assert planned.cfg.needs_server
    with pytest.raises(ConfigError, match=r"800x600, at most 100000 pixels .* --longest_px"):
        planned._recorded_sets(inputs)


def test_a_suite_plays_each_step_of_a_set_once(tmp_path, monkeypatch, capsys):
    rows = InMemory([walk_row(0, "test"), row(1, [click()], "test"), walk_row(2, "test")])
    loaded = []

    def load(paths):
        loaded.append(paths)
        return RecordedSets({"made": rows})

    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", load)
    cfg = run_config([NAME], recorded=rewards.RecordedConfig({"made": "x", "other": "y"}))
    suite = Suite(
        "s",
        (
            SuiteTask(NAME, instances=500),
            SuiteTask(NAME, "walk=1", max_turns=20, instances=500),
            SuiteTask("desktop/click_button", instances=500),
        ),
    )

    def played_of(suite, cfg=cfg):
        run = Run(cfg, tmp_path, "id")
        return suite.only(run.without_repeated_rows(suite.specs, suite=suite.name))

    once = played_of(suite)
    assert loaded == [{"made": "x"}]
    asked = [len(task.specs) for task in once.tasks]
    assert asked == [3 + 1 + 3, 3, 500]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2, "a line for each task that has fewer"
    assert "task=recorded/made asked=500 played=7" in printed[0]
    shown = set()
    for spec in once.tasks[0].specs:
        progress = play(rows, "click(0,0)", task=spec).turns[-1].progress
        shown.add((progress["row"], progress["step"]))
    assert len(shown) == 7
    elsewhere = dataclasses.replace(cfg.verifier, urls=("http://127.0.0.1:1",))
    assert played_of(suite, dataclasses.replace(cfg, verifier=elsewhere)) == suite
    with pytest.raises(ConfigError, match=r"suite s-tuning: .* no rows of split 'validation'"):
        played_of(suite.on_tuning())
    # So does a run's own evaluation, also of a kind that is listed twice.
    twice = [TaskSpec(NAME, 0), TaskSpec(NAME, 0)]
    assert len(set(evaluation.eval_tasks(twice, 6))) == 6
    stage = evaluation.eval_tasks(twice, 200)
    assert len(Run(cfg, tmp_path, "id").without_repeated_rows(stage, stage="before")) == 7
    assert "event=stage_shortened stage=before" in capsys.readouterr().out
    run_suite(Run(cfg, tmp_path, "id"), threading.Event(), Suite("t", suite.tasks[:1]), [])
    asked_for = json.loads((tmp_path / "eval" / "suites" / "t" / "suite.json").read_text())
    assert len(asked_for["tasks"][0]["seeds"]) == 7
