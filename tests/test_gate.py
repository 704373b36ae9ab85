"""publish.gate: which policies are kept back, on made-up counts; and a run as a user starts it."""

import asyncio
import dataclasses
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import safetensors.numpy

from configs import quickstart
from tests import command_world
from tests.command_world import SHIPPED_MODEL
from tests.sample_trajectories import make_trajectory
from tools import export
from uirl_jax import evaluation, policy_sync
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import PolicyError, RestartError, UirlError
from uirl_jax.evaluation import gate
from uirl_jax.evaluation.statistics import EvalResult
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.players import Players
from uirl_jax.roles import eval as eval_role
from uirl_jax.roles.judge import RunJudge
from uirl_jax.run import Run
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.local import LocalStore
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.dialects import WRONG

CONFIG = Path(quickstart.__file__)


def result(successes: int, attempts: int = 100, mistakes: int = 0) -> EvalResult:
    counted = dataclasses.asdict(evaluation.rate(successes, attempts))
    return EvalResult(
        **counted,
        stage="version_1",
        per_task={},
        env_errors=0,
        missing=0,
        stop_reasons={},
        mean_reward=0.0,
        mean_turns=1.0,
        finished_unix_s=0.0,
        mistakes=mistakes,
    )


@pytest.mark.parametrize(
    ("new", "good", "tolerance", "said"),
    [
        (result(50), None, 0.0, ""),
        (result(0, 0), None, 0.0, "no episode of its evaluation ended"),
        (result(50), result(50), 0.0, ""),
        (result(49), result(50), 0.0, "lower bound of its success 0.394 (49 of 100)"),
        (result(49), result(50), 0.011, ""),
        (result(5, 10), result(50), 0.0, "the last good policy's 0.404 (50 of 100)"),
        (result(60, mistakes=1), result(50), 0.0, "1 mistakes that cannot be taken back"),
        (result(60, mistakes=2), result(50, mistakes=2), 0.0, ""),
    ],
)
def test_policy_is_kept_back_for_less_success_or_more_mistakes(new, good, tolerance, said):
    reason = evaluation.objection(new, good, tolerance)
    assert said in reason and bool(reason) == bool(said)


def test_decisions_survive_their_file_and_forget_what_was_taken_back(tmp_path):
    store = open_store(tmp_path)
    assert evaluation.read_decisions(store) == evaluation.Decisions()
    decisions = evaluation.Decisions().after(0, result(50), 0.0)
    decisions = decisions.after(10, result(40), 0.0).after(20, result(30), 0.0)
    assert decisions.version == 0 and [r.version for r in decisions.rejected] == [10, 20]
    evaluation.write_decisions(store, decisions)
    assert evaluation.read_decisions(store) == decisions
    assert [r.version for r in decisions.until(15).rejected] == [10]
    better = decisions.after(30, result(60), 0.0)
    assert (better.version, better.rejected) == (30, ())
    # A policy is judged before its checkpoint is saved: a killed run goes on before it.
    assert better.until(20) == decisions and better.until(15) == decisions.until(15)
    evaluation.write_decisions(store, better)
    assert evaluation.read_decisions(store) == better
    again = better.after(40, result(80), 0.0)
    assert again.until(30) == dataclasses.replace(better, earlier=None)
    assert again.until(20) == evaluation.Decisions(), "of two good ones both were taken back"
    for text in ("[]", "{", '{"good": {"version": 1}, "rejected": []}', "[" * 100_000):
        (tmp_path / gate.GATE_FILE).write_text(text)
        with pytest.raises(UirlError, match=r"gate\.json: not the decisions of a gate"):
            evaluation.read_decisions(store)


