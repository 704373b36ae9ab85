"""The command as a user runs it: real processes, a real verifier over HTTP, a tiny random model."""

import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from tests import tiny_config, tiny_model
from tools import export
from uirl_jax import checkpoints, evaluation, policy_sync
from uirl_jax.actor import processes
from uirl_jax.config import reading, schema
from uirl_jax.errors import ConfigError, RestartError, UirlError
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig
from uirl_jax.roles.all import _is_json_object, run_all
from uirl_jax.roles.eval import run_eval_role
from uirl_jax.run import Run, open_run
from uirl_jax.shards import journal, reader
from uirl_jax.store import open_store
from uirl_jax.store.lease import only_learner
from uirl_jax.verifiers.server import supervisor

ROOT = Path(__file__).parents[1]
SHIPPED_MODEL = ROOT / "uirl_jax" / "assets" / "tiny-ui-base"
STEPS, GROUPS, MEMBERS = 4, 2, 4  # of tiny_config


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def command(
    workdir: Path, model_dir: Path | str, *arguments: str, config: Path = tiny_model.CONFIG
) -> list[str]:
    return [
        *(sys.executable, "-m", "uirl_jax.main", f"--config={config}"),
        *(f"--workdir={workdir}", f"--config.model.path={model_dir}", *arguments),
    ]


