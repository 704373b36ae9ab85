"""Config dicts to dataclasses, and the command line in front of them, run as a user would."""

import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from ml_collections import ConfigDict, config_dict

from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError


class Schedule(enum.StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


@dataclasses.dataclass(frozen=True)
class Learner:
    steps: int = dataclasses.field(metadata={"min": 1, "max": 1000})
    lr: float = dataclasses.field(default=1e-3, metadata={"above": 0.0})
    betas: tuple[float, float] = (0.9, 0.99)
    row_lengths: tuple[int, ...] = dataclasses.field(default=(256,), metadata={"min": 16})
    schedule: Schedule = Schedule.CONSTANT
    loss: Literal["grpo", "ppo"] = "grpo"
    clip: float | None = None


@dataclasses.dataclass(frozen=True)
class Root:
    learner: Learner
    name: str = "quickstart"
    verbose: bool = False
    tasks: dict[str, int] = dataclasses.field(default_factory=dict)
    actor: Learner | None = None

    def __post_init__(self) -> None:
        if self.learner.steps == 13:
            raise ValueError("learner.steps is 13, which brings bad luck")


def errors_of(cfg: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        reading.from_config(Root, ConfigDict(cfg))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_from_config_valid_builds_nested_dataclasses() -> None:
    cfg = ConfigDict(
        {
            "learner": {
                "steps": 5,
                "lr": 1,
                "betas": [0.5, 0.6],
                "row_lengths": (16, 32, 64),
                "schedule": "cosine",
                "loss": "ppo",
                "clip": 0.25,
            },
            "tasks": {"click": 3},
        }
    )
    built = reading.from_config(Root, cfg)
    assert built == Root(
        learner=Learner(5, 1.0, (0.5, 0.6), (16, 32, 64), Schedule.COSINE, "ppo", 0.25),
        tasks={"click": 3},
    )
    assert type(built.learner.lr) is float
    assert type(built.learner.schedule) is Schedule
    assert reading.from_config(Root, {"learner": {"steps": 1}, "actor": None}) == Root(Learner(1))


def test_from_config_resolves_references_and_placeholders() -> None:
    cfg = ConfigDict({"learner": {"steps": 5}})
    cfg.learner.clip = config_dict.placeholder(float)
    cfg.name = config_dict.FieldReference("linked")
    assert reading.from_config(Root, cfg) == Root(Learner(5, clip=None), name="linked")

    cfg.learner.loss = config_dict.required_placeholder(str)
    with pytest.raises(ConfigError, match=r"^config\.learner\.loss: has no value"):
        reading.from_config(Root, cfg)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (
            {"step": 5, "steps": 5},
            "config.learner.step: unknown key; did you mean config.learner.s",
        ),
        ({}, "config.learner.steps: missing, expected int"),
        ({"steps": True}, "config.learner.steps: got bool True, expected int"),
        ({"steps": 5.0}, "config.learner.steps: got float 5.0, expected int"),
        ({"steps": "5"}, "config.learner.steps: got str '5', expected int"),
        ({"steps": 0}, "config.learner.steps: got 0, expected 1 to 1,000"),
        ({"steps": 1001}, "config.learner.steps: got 1001, expected 1 to 1,000"),
        ({"steps": 5, "lr": 0}, "config.learner.lr: got 0.0, expected more than 0"),
        ({"steps": 5, "lr": float("nan")}, "config.learner.lr: got nan, expected a finite number"),
        ({"steps": 5, "lr": False}, "config.learner.lr: got bool False, expected float"),
        ({"steps": 5, "betas": (0.9,)}, "config.learner.betas: got tuple (0.9,), expected tuple"),
        ({"steps": 5, "row_lengths": (16, "a")}, "config.learner.row_lengths[1]: got str 'a'"),
        ({"steps": 5, "row_lengths": (16, 8)}, "config.learner.row_lengths: got 8, expected at le"),
        ({"steps": 5, "row_lengths": 16}, "expected tuple[int, ...]"),
        ({"steps": 5, "schedule": "sine"}, "got str 'sine', expected 'constant' or 'cosine'"),
        ({"steps": 5, "loss": "pppo"}, "got str 'pppo', expected 'grpo' or 'ppo'"),
        ({"steps": 5, "clip": "x"}, "config.learner.clip: got str 'x', expected float"),
        ({"steps": 13}, "config: learner.steps is 13, which brings bad luck"),
    ],
)
def test_from_config_one_fault_is_named_with_its_path(
    learner: dict[str, Any], message: str
) -> None:
    assert message in errors_of({"learner": learner})


