"""Runs that are killed or told to stop at any moment, then started again by the same command."""

import json
import random
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests import tiny_config, tiny_model
from tests.command_world import (
    GROUPS,
    MEMBERS,
    STEPS,
    assert_whole,
    command,
    metric_by_step,
    run,
    start,
)
from uirl_jax import checkpoints
from uirl_jax.config import reading, schema
from uirl_jax.errors import RestartError
from uirl_jax.roles.all import run_all
from uirl_jax.roles.eval import run_eval_role
from uirl_jax.run import Run, open_run
from uirl_jax.verifiers.server import supervisor


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


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