def run(
    workdir: Path,
    model_dir: Path | str,
    *arguments: str,
    devices: int = 1,
    config: Path = tiny_model.CONFIG,
) -> subprocess.CompletedProcess[str]:
    more_flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {more_flags}",
    }
    return subprocess.run(
        command(workdir, model_dir, *arguments, config=config),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def start(arguments: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=log)


def assert_whole(workdir: Path, process: subprocess.CompletedProcess[str]) -> dict:
    """A finished run: every record trained once, in every account of it."""
    assert process.returncode == 0, process.stderr[-2000:]
    summary = json.loads((workdir / "summary.json").read_text())
    episodes = summary["episodes"]
    assert episodes["trained"] == STEPS * GROUPS * MEMBERS
    fates = ("trained", "stale", "quarantined", "duplicate", "pending")
    assert episodes["published"] == sum(episodes[name] for name in fates)
    assert metric_by_step(workdir, "step") == list(range(1, STEPS + 1))
    shards = [line.shard for line in journal.Journal(open_store(workdir)).lines]
    assert len(shards) == len(set(shards))
    assert summary["before"]["attempts"] == summary["after"]["attempts"] == 4
    assert (workdir / "report.html").stat().st_size > 1000
    return summary


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
    # A finished run says the same again, and trains nothing.
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
    process = run(tmp_path / "run", model_dir, *steps)
    assert process.returncode == 0, process.stderr[-2000:]
    table = [line for line in process.stdout.splitlines() if line.endswith("/4")]
    names = [line.partition("  ")[0].replace(" ", "_") for line in table]
    assert names == stages, process.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [stage for stage in ("before", "cold_start", "after") if stage in summary] == stages
    assert stages[-1] in (tmp_path / "run" / "report.html").read_text()


def metric_by_step(workdir: Path, name: str) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # The line of step 0 is the evaluation of the base.
    assert [row["step"] for row in rows if "reward/mean" not in row] in ([], [0])
    return [row[name] for row in rows if "reward/mean" in row]


def test_main_loss_that_is_not_finite_stops_and_sets_the_records_aside(tmp_path, model_dir):
    """A learning rate near the end of float32: the second update is infinite."""
    config = ROOT / "tests" / "overflowing_config.py"
    process = run(tmp_path / "run", model_dir, config=config)
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    aside = tmp_path / "run" / "quarantine" / "step-2"
    assert "error: step 2: learner/update_norm=inf is not finite" in last and str(aside) in last
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


def test_main_killed_at_random_moments_carries_on(tmp_path, model_dir):
    workdir = tmp_path / "run"
    moments = random.Random(0)
    for _ in range(3):
        with open(tmp_path / "killed.log", "ab") as log:
            process = start(command(workdir, model_dir), log)
        # Any moment of a run's life, from the imports to the last step.
        deadline = time.monotonic() + moments.uniform(6, 20)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
    process = run(workdir, model_dir)
    assert_whole(workdir, process)


def test_main_told_to_stop_in_its_cold_start_saves_and_carries_on(tmp_path, model_dir):
    steps = ("--config.cold_start.steps=400", "--config.cold_start.episodes_per_step=1")
    arguments = command(tmp_path / "run", model_dir, *steps, "--config.learner.steps=0")
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = start(arguments, file)
        while b'phase="cold start" step=' not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, log.read_text()
    said = re.search(r"stopped after supervised step (\d+) of 400", log.read_text())
    assert said, log.read_text()
    saved = [int(path.name) for path in (tmp_path / "run/cold_start/checkpoints").glob("[0-9]*")]
    assert max(saved) == int(said[1]) < 400


@pytest.mark.parametrize(("role", "stage"), [("eval", "version_0"), ("all", "random")])
def test_main_told_to_stop_in_an_evaluation_gives_its_sessions_back(
    tmp_path, model_dir, role, stage
):
    port_file, workdir, stop = tmp_path / "port", tmp_path / "run", threading.Event()

    def stop_when_it_plays() -> None:
        while not sessions_at(port_file):
            time.sleep(0.05)
        stop.set()

    with supervisor.bundled_server(port_file, tmp_path / "log"):
        cfg = tiny_config.get_config()
        cfg.model.path = str(model_dir)
        cfg.evaluation = {"episodes": 4000, "random": True}
        cfg.verifier = {"urls": tuple(supervisor.read_urls(port_file))}
        resolved = reading.from_config(schema.RunConfig, cfg)
        one_run = Run(resolved, workdir, open_run(workdir, resolved))
        watching = threading.Thread(target=stop_when_it_plays)
        watching.start()
        with pytest.raises(RestartError, match=f"stopped in the evaluation of stage '{stage}'"):
            if role == "eval":
                run_eval_role(one_run, stop, "")
            else:
                run_all(one_run, stop)
        watching.join()
        sessions = sessions_at(port_file)
    assert sessions and all(session["stop_time"] for session in sessions.values())
    assert not list(workdir.glob("eval/*"))


def sessions_at(port_file: Path) -> dict[str, dict]:
    """Of the verifier that wrote this file: open ones, and some that ended."""
    url = f"http://127.0.0.1:{int(port_file.read_text())}/status"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@pytest.mark.parametrize("after_saving", [False, True])
def test_main_that_dies_around_a_checkpoint_tells_every_step_once(
    tmp_path, model_dir, monkeypatch, after_saving
):
    class Death(Exception):
        """Stands for a SIGKILL at the one moment that a random one seldom hits."""

    save = checkpoints.Checkpointer.save

    def save_and_die(self, step, arrays, meta):
        if after_saving or step != 2:
            save(self, step, arrays, meta)
        if step == 2:
            raise Death

    cfg = tiny_config.get_config()
    cfg.model.path = str(model_dir)
    resolved = reading.from_config(schema.RunConfig, cfg)
    one_run = Run(resolved, tmp_path, open_run(tmp_path, resolved))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpointer, "save", save_and_die)
        with pytest.raises(Death):
            run_all(one_run, threading.Event())
    run_all(one_run, threading.Event())
    assert metric_by_step(tmp_path, "step") == list(range(1, STEPS + 1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["episodes"]["trained"] == STEPS * GROUPS * MEMBERS


def test_main_finished_run_with_its_last_checkpoints_damaged_takes_those_steps_again(
    tmp_path, model_dir
):
    """The policy that lies there says that the run has ended, and no actor may believe it: the last
    step's records were sampled with a policy that is lost, and it waits for others."""
    workdir = tmp_path / "run"
    assert_whole(workdir, run(workdir, model_dir))
    for step in (STEPS - 1, STEPS):
        for path in (workdir / "checkpoints" / str(step)).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    process = run(workdir, model_dir)
    assert process.stdout.count("checkpoint_skipped") == 2
    assert_whole(workdir, process)


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


def test_main_actor_that_never_starts_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("uirl_jax.actor.processes.FIRST_PAUSE_S", 0.01)
    command_line = [sys.executable, "-c", "import sys; print('error: no such model'); sys.exit(1)"]
    with processes.actor_processes(command_line, [4], tmp_path / "logs") as actors:
        said = r"actor a4 ended 5 times with code 1: error: no such model \(log: .*actor-a4.log\)"
        with pytest.raises(UirlError, match=said):
            actors.wait(threading.Event())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.learner.step=5"], "did you mean config.learner.steps?"),
        (["--config.learner.steps=many"], "config.learner.steps"),
        (["--config.model.path=/nowhere"], "/nowhere: no model in Hugging Face's format"),
        (["--config.model.path=runs/nowhere"], "runs/nowhere: not a directory, and the Hugging"),
        (["--config.tasks.0.name=x"], "config.tasks"),
        (["--config.learner.batch.row_lengths=(48,)"], "an episode may have 96 tokens of context"),
        (["--config.actor.rollout.max_new_tokens=9"], "at most engine.max_new_tokens=8"),
        (["--config.learner.keep_checkpoints=0"], "config.learner.keep_checkpoints"),
        (["--config.learner.groups_per_step=0"], "config.learner.groups_per_step"),
        (["--config.mesh.data=3"], "the 1 devices, e.g. data=1, fsdp=1, model=1"),
        (
            [
                f"--config.model.path={SHIPPED_MODEL}",
                "--config.model.lora.targets=('attention', 'head')",
            ],
            "'head' is unknown, expected some of",
        ),
        (["--config.model.quantize=int4"], "expected 'none' or 'int8'"),
        (["--workdir="], "--workdir is empty"),
        (["--workdir=s3://bucket/run"], "runs are in a directory or in gs://"),
        (["--workdir=gs://b/run"], "--workdir=gs://b/run: "),
        (
            [f"--config.model.path={SHIPPED_MODEL}", "--config.model.adapter=/nowhere"],
            "/nowhere/adapter_config.json: cannot be read",
        ),
    ],
)
def test_main_mistake_of_the_user_is_one_line(tmp_path, arguments: list[str], said: str):
    process = run(tmp_path / "run", "/nowhere", *arguments)
    assert process.returncode == 1
    assert said in process.stderr
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr
    # The corrected command can use the same workdir.
    assert not (tmp_path / "run" / "config.json").exists()


