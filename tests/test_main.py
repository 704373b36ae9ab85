"""The command as a user runs it: real processes, a real verifier over HTTP, a tiny random model."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import cast

import pytest
from safetensors.numpy import load_file

from tests import tiny_model
from tests.command_world import (
    GROUPS,
    MEMBERS,
    ROOT,
    SHIPPED_MODEL,
    STEPS,
    assert_whole,
    command,
    metric_by_step,
    run,
    start,
)
from uirl_jax import evaluation, main
from uirl_jax.actor import processes
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import UirlError
from uirl_jax.learner.cluster import Cluster
from uirl_jax.shards import reader
from uirl_jax.store import mirror


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def test_main_all_roles_in_one_command_end_with_table_and_report(tmp_path, model_dir):
    chance = "--config.evaluation.random=True"
    process = run(tmp_path / "run", model_dir, chance)
    summary = assert_whole(tmp_path / "run", process)
    assert summary["episodes"]["lost"] == 0
    table = [line.split()[0] for line in process.stdout.splitlines() if line.endswith("/4")]
    assert table == ["random", "before", "after"], process.stdout
    assert "report.html" in process.stdout
    for stage in table:
        said = re.findall(rf'phase="evaluation {stage}" step=(\d)/4', process.stderr)
        assert (said[0], said[-1]) == ("1", "4"), process.stderr
    # A finished run says the same again, and trains nothing; also where a stage has been evaluated
    # anew since, of which the summary is older.
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps(summary | {"after": {"rate": 0.123}}))
    again = run(tmp_path / "run", model_dir, chance)
    assert assert_whole(tmp_path / "run", again) == summary
    # With a step more it carries on, and both ends are in the table.
    longer = run(tmp_path / "run", model_dir, chance, f"--config.learner.steps={STEPS + 1}")
    assert longer.returncode == 0, longer.stderr[-2000:]
    assert metric_by_step(tmp_path / "run", "step") == list(range(1, STEPS + 2))
    results = evaluation.read_results(tmp_path / "run")
    assert list(results) == ["random", "before", f"version_{STEPS}", "after"], longer.stdout
    first_end = {"successes": results[f"version_{STEPS}"].successes}
    assert first_end.items() <= summary["after"].items()
    episodes = json.loads((tmp_path / "run" / "summary.json").read_text())["episodes"]
    assert episodes["trained"] == (STEPS + 1) * GROUPS * MEMBERS


@pytest.mark.parametrize(("cold_steps", "stages"), [(1, ["before", "cold_start"]), (0, ["before"])])
def test_main_without_a_step_to_learn_measures_its_model_once(
    tmp_path, model_dir, cold_steps, stages
):
    steps = (f"--config.cold_start.steps={cold_steps}", "--config.learner.steps=0")
    process = run(tmp_path / "run", model_dir, *steps, "--config.cold_start.train=all")
    assert process.returncode == 0, process.stderr[-2000:]
    if cold_steps:  # every weight of the base, and no adapters beside them
        arrays = load_file(model_dir / "model.safetensors").values()
        weights = sum(array.size for array in arrays)
        assert f'trains="all weights" parameters={weights}' in process.stdout
    table = [line for line in process.stdout.splitlines() if line.endswith("/4")]
    names = [line.partition("  ")[0].replace(" ", "_") for line in table]
    assert names == stages, process.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [stage for stage in ("before", "cold_start", "after") if stage in summary] == stages
    assert stages[-1] in (tmp_path / "run" / "report.html").read_text()
    # Step 0 is the model that RL starts from, in every role: the last one evaluated here.
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row, measured = json.loads(line), evaluation.read_results(tmp_path / "run")[stages[-1]]
    assert (row["step"], row["eval/success"]) == (0, measured.rate)
    assert row["time_unix_s"] > measured.finished_unix_s - 0.01  # both are rounded


def test_main_loss_that_is_not_finite_stops_and_sets_the_records_aside(tmp_path, model_dir):
    """Weights that each update multiplies by 1e10: the norm of the second update is infinite."""
    config = ROOT / "tests" / "overflowing_config.py"
    process = run(tmp_path / "run", model_dir, config=config)
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    aside = tmp_path / "run" / "quarantine" / "step-2"
    assert "error: step 2: learner/update_norm=inf is not finite" in last and str(aside) in last
    assert f"go on in another --workdir, with --resume_from={tmp_path / 'run'} " in last
    assert metric_by_step(tmp_path / "run", "step") == [1]
    records = [entry for path in aside.iterdir() for entry in reader.read_shard(path)[1]]
    assert len(records) == GROUPS * MEMBERS


def test_main_step_that_keeps_too_few_episodes_gets_more_groups(tmp_path, model_dir):
    """Two groups of four are short of twenty: two more, and then one, of the same policy."""
    process = run(
        tmp_path,
        model_dir,
        "--config.algorithm.objective=imitation",
        "--config.algorithm.keep_reward=-1.0",
        "--config.algorithm.min_kept=20",
        "--config.learner.steps=2",
    )
    assert process.returncode == 0, process.stderr[-2000:]
    episodes = json.loads((tmp_path / "summary.json").read_text())["episodes"]
    assert (episodes["trained"], episodes["stale"], episodes["pending"]) == (40, 0, 0)


def test_main_eight_devices_train_as_one_does(tmp_path):
    # A temperature other than 1: the learner has to score by the distribution that was sampled.
    arguments = (
        "--config.actor.rollout.temperature=0.7",
        *(f"--config.{room}.max_new_tokens=16" for room in ("actor.rollout", "engine")),
    )
    for name, devices in (("one", 1), ("eight", 8)):
        # The base model that ships: a random one is never rewarded, and its loss is 0.
        process = run(tmp_path / name, SHIPPED_MODEL, *arguments, devices=devices)
        assert_whole(tmp_path / name, process)
    for name in ("learner/loss", "learner/grad_norm", "actor/kl_loss", "actor/entropy"):
        one, eight = (metric_by_step(tmp_path / devices, name) for devices in ("one", "eight"))
        assert eight == pytest.approx(one, abs=1e-4), name
    assert max(metric_by_step(tmp_path / "one", "actor/kl_loss")) > 1e-7  # something was learnt
    # Float32 rounding of two programs; without forbidden ids or temperature it is 0.08 and more.
    assert max(metric_by_step(tmp_path / "one", "offpolicy/drift")) < 1e-5


@pytest.mark.parametrize("objective", ["policy", "imitation"])
def test_main_step_that_finds_nothing_to_learn_ends(tmp_path, model_dir, objective):
    """The random model is never paid: ten times the groups of a step, and then it is over."""
    flags = ("--config.learner.steps=1", "--config.evaluation.episodes=0")
    flags += (f"--config.algorithm.objective={objective}",)
    process = run(tmp_path, model_dir, *flags, "--config.algorithm.skip_equal_groups=True")
    if objective == "imitation":
        assert process.returncode == 1
        said = "error: step 1: none of its 20 groups has an episode to imitate"
        assert said in process.stderr.splitlines()[-1]
        return
    assert process.returncode == 0, process.stderr[-2000:]
    assert "event=nothing_to_learn step=1 groups=20 mean_reward=0\n" in process.stdout
    # Of no episodes nothing is evaluated, and nothing said.
    assert "event=evaluated" not in process.stdout and "95 % interval" not in process.stdout
    assert not list((tmp_path / "eval").glob("*.json"))
    assert metric_by_step(tmp_path, "records/trained") == [10 * GROUPS * MEMBERS]
    assert metric_by_step(tmp_path, "groups/with_signal") == [0.0]
    assert metric_by_step(tmp_path, "groups/useless") == [10 * GROUPS]


def test_main_remembers_the_successes_of_groups_that_it_does_not_learn_from(tmp_path):
    """Groups of one differ only once a stored success has joined them."""
    flags = {"actor.group_size": 1, "learner.steps": 1, "learner.groups_per_step": 2}
    flags |= {"evaluation.episodes": 0, "curriculum.instances": 4}
    flags |= {"algorithm.skip_equal_groups": True, "algorithm.replay": True}
    arguments = [f"--config.{name}={value}" for name, value in flags.items()]
    arguments.append(f"--workdir={tmp_path}")
    process = subprocess.run(
        [sys.executable, "-m", "uirl_jax.main", "--config=configs/quickstart.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    (learnt,) = metric_by_step(tmp_path, "replay/episodes")
    (taken,) = metric_by_step(tmp_path, "records/trained")
    assert learnt == 2
    assert metric_by_step(tmp_path, "groups/useless") == [taken - learnt]
    assert metric_by_step(tmp_path, "groups/with_signal") == [pytest.approx(learnt / taken)]
    assert 0 < metric_by_step(tmp_path, "success/mean")[0] < 1


def test_main_roles_as_processes_of_their_own_train_together(tmp_path, model_dir):
    """From the model that the learner's cold start makes, for which the actor waits."""
    workdir = tmp_path / "run"
    cold = ("--config.cold_start.steps=2", "--config.cold_start.episodes=4")
    cold += ("--config.cold_start.episodes_per_step=2",)
    others = []
    try:
        for role in ("verifier", "actor"):
            with open(tmp_path / f"{role}.log", "wb") as log:
                others.append(start(command(workdir, model_dir, f"--role={role}", *cold), log))
        learner = run(workdir, model_dir, "--role=learner", *cold)
        assert learner.returncode == 0, learner.stderr[-2000:]
        assert f"trained={STEPS * GROUPS * MEMBERS}" in learner.stdout
        assert others[1].wait(60) == 0, (tmp_path / "actor.log").read_text()[-2000:]
        others[0].send_signal(signal.SIGTERM)
        assert others[0].wait(20) == 0
        said = (tmp_path / "verifier.log").read_text()
        assert "event=listening host=127.0.0.1 port=" in said
        evaluation = run(workdir, model_dir, "--role=eval", "--stage=after", *cold)
        assert evaluation.returncode == 0, evaluation.stderr[-2000:]
        assert json.loads((workdir / "eval" / "after.json").read_text())["attempts"] == 4
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_main_actors_on_one_host_train_together_though_one_is_killed(tmp_path, model_dir):
    workdir, log_path = tmp_path / "run", tmp_path / "main.log"
    more = ("--actors=3", "--config.learner.steps=12")
    with open(log_path, "wb") as log:
        main = start(command(workdir, model_dir, *more), log)
    try:
        pid = re.compile(r"event=actor_started actor=a1 pid=(\d+)")
        while not (found := pid.search(log_path.read_text())):
            assert main.poll() is None, log_path.read_text()[-2000:]
            time.sleep(0.05)
        while not (workdir / "actor").is_dir() or not list(workdir.glob("actor/a1-*.journal")):
            assert main.poll() is None, log_path.read_text()[-2000:]
            time.sleep(0.02)
        os.kill(int(found[1]), signal.SIGKILL)
        assert main.wait(240) == 0, log_path.read_text()[-2000:]
    finally:
        main.kill()
        main.wait()
    said = log_path.read_text()
    assert "event=actor_died actor=a1 exit_code=-9" in said
    episodes = json.loads((workdir / "summary.json").read_text())["episodes"]
    assert episodes["trained"] == 12 * GROUPS * MEMBERS == episodes["published"], episodes
    journals = [path.name.split("-")[0] for path in workdir.glob("actor/*.journal")]
    assert sorted(journals) == ["a0", "a1", "a2"]


