"""The command as a user runs it: real processes, a real verifier over HTTP, a tiny random model."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from tests import tiny_model
from uirl_jax import main, run_config
from uirl_jax.errors import ConfigError
from uirl_jax.shards import journal

ROOT = Path(__file__).parents[1]
STEPS, GROUPS, MEMBERS = 4, 2, 4  # of tiny_config


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def command(workdir: Path, model_dir: Path | str, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "uirl_jax.main", f"--config={tiny_model.CONFIG}"),
        *(f"--workdir={workdir}", f"--config.model.path={model_dir}", *arguments),
    ]


def run(workdir: Path, model_dir: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workdir, model_dir, *arguments),
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
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
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, STEPS + 1))
    shards = [line.shard for line in journal.Journal(workdir / "shards" / "journal.jsonl").lines]
    assert len(shards) == len(set(shards))
    assert summary["before"]["attempts"] == summary["after"]["attempts"] == 4
    assert (workdir / "report.html").stat().st_size > 1000
    return summary


def test_main_all_roles_in_one_command_end_with_table_and_report(tmp_path, model_dir):
    process = run(tmp_path / "run", model_dir)
    summary = assert_whole(tmp_path / "run", process)
    assert summary["episodes"]["lost"] == 0
    assert "before" in process.stdout and "after" in process.stdout
    assert "report.html" in process.stdout
    again = run(
        tmp_path / "run", model_dir
    )  # a finished run says the same again, and trains nothing
    assert assert_whole(tmp_path / "run", again) == summary


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


def test_main_roles_as_processes_of_their_own_train_together(tmp_path, model_dir):
    workdir = tmp_path / "run"
    others = []
    try:
        for role in ("verifier", "actor"):
            with open(tmp_path / f"{role}.log", "wb") as log:
                others.append(start(command(workdir, model_dir, f"--role={role}"), log))
        learner = run(workdir, model_dir, "--role=learner")
        assert learner.returncode == 0, learner.stderr[-2000:]
        assert f"trained={STEPS * GROUPS * MEMBERS}" in learner.stdout
        assert others[1].wait(60) == 0, (tmp_path / "actor.log").read_text()[-2000:]
        evaluation = run(workdir, model_dir, "--role=eval", "--stage=after")
        assert evaluation.returncode == 0, evaluation.stderr[-2000:]
        assert json.loads((workdir / "eval" / "after.json").read_text())["attempts"] == 4
        others[0].send_signal(signal.SIGTERM)
        assert others[0].wait(20) == 0
    finally:
        for process in others:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.learner.step=5"], "did you mean config.learner.steps?"),
        (["--config.learner.steps=many"], "config.learner.steps"),
        (["--config.model.path=/nowhere"], "/nowhere: no model in Hugging Face's format"),
        (["--config.tasks.0.name=x"], "config.tasks"),
        (["--config.learner.groups_per_step=3"], "learner.batch.rows=8: a step has 12 episodes"),
        (["--config.actor.rollout.max_new_tokens=9"], "engine.max_new_tokens is 8"),
    ],
)
def test_main_mistake_of_the_user_is_one_line(tmp_path, arguments: list[str], said: str):
    process = run(tmp_path / "run", "/nowhere", *arguments)
    assert process.returncode == 1
    assert said in process.stderr
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr


def test_open_run_with_another_config_names_the_difference(tmp_path):
    cfg = run_config.RunConfig(
        model=run_config.ModelConfig(path="m"),
        tasks=(run_config.TaskConfig("desktop/click_button"),),
        learner=run_config.LearnerConfig(steps=3),
    )
    run_id = main.open_run(tmp_path, cfg)
    assert main.open_run(tmp_path, cfg) == run_id
    other = dataclasses.replace(cfg, learner=run_config.LearnerConfig(steps=4))
    with pytest.raises(ConfigError, match=r"config\.learner\.steps is 3 there and 4 here"):
        main.open_run(tmp_path, other)