def test_main_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = run(tmp_path / "run", SHIPPED_MODEL, f"--config.verifier.port={port}")
    assert process.returncode == 1
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr
    assert f"{port}" in process.stderr and "in use" in process.stderr


def test_main_second_learner_of_a_workdir_is_refused_before_it_writes(tmp_path):
    workdir = tmp_path / "run"
    with only_learner(open_store(workdir), lambda: None):
        before = {path: path.read_bytes() for path in workdir.iterdir()}
        for role in ("all", "learner"):
            process = run(workdir, SHIPPED_MODEL, f"--role={role}")
            assert process.returncode == 1
            assert process.stderr.startswith(f"error: {workdir}: a learner is running there")
            assert f"(process {os.getpid()} on " in process.stderr
            assert process.stderr.count("\n") == 1, process.stderr
        assert {path: path.read_bytes() for path in workdir.iterdir()} == before


def test_open_run_with_another_config_names_the_difference(tmp_path):
    cfg = schema.RunConfig(
        model=schema.ModelConfig(path="m"),
        tasks=(schema.TaskConfig("desktop/click_button"),),
        learner=schema.LearnerConfig(steps=3),
    )
    run_id = open_run(tmp_path, cfg)
    assert open_run(tmp_path, cfg) == run_id
    other = dataclasses.replace(cfg, learner=schema.LearnerConfig(steps=2))
    with pytest.raises(ConfigError, match=r"config\.learner\.steps is 3 there and 2 here"):
        open_run(tmp_path, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 4}, ""),
        ({"steps": 4, "groups_per_step": 3}, "groups_per_step is 8 there and 3 here; .*steps is 3"),
        ({"steps": 4, "optimizer": OptimizerConfig(lr=1.0)}, "lr is None there and 1.0 here"),
    ],
)
def test_open_run_with_more_steps_carries_on_a_run_that_is_otherwise_the_same(
    tmp_path, changes, message
):
    cfg = schema.RunConfig(
        model=schema.ModelConfig(path="m"),
        tasks=(schema.TaskConfig("desktop/click_button"),),
        learner=schema.LearnerConfig(steps=3),
    )
    run_id = open_run(tmp_path, cfg)
    summary = tmp_path / evaluation.SUMMARY_FILE  # of the shorter run
    summary.write_text("{}")
    more = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, **changes))
    if not message:
        with pytest.raises(ConfigError, match=r"steps is 3 there .*Only --role=all and"):
            open_run(tmp_path, more, learns=False)
        assert open_run(tmp_path, cfg, learns=False) == run_id and summary.exists()
        assert open_run(tmp_path, more) == run_id and not summary.exists()
        cfg, message = more, "steps is 4 there and 3 here"
        more = dataclasses.replace(cfg, learner=schema.LearnerConfig(steps=3))
    with pytest.raises(ConfigError, match=message):
        open_run(tmp_path, more)
    assert open_run(tmp_path, cfg) == run_id