@pytest.mark.parametrize(
    ("role", "index", "expected"),
    [("all", 0, "a0"), ("all", 1, "a2"), ("learner", 1, ""), ("actor", 0, "a5")],
)
def test_main_copies_the_files_of_the_actor_that_it_plays(
    tmp_path, monkeypatch, role, index, expected
):
    """With --actors=2 host 1 plays a2 and starts a3, which copies its own."""
    asked = []

    def copied(workdir: Path, open_store: object, own: mirror.Own) -> None:
        asked.append(own)
        raise InterruptedError  # what comes next is not asked here

    monkeypatch.setattr(main.mirror, "copied", copied)
    for flag, value in (("_ROLE", role), ("_ACTORS", 2), ("_ACTOR", 5)):
        monkeypatch.setattr(main, flag, types.SimpleNamespace(value=value))
    learns, stop = role != "actor", threading.Event()
    with pytest.raises(InterruptedError):
        main._run(cast(RunConfig, None), tmp_path, learns, stop, Cluster(index, 2))
    (own,) = asked
    journals = [name for name in own.written if name.startswith("actor/")]
    assert journals == ([f"actor/{expected}-*"] if expected else [])
    logs = {f"logs/{kind}-{index}.log" for kind in ("learner", "verifier")}
    assert logs.issubset(own.written) == (index > 0)