def test_export_says_what_the_gate_knows_of_a_policy(tmp_path):
    cfg = SimpleNamespace(publish=SimpleNamespace(gate="export"))
    store, decisions = open_store(tmp_path), evaluation.Decisions()

    def said(version: int) -> str:
        source = export.Source(f"the checkpoint of step {version}", version, {})
        with pytest.raises(PolicyError) as caught:
            export.check_gate(tmp_path, cast(RunConfig, cfg), source)
        return str(caught.value)

    assert "no policy has passed yet: add --ungated" in said(0)
    for version, successes in ((0, 50), (20, 60), (30, 40), (40, 70), (50, 60)):
        decisions = decisions.after(version, result(successes), 0.0)
    evaluation.write_decisions(store, decisions)
    assert "it was good, and there is a newer good one; the last good policy is" in said(20)
    assert "lower bound of its success" in said(30) and "lower bound of its success" in said(50)
    assert "or so long ago that nothing is known of it; the last good policy is version 40" in said(
        0
    )
    export.check_gate(tmp_path, cast(RunConfig, cfg), export.Source("the best", 40, {}))


def test_mistakes_and_false_claims_are_counted():
    tasks = [TaskSpec("web/form", seed, "", 2) for seed in (1, 2)]
    wrong, claimed = (
        dataclasses.replace(make_trajectory(f"e{task.seed}"), task=task, success=False)
        for task in tasks
    )
    turn = dataclasses.replace(wrong.turns[-1], progress={WRONG: 2})
    wrong = dataclasses.replace(wrong, turns=[*wrong.turns[:-1], turn])
    end = dataclasses.replace(claimed.turns[-1], action=Action("terminate", text="success"))
    claimed = dataclasses.replace(claimed, turns=[*claimed.turns[:-1], end])
    counted = evaluation.count("before", tasks, [wrong, claimed])
    assert (counted.mistakes, counted.false_claims) == (2, 1)


def keep_best(workdir: Path, version: int, successes: int, **changes) -> None:
    """Of a policy whose export is what `save` writes."""
    players = SimpleNamespace(
        model=SimpleNamespace(trains="adapters"), to_trainable=lambda adapters: version
    )
    run = cast(Run, SimpleNamespace(workdir=workdir, cfg=SimpleNamespace(chat=None)))
    adapters = {"lora": np.zeros(1, np.float32)}
    eval_role.keep_best(
        run, cast(Players, players), version, adapters, result(successes), **changes
    )


def save(model: object, directory: Path, trainable: int, chat: object) -> None:
    (directory / "adapter").write_text(str(trainable))


def exports(workdir: Path) -> tuple[int, dict[str, str]]:
    """What best.json names, and what is beside it."""
    version = json.loads((workdir / eval_role.BEST_FILE).read_text())["version"]
    return version, {p.parent.name: p.read_text() for p in (workdir / "best").glob("*/*")}


def test_best_that_cannot_be_read_is_not_replaced_by_a_worse_one(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "save_policy", save)
    keep_best(tmp_path, 3, 90)
    with monkeypatch.context() as patch:

        def away(store: LocalStore, name: str) -> bytes:
            raise StoreUnavailableError(5, "away", name)

        patch.setattr(LocalStore, "read", away)
        with pytest.raises(StoreUnavailableError):
            keep_best(tmp_path, 4, 50)
    assert exports(tmp_path) == (3, {"version_3": "3"})
    keep_best(tmp_path, 4, 50)
    assert exports(tmp_path) == (3, {"version_3": "3"})
    keep_best(tmp_path, 5, 91)
    assert exports(tmp_path) == (5, {"version_5": "5"})
    (tmp_path / eval_role.BEST_FILE).write_text("{")  # says nothing that could be kept
    keep_best(tmp_path, 6, 10)
    assert exports(tmp_path) == (6, {"version_6": "6"})