def test_main_run_is_rolled_back_to_a_chosen_step_in_another_workdir(tmp_path, model_dir):
    first, second = tmp_path / "first", tmp_path / "second"
    kept = ("--config.learner.keep_every=2", "--config.learner.keep_records_mib=1")
    kept += ("--config.learner.keep_checkpoints=1",)
    # A random model has no success; these rewards differ, so that there is something to learn.
    learns = {"config": ROOT / "tests" / "own_code_config.py"}
    kept += ("--config.learner.callbacks=()",)
    assert_whole(first, run(first, model_dir, *kept, **learns))
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["0", "2", "4"]
    # Of the used records some are kept; those of the last checkpoint are in shards/.
    records = list((first / "kept").rglob("*.tfrecord"))
    assert len(records) + len(list((first / "shards").rglob("*.tfrecord"))) == STEPS * GROUPS
    assert len(reader.read_shard(records[0])[1]) == MEMBERS

    resume = (f"--resume_from={first}", "--checkpoint=2", "--config.learner.optimizer.lr=0.002")
    resume += ("--config.learner.callbacks=()",)
    process = run(second, model_dir, *resume, **learns)
    assert process.returncode == 0, process.stderr[-2000:]
    assert f"event=resumed workdir={first} step=2" in process.stdout
    assert metric_by_step(second, "step") == [3, 4]
    summary = json.loads((second / "summary.json").read_text())
    assert summary["episodes"]["trained"] == summary["episodes"]["published"] == 16
    _, start, _ = read_adapters(second, None)
    assert read_adapters(first, 2)[0] == 2
    # It began with the chosen step's adapters: a step of the same size is made from there.
    before, after = read_adapters(first, 2)[1], read_adapters(second, 4)[1]
    base = read_adapters(first, 0)[1]
    assert before.keys() == after.keys() == start.keys()
    drift = max(np.abs(after[name] - before[name]).max() for name in before)
    assert 0 < drift < 4 * 0.002  # two steps of Adam
    assert max(np.abs(before[name] - base[name]).max() for name in before) > 0
    # The same command continues the new run, and takes nothing from the old one any more.
    again = run(second, model_dir, *resume, **learns)
    assert again.returncode == 0 and "event=resumed" not in again.stdout

    # A chosen step is evaluated and exported.
    process = run(first, model_dir, *kept, "--role=eval", "--checkpoint=2", **learns)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "version_2" in evaluation.read_results(first)
    # The best evaluation keeps its adapters; equal ones change nothing.
    best = json.loads((first / "best" / "best.json").read_text())
    assert (best["version"], best["stage"]) == (4, "after")
    assert [path.name for path in (first / "best").glob("version_*")] == ["version_4"]
    (first / "best" / "best.json").write_text(json.dumps({**best, "rate": -0.5}))
    process = run(first, model_dir, *kept, "--role=eval", "--checkpoint=0", **learns)
    assert process.returncode == 0, process.stderr[-2000:]
    assert [path.name for path in (first / "best").glob("version_*")] == ["version_0"]
    lora = LoraConfig(rank=16, alpha=32.0, targets=("attention", "mlp"))
    again = loading.load(model_dir, lora=lora, seed=3, adapter=first / "best" / "version_0")
    kept_there = weights.adapters_to_numpy(again.trainable)
    for name, array in read_adapters(first, 0)[1].items():
        np.testing.assert_array_equal(kept_there[name], array)
    flags = [f"--workdir={first}", f"--out={tmp_path / 'adapter'}", "--checkpoint=2"]
    assert export.main(["adapter", *flags]) == 0
    for arguments, said in (
        (["--checkpoint=3"], "--checkpoint is for --role=eval, or goes with --resume_from"),
        (["--role=eval", "--checkpoint=3"], "no checkpoint of step 3; there are 0, 2, 4"),
        (["--role=actor", f"--resume_from={first}"], "--resume_from is for --role=all"),
        ([f"--resume_from={tmp_path}"], "has no checkpoints/; give a run's workdir"),
    ):
        process = run(first, model_dir, *kept, *arguments, **learns)
        assert process.returncode == 1 and said in process.stderr, process.stderr[-2000:]