def test_from_config_several_faults_are_one_error() -> None:
    message = errors_of({"learner": {"stepz": 5, "lr": "a"}, "nam": "x", "verbose": 1})
    assert message.startswith("5 faults in the config: ")
    for part in (
        "config.learner.stepz: unknown key; did you mean config.learner.steps?",
        "config.learner.steps: missing",
        "config.learner.lr: got str 'a'",
        "config.nam: unknown key; did you mean config.name?",
        "config.verbose: got int 1, expected bool",
    ):
        assert part in message


def test_from_config_key_of_another_place_is_named() -> None:
    assert "config.lr: unknown key; did you mean config.learner.lr?" in errors_of(
        {"learner": {"steps": 1}, "lr": 1.0}
    )
    assert "got int 3, expected keys of Learner" in errors_of({"learner": 3})


def test_resolved_config_json_is_stable_and_reads_back() -> None:
    built = Root(Learner(5, schedule=Schedule.COSINE), tasks={"b": 1, "a": 2})
    text = reading.resolved_config_json(built)
    again = Root(Learner(5, schedule=Schedule.COSINE), tasks={"a": 2, "b": 1})
    assert text == reading.resolved_config_json(again)
    assert reading.from_config(Root, json.loads(text)) == built
    as_config_dict = ConfigDict({"z": (1, 2), "a": {"c": None, "b": 1.5}})
    assert reading.resolved_config_json(as_config_dict) == (
        '{\n  "a": {\n    "b": 1.5,\n    "c": null\n  },\n  "z": [\n    1,\n    2\n  ]\n}\n'
    )
    for value in (float("nan"), object()):
        with pytest.raises(ConfigError, match="cannot be saved as JSON"):
            reading.resolved_config_json({"x": value})


def test_check_overrides_passes_known_keys_and_other_flags() -> None:
    cfg = ConfigDict({"learner": {"steps": 5, "flag": True}, "name": "x"})
    cfg.required = config_dict.required_placeholder(int)
    argv = ["main", "--config=c.py", "--config.learner.steps", "7", "-config.name=a=b.c"]
    argv += ["--noconfig.learner.flag", "--configs.x=1", "--workdir=--config.x"]
    # Of the schema, and of a file that does not keep to it: that is from_config's business.
    reading.check_overrides([*argv, "--config.required=2", "--config.learner.clip=1"], cfg, Root)
    with pytest.raises(ConfigError) as caught:
        reading.check_overrides(["main", "--config.learner.step=5", "--config.zzz.y=1"], cfg, Root)
    assert str(caught.value) == (
        "config.learner.step: unknown key; did you mean config.learner.steps?; "
        "config.zzz.y: unknown key; known are config.learner, config.name, config.required, "
        "config.verbose, config.tasks, config.actor"
    )


MAIN = """
import dataclasses
from absl import app, flags
from uirl_jax.config import reading

@dataclasses.dataclass(frozen=True)
class Learner:
    steps: int
    lr: float
    warmup_steps: int = 0

@dataclasses.dataclass(frozen=True)
class Mesh:
    data: int = -1

@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    max_turns: int = 1

@dataclasses.dataclass(frozen=True)
class Root:
    learner: Learner
    name: str
    tasks: tuple[Task, ...] = ()
    mesh: Mesh = dataclasses.field(default_factory=Mesh)

CONFIG = reading.define_config_file(Root)
flags.DEFINE_string("workdir", None, "")

def main(argv):
    print(reading.resolved_config_json(reading.from_config(Root, CONFIG.value)))

app.run(main, flags_parser=reading.parse_flags)
"""
CONFIG = """
import ml_collections

def get_config():
    return ml_collections.ConfigDict({"learner": {"steps": 5, "lr": 1e-3}, "name": "x"})
"""