def test_best_stays_whole_when_its_own_version_cannot_be_exported_again(tmp_path, monkeypatch):
    """A step that a killed run repeats, or the same policy evaluated again, with more luck."""
    monkeypatch.setattr(loading, "save_policy", save)
    keep_best(tmp_path, 3, 50)
    whole = exports(tmp_path)

    def fill_the_disk(model: object, directory: Path, *_: object) -> None:
        (directory / "adapter").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "save_policy", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            keep_best(tmp_path, 3, 60)
    assert exports(tmp_path) == whole == (3, {"version_3": "3"})
    monkeypatch.setattr(
        loading, "save_policy", lambda _, directory, *__: (directory / "other").write_text("again")
    )
    keep_best(tmp_path, 3, 60)
    assert exports(tmp_path) == (3, {"version_3": "again"})
    assert [path.name for path in (tmp_path / "best" / "version_3").iterdir()] == ["other"]


def test_two_processes_that_export_one_version_do_so_one_after_the_other(tmp_path, monkeypatch):
    second = threading.Thread(target=keep_best, args=(tmp_path, 3, 60))
    began = []

    def save_slowly(model: object, directory: Path, trainable: int, chat: object) -> None:
        save(model, directory, trainable, chat)
        began.append(directory)
        if threading.current_thread() is not second:
            second.start()
            second.join(0.3)  # it would delete what this one has written
            assert len(began) == 1

    monkeypatch.setattr(loading, "save_policy", save_slowly)
    keep_best(tmp_path, 3, 50)
    second.join()
    assert len(began) == 2 and exports(tmp_path) == (3, {"version_3": "3"})
    assert json.loads((tmp_path / eval_role.BEST_FILE).read_text())["successes"] == 60


def flags(*more: str, gate: str = "actors") -> tuple[str, ...]:
    return (
        *("--config.evaluation.every=1", "--config.evaluation.episodes=40"),
        *("--config.learner.steps=3", "--config.learner.groups_per_step=2"),
        *("--config.learner.optimizer.lr=0.3", "--config.learner.optimizer.warmup_steps=0"),
        *(f"--config.publish.gate={gate}", *more),
    )


def arrays_of_manifest(workdir: Path) -> tuple[int, dict[str, np.ndarray]]:
    store = open_store(workdir)
    manifest = policy_sync.read_manifest(store)
    assert manifest is not None
    return manifest.version, policy_sync.load(store, manifest, manifest.base_hash)


def test_gate_keeps_policies_that_lost_success_from_actors_and_survives_a_kill(tmp_path, capsys):
    """The learning rate destroys the policy in one step: actors stay with the base."""
    workdir = tmp_path / "run"
    with (tmp_path / "log").open("wb") as log:
        started = command_world.start(
            command_world.command(workdir, SHIPPED_MODEL, *flags(), config=CONFIG), log
        )
        deadline_s = time.monotonic() + 300
        while not (workdir / "eval" / "version_2.json").exists() and time.monotonic() < deadline_s:
            assert started.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
    # An evaluation of a future that the restart repeats must not decide.
    lost = json.loads((workdir / "eval" / "version_2.json").read_text())
    lost |= {"stage": "version_3", **dataclasses.asdict(evaluation.rate(40, 40))}
    (workdir / "eval" / "version_3.json").write_text(json.dumps(lost))
    done = command_world.run(workdir, SHIPPED_MODEL, *flags(), config=CONFIG)
    assert done.returncode == 0, done.stderr
    results = evaluation.read_results(workdir)
    assert results["before"].successes > 0 == results["version_1"].successes
    assert results["after"].successes == results["before"].successes

    decisions = evaluation.read_decisions(open_store(workdir))
    assert (decisions.version, decisions.good) == (0, results["before"])
    assert [each.version for each in decisions.rejected] == [1, 2, 3]
    version, published = arrays_of_manifest(workdir)
    learnt, base = (read_adapters(workdir, step)[1] for step in (3, None))
    assert version == 3 and published.keys() == learnt.keys()
    assert any(array.any() for name, array in base.items() if "lora_b" in name)
    assert not any(array.any() for name, array in published.items() if "lora_b" in name)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["eval/success"] for row in rows[1:3]] == [0.0, 0.0]
    assert [row["offpolicy/steps_kept_back"] for row in rows[1:]] == [1, 2, 3]
    assert json.loads((workdir / "best" / "best.json").read_text())["version"] == 0

    # What actors have may be exported, and what best/ has; a checkpoint that failed may not.
    for number, flags_of_source in enumerate(([], ["--source=best"])):
        out = tmp_path / f"out{number}"
        assert (
            export.main(["adapter", f"--workdir={workdir}", f"--out={out}", *flags_of_source]) == 0
        )
        held = safetensors.numpy.load_file(out / "adapter_model.safetensors")
        assert held and not any(array.any() for name, array in held.items() if "lora_B" in name)
    out = ["adapter", f"--workdir={workdir}", f"--out={tmp_path / 'failed'}", "--checkpoint=3"]
    assert export.main(out) == 1
    said = capsys.readouterr().err
    assert "checkpoint of step 3 is kept back by publish.gate='actors': lower bound" in said
    assert "version 0: export it with --source=best" in said
    assert not (tmp_path / "failed").exists()
    assert export.main([*out, "--ungated"]) == 0