def test_main_actor_that_never_starts_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("uirl_jax.actor.processes.FIRST_PAUSE_S", 0.01)
    command_line = [sys.executable, "-c", "import sys; print('error: no such model'); sys.exit(1)"]
    with processes.actor_processes(command_line, [4], tmp_path / "logs") as actors:
        said = r"actor a4 ended 5 times with code 1: error: no such model \(log: .*actor-a4.log\)"
        with pytest.raises(UirlError, match=said):
            actors.wait(threading.Event())


def test_main_actor_whose_log_is_gone_is_given_up_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("uirl_jax.actor.processes.FIRST_PAUSE_S", 0.01)
    logs = tmp_path / "logs"
    code = (
        f"import pathlib, sys; pathlib.Path({str(logs / 'actor-a4.log')!r}).unlink(); sys.exit(1)"
    )
    with processes.actor_processes([sys.executable, "-c", code], [4], logs) as actors:
        said = r"a4 ended 5 times with code 1: its log cannot be read, No such file .* \(log: "
        with pytest.raises(UirlError, match=said):
            actors.wait(threading.Event())


@pytest.mark.parametrize("failures", [4, 5])
def test_main_actor_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch, capfd, failures):
    """No memory for a process: it may be there a moment later."""
    monkeypatch.setattr("uirl_jax.actor.processes.FIRST_PAUSE_S", 0.001)
    started, popen = [], subprocess.Popen

    def start_late(*arguments, **options) -> subprocess.Popen[bytes]:
        started.append(arguments)
        if len(started) <= failures:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return popen(*arguments, **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start_late)
    command_line = [sys.executable, "-c", ""]
    with processes.actor_processes(command_line, [4], tmp_path / "logs") as actors:
        if failures < processes.MAX_TRIES:
            actors.wait(threading.Event())
        else:
            with pytest.raises(UirlError, match=r"actor a4 cannot be started: .*allocate memory"):
                actors.wait(threading.Event())
    assert len(started) == 5
    said = 'event=actor_not_started actor=a4 reason="[Errno 12] Cannot allocate memory" restart_in'
    assert capfd.readouterr().out.count(said) == 4