@pytest.fixture
def run_main(tmp_path: Path) -> Any:
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "good.py").write_text(CONFIG)
    (tmp_path / "broken.py").write_text("def get_config():\n    return nowhere\n")
    (tmp_path / "syntax.py").write_text("def get_config(:\n")
    (tmp_path / "empty.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(Path(reading.__file__).parents[2])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "main.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


def test_command_line_good_overrides_arrive(run_main: Any) -> None:
    done = run_main("--config=good.py", "--config.learner.steps=7", "--config.name", "y")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "learner": {"steps": 7, "lr": 1e-3, "warmup_steps": 0},
        "name": "y",
        "mesh": {"data": -1},
        "tasks": [],
    }


def test_command_line_overrides_what_the_file_leaves_out(run_main: Any) -> None:
    done = run_main("--config=good.py", "--config.learner.warmup_steps=3", "--config.mesh.data=2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["learner"]["warmup_steps"], found["mesh"]) == (3, {"data": 2})


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ((), "algorithm.reward.functions has 0 elements, counted from 0"),
        (({"function": "a:f"},), ""),
        (None, "the config file has no algorithm.reward.functions, whose elements flags change"),
    ],
)
def test_check_overrides_knows_the_elements_of_inner_tuples(functions, said) -> None:
    reward = {} if functions is None else {"functions": tuple(map(ConfigDict, functions))}
    cfg = ConfigDict({"algorithm": {"reward": reward}})
    argv = ["main", "--config.algorithm.reward.functions[0].weight=1"]
    if not said:
        return reading.check_overrides(argv, cfg, RunConfig)
    with pytest.raises(ConfigError) as caught:
        reading.check_overrides(argv, cfg, RunConfig)
    assert str(caught.value) == f"config.algorithm.reward.functions[0].weight: {said}"


def test_command_line_overrides_a_field_of_one_task(run_main: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a:b"  # a path may have colons, before the file's own argument
    folder.mkdir()
    (folder / "tasks.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(first='a'):\n"
        "    tasks = (ConfigDict({'name': first}), ConfigDict({'name': 'b'}))\n"
        "    return ConfigDict({'learner': {'steps': 5, 'lr': 1e-3}, 'name': 'x', 'tasks': tasks})"
    )
    done = run_main("--config=a:b/tasks.py:c", "--config.tasks[1].max_turns=5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    assert found == [{"name": "c", "max_turns": 1}, {"name": "b", "max_turns": 5}]
    for override, message in (
        ("tasks[2].max_turns=5", "config.tasks[2].max_turns: tasks has 2 elements, counted from 0"),
        ("tasks.max_turns=5", "unknown key; did you mean config.tasks[0].max_turns?"),
        ("tasks[0].turns=5", "unknown key; did you mean config.tasks[0].max_turns?"),
    ):
        done = run_main("--config=a:b/tasks.py", f"--config.{override}")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--config=good.py --config.learner.step=5",
            "config.learner.step: unknown key; did you mean config.learner.steps?",
        ),
        ("--config good.py --config.steps=5", "did you mean config.learner.steps?"),
        ("--config=good.py --config.learner.steps.x=5", "did you mean config.learner.steps?"),
        ("--config=good.py --config.learner.steps=five", "--config.learner.steps=five: invalid"),
        ("--config=good.py --workdi=x", "Did you mean: workdir"),
        ("--config=good.py extra", "'extra': not a flag"),
        ("--config=gone.py", "--config=gone.py: no such file"),
        ("--config.learner.steps=5", "add --config=FILE"),
        ("--config=broken.py", "broken.py, line 2: NameError: name 'nowhere' is not defined"),
        ("--config=syntax.py", "syntax.py: SyntaxError: invalid syntax"),
        ("--config=empty.py", "has no get_config()"),
    ],
)
def test_command_line_mistake_is_one_line_and_exit_1(
    run_main: Any, arguments: str, message: str
) -> None:
    done = run_main(*arguments.split())
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
