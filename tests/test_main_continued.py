"""Runs that go on from a chosen step, and runs that train all weights."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests import tiny_model
from tests.command_world import (
    GROUPS,
    MEMBERS,
    ROOT,
    STEPS,
    assert_whole,
    command,
    metric_by_step,
    run,
    start,
)
from tools import export
from uirl_jax import evaluation, policy_sync
from uirl_jax.config.schema import RunConfig
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig
from uirl_jax.roles import actor
from uirl_jax.run import Run
from uirl_jax.shards import reader
from uirl_jax.store import open_store


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


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


def test_other_actors_of_a_resumed_run_take_its_command(tmp_path, monkeypatch):
    """It is the learner's with another role: flags that only that uses are no mistake of it."""
    given = ["--config=quickstart", f"--workdir={tmp_path}", "--resume_from=x", "--checkpoint=120"]
    monkeypatch.setattr(sys, "argv", ["main", *given, "--actors=2"])
    asked = []
    monkeypatch.setattr(
        actor.processes, "actor_processes", lambda command, *_: asked.append(command)
    )
    actor.start_actors(types.SimpleNamespace(workdir=tmp_path, port_file=tmp_path / "port"), [1])
    (command,) = asked
    read = (
        "import sys; from uirl_jax import main; from uirl_jax.config import reading; "
        "reading.parse_flags(sys.argv); main._check_checkpoint_flags(False)"
    )
    for more, said in (((f"--exit_with_parent={os.getpid()}",), ""), ((), "--resume_from is for")):
        done = subprocess.run(
            [sys.executable, "-c", read, *command[3:], "--actor=1", *more],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode == 0) == (not said) and said in done.stderr, done.stderr


def test_other_actors_of_a_host_play_on_its_own_verifier(tmp_path, model_dir, monkeypatch):
    """Hosts after the first name their files by their number; another's server is not theirs."""
    given = command(tmp_path, model_dir, "--actors=2")[3:]
    monkeypatch.setattr(sys, "argv", ["main", *given])
    asked = []
    monkeypatch.setattr(actor.processes, "actor_processes", lambda line, *_: asked.append(line))
    run_of_host = Run(cast(RunConfig, None), tmp_path, "run", tmp_path / "verifier-1.port")
    actor.start_actors(run_of_host, [3])
    (line,) = asked
    show = (
        "import sys; from uirl_jax import main; from uirl_jax.config import reading; "
        "reading.parse_flags(sys.argv); "
        "main.run_role = lambda role, run, *_: print('port', run.port_file) or 0; "
        "sys.exit(main.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", show, *line[3:], "--actor=3"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"port {tmp_path / 'verifier-1.port'}" in done.stdout.splitlines()


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