@pytest.mark.parametrize("call", ["open", "read"])
def test_good_policy_is_not_given_up_while_the_storage_is_away(tmp_path, monkeypatch, call):
    """A run goes on at step 3, whose policy was kept back; actors have that of step 2."""
    store, good = open_store(tmp_path), {"a": np.ones(2, np.float32)}
    evaluation.write_decisions(store, evaluation.Decisions(2, result(50)))
    policy_sync.publish(
        store, version=3, step=3, arrays=good, base_hash="base", run_id="run", extra={}
    )
    cfg = SimpleNamespace(publish=SimpleNamespace(gate="actors"))
    logged: list[str] = []
    run = SimpleNamespace(
        cfg=cfg,
        workdir=tmp_path,
        store=store,
        run_id="run",
        log=lambda event, **fields: logged.append(event),
    )
    players = SimpleNamespace(model=SimpleNamespace(base_hash="base"))

    def judged():
        return RunJudge(run, players, None, threading.Event())(3, {"a": np.zeros(2, np.float32)})

    real = getattr(LocalStore, call)

    def away(store, name):
        if name.startswith("policy/"):
            raise StoreUnavailableError(5, "away")
        return real(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, call, away)
        with pytest.raises(RestartError, match="does not answer"):
            judged()
    policy, of_step, *_ = judged()
    assert of_step == 2 and not logged
    np.testing.assert_array_equal(policy["a"], good["a"])
    store.delete(policy_sync.MANIFEST)
    assert judged()[1] == 3 and logged == ["good_policy_lost"]


def test_base_without_an_episode_that_ended_is_one_error_and_no_decision(tmp_path):
    async def measure(players, stage, stop):
        return dataclasses.replace(result(0, 0), stage=stage, env_errors=8)

    cfg = SimpleNamespace(
        publish=SimpleNamespace(gate="actors", tolerance=0.0, patience=0),
        cold_start=SimpleNamespace(steps=0),
    )
    run = SimpleNamespace(cfg=cfg, workdir=tmp_path, store=open_store(tmp_path), measure=measure)
    engine = SimpleNamespace(set_policy=lambda policy, version: None)
    players = SimpleNamespace(engine=engine, to_trainable=lambda policy: policy)
    background = SimpleNamespace(run=asyncio.run)
    for _ in range(2):  # the same command again
        with pytest.raises(RestartError, match="no episode of stage before ended, 8 were env_err"):
            RunJudge(run, players, background, threading.Event())(0, {"a": np.zeros(1)})
    assert not (tmp_path / gate.GATE_FILE).exists()


@pytest.mark.parametrize("attempts", [0, 8])
def test_stage_without_an_episode_that_ended_is_played_again(tmp_path, attempts):
    stored = dataclasses.replace(result(0, attempts), stage="before", missing=8 - attempts)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "before.json").write_text(json.dumps(dataclasses.asdict(stored)))
    players = cast(Players, SimpleNamespace(workdir=tmp_path))
    evaluating = Players.evaluate(players, "before", [], threading.Event(), temperature=1.0)
    again = asyncio.run(evaluating)  # of no instances, which needs no engine
    assert (again == stored) == bool(attempts)


