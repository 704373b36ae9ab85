"""Mistakes of the user, other configs of a workdir, and damaged files: refused or mended."""

import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest

from tests import tiny_config
from tests.command_world import SHIPPED_MODEL, run
from uirl_jax import evaluation
from uirl_jax.config import reading, schema
from uirl_jax.errors import ConfigError
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.roles.all import _object_of
from uirl_jax.run import PLACEMENT, open_run
from uirl_jax.store import open_store
from uirl_jax.store.lease import only_learner


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.learner.step=5"], "did you mean config.learner.steps?"),
        (["--config.learner.steps=many"], "config.learner.steps"),
        (["--config.model.path=/nowhere"], "/nowhere: no model in Hugging Face's format"),
        (["--config.model.path=runs/nowhere"], "runs/nowhere: no such directory; the first lines"),
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
        (
            [
                f"--config.model.path={SHIPPED_MODEL}",
                "--config.cold_start.steps=1",
                "--config.cold_start.demonstrations=('/nowhere',)",
            ],
            "cold_start.demonstrations: /nowhere: no *.tfrecord there",
        ),
        (
            ["--role=eval", "--config.evaluation.episodes=0"],
            "evaluation.episodes=0: there is nothing to evaluate",
        ),
        (["--role=eval", "--stage=After-2"], "--stage=After-2: names files, expected"),
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


def test_open_run_goes_on_on_another_mesh_and_with_other_browsers(tmp_path):
    cfg = reading.from_config(schema.RunConfig, tiny_config.get_config())
    run_id = open_run(tmp_path, cfg)
    more = dataclasses.replace(cfg.cold_start, browsers=cfg.cold_start.browsers + 1)
    placed = dataclasses.replace(cfg, mesh=schema.MeshConfig(fsdp=2), cold_start=more)
    assert open_run(tmp_path, placed) == run_id
    other = dataclasses.replace(placed, cold_start=dataclasses.replace(more, quality=0.5))
    with pytest.raises(ConfigError, match=r"another config: config\.cold_start\.quality is 1"):
        open_run(tmp_path, other)


def test_workdir_of_a_version_without_a_key_goes_on(tmp_path):
    cfg = reading.from_config(schema.RunConfig, tiny_config.get_config())
    run_id = open_run(tmp_path, cfg)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["config"]["model"]["family"], content["config"]["cluster"]
    path.write_text(json.dumps(content))
    assert open_run(tmp_path, cfg) == run_id
    content["config"]["model"]["gone"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"config\.model\.gone is 1 there and None here"):
        open_run(tmp_path, cfg)


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


def test_page_on_restarts_names_every_key_that_may_differ():
    page = Path(__file__).parents[1] / "docs" / "how_runs_survive_kills.md"
    line = next(line for line in page.read_text().splitlines() if "| `config.json` |" in line)
    assert all(f"`{key}`" in line for key in ("learner.steps", *PLACEMENT))


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
def test_damaged_summary_is_as_none(tmp_path, content):
    path = tmp_path / "summary.json"
    assert _object_of(path) == {}
    path.write_bytes(content)
    assert _object_of(path) == {}
    path.write_bytes(b'{"seed": 0}')
    assert _object_of(path) == {"seed": 0}