def test_main_actor_that_asks_to_be_started_again_is_never_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("uirl_jax.actor.processes.FIRST_PAUSE_S", 0.001)
    lives = tmp_path / "lives"
    code = (
        f"import sys; from pathlib import Path; lives = Path({str(lives)!r});"
        "lived = len(lives.read_text()) if lives.exists() else 0;"
        "lives.write_text('x' * (lived + 1)); sys.exit(0 if lived == 7 else 75)"
    )
    with processes.actor_processes([sys.executable, "-c", code], [4], tmp_path / "logs") as actors:
        actors.wait(threading.Event())
    assert len(lives.read_text()) == 8


def test_main_stopped_while_an_actor_is_to_be_started_again_ends_at_once(tmp_path, capfd):
    command_line, stop = [sys.executable, "-c", "import sys; sys.exit(75)"], threading.Event()
    started_s = time.monotonic()
    with processes.actor_processes(command_line, [4], tmp_path / "logs") as actors:
        said = ""
        while "restart_in_s=2" not in said:
            said += capfd.readouterr().out
            assert time.monotonic() < started_s + 60, said
            time.sleep(0.02)
        said_s = time.monotonic()
        stop.set()
        actors.wait(stop)
    assert time.monotonic() - said_s < 1.0
    assert not any(thread.is_alive() for thread in actors.threads)