def test_run_that_goes_on_at_a_good_policy_keeps_it_and_evaluations_leave_best_alone(tmp_path):
    workdir = tmp_path / "run"
    short = flags("--config.learner.steps=1")
    done = command_world.run(workdir, SHIPPED_MODEL, *short, config=CONFIG)
    assert done.returncode == 0, done.stderr
    # The evaluation of step 1 found it destroyed; say that it had found it good.
    good = dataclasses.asdict(evaluation.rate(40, 40))
    good = dataclasses.replace(evaluation.read_results(workdir)["version_1"], **good)
    evaluation.write_decisions(open_store(workdir), evaluation.Decisions(1, good))

    longer = flags("--config.learner.steps=2")
    done = command_world.run(workdir, SHIPPED_MODEL, *longer, config=CONFIG)
    assert done.returncode == 0, done.stderr
    assert "event=policy_kept_back version=2 good=1" in done.stdout
    version, published = arrays_of_manifest(workdir)
    learnt = read_adapters(workdir, 1)[1]
    assert version == 2
    for name, array in published.items():
        np.testing.assert_array_equal(array, learnt[name].astype(array.dtype))
    results = evaluation.read_results(workdir)
    assert (results["version_1"].policy_version, results["version_2"].policy_version) == (1, 2)
    assert results["after"].policy_version == 2  # as the manifest counts

    # Better than the best so far, but not judged by the gate.
    best = workdir / "best" / "best.json"
    best.write_text(json.dumps({**json.loads(best.read_text()), "rate": -1.0}))
    known = best.read_text()
    asked = (*longer, "--role=eval", "--stage=again")
    done = command_world.run(workdir, SHIPPED_MODEL, *asked, "--checkpoint=2", config=CONFIG)
    assert done.returncode == 0, done.stderr
    assert best.read_text() == known
    done = command_world.run(workdir, SHIPPED_MODEL, *asked, config=CONFIG)
    assert done.returncode == 1
    assert "it was evaluated before, with version 2, and this is version 1" in done.stderr


def test_gate_ends_a_run_after_its_patience_and_says_why(tmp_path):
    workdir = tmp_path / "run"
    asked = flags("--config.publish.patience=2", gate="export")
    done = command_world.run(workdir, SHIPPED_MODEL, *asked, config=CONFIG)
    assert done.returncode == 0, done.stderr
    assert "event=policy_kept_back version=2 good=0" in done.stdout
    assert "event=ended_early step=2" in done.stdout and "publish.patience=2" in done.stdout
    # Actors have it all the same.
    version, published = arrays_of_manifest(workdir)
    assert version == 2
    assert any(array.any() for name, array in published.items() if "lora_b" in name)
    with pytest.raises(PolicyError, match="policy version 2 is kept back"):
        export.export("adapter", workdir, tmp_path / "out")
    again = command_world.run(workdir, SHIPPED_MODEL, *asked, config=CONFIG)
    assert again.returncode == 0 and "event=policy_kept_back" not in again.stdout


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (("publish.gate=export",), "publish.gate='export': decides by evaluations"),
        (("publish.patience=1",), "nothing is kept back with publish.gate='none'"),
        (
            ("evaluation.every=2", "actor.policy_lag=1", "learner.max_staleness=1"),
            "the engine holds an earlier policy with actor.policy_lag=1",
        ),
        (("actor.group_size=1",), "every advantage within a group of one is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_the_start(tmp_path, flag, said):
    asked = [f"--config.{each}" for each in flag]
    done = command_world.run(tmp_path / "run", SHIPPED_MODEL, *asked, config=CONFIG)
    assert done.returncode == 1 and said in done.stderr
    assert not (tmp_path / "run").exists()