def test_main_that_trains_all_weights_publishes_resumes_and_exports_them(tmp_path, model_dir):
    everything = (
        "--config.model.train=all",
        "--config.algorithm.loss.kl_coefficient=0",
        "--config.learner.callbacks=()",
    )
    workdir = tmp_path / "run"
    learns = {"config": ROOT / "tests" / "own_code_config.py"}
    with (tmp_path / "killed.log").open("wb") as log:
        process = start(command(workdir, model_dir, *everything, **learns), log)
        while not (workdir / "policy" / "1").is_dir():
            assert process.poll() is None, (tmp_path / "killed.log").read_text()
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert_whole(workdir, run(workdir, model_dir, *everything, **learns))
    # Actors play with what the learner holds, of which every matrix has moved.
    base = loading.load(model_dir, lora=None, seed=0)
    manifest = policy_sync.read_manifest(open_store(workdir))
    assert manifest is not None and manifest.path == f"policy/{STEPS}/weights.safetensors"
    published = policy_sync.load(open_store(workdir), manifest, base.base_hash)
    held = read_adapters(workdir, STEPS)[1]
    for name, array in weights.adapters_to_numpy(base.trainable).items():
        np.testing.assert_array_equal(published[name], held[name])
        assert not name.endswith("kernel") or (published[name] != array).any(), name
    best = loading.load(workdir / "best" / f"version_{STEPS}", lora=None, seed=0)
    assert export.main(["merged", f"--workdir={workdir}", f"--out={tmp_path / 'model'}"]) == 0
    exported = loading.load(tmp_path / "model", lora=None, seed=0)
    for model in (best, exported):
        for name, array in weights.adapters_to_numpy(model.trainable).items():
            np.testing.assert_array_equal(array, published[name], err_msg=name)
    assert export.main(["adapter", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}"]) == 1


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("model", {"adapter": "somewhere"}, "model.adapter needs:"),
        ("model", {"quantize": "int8"}, "model.quantize='int8'"),
        ("algorithm", {"loss": {"kl_coefficient": 0.1}}, "algorithm.loss.kl_coefficient"),
        (
            "engine",
            {
                "kind": "openai",
                "openai": {"url": "http://x", "model": "m", "adapters_dir": "adapters"},
            },
            "engine.kind='openai'",
        ),
        ("cold_start", {"steps": 1}, "cold_start.train='lora'"),
    ],
)
def test_config_that_trains_all_weights_refuses_what_needs_adapters(section, values, said):
    cfg = tiny_config.get_config()
    cfg.model.path, cfg.model.train = "somewhere", "all"
    cfg.algorithm = {"loss": {"kl_coefficient": 0.0}}
    reading.from_config(schema.RunConfig, cfg)
    plain = cfg.to_dict()
    plain[section] = {**plain.get(section, {}), **values}
    with pytest.raises(ConfigError, match=r"model\.train='all' has no adapters, which ") as caught:
        reading.from_config(schema.RunConfig, plain)
    assert f", which {said}" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_damaged_summary_is_written_again(tmp_path, content):
    path = tmp_path / "summary.json"
    assert not _is_json_object(path)
    path.write_bytes(content)
    assert not _is_json_object(path)
    path.write_bytes(b'{"seed": 0}')
    assert _is_json_object(path)
