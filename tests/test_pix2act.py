"""The 59 tasks of Pix2Act: their turns, their suite, and a config that holds them.

test_miniwob.py plays their scripts.
"""

import dataclasses
import tarfile
from pathlib import Path

import pytest

from configs import miniwob_pages, miniwob_tasks, pix2act_pages, pix2act_tasks, quickstart
from uirl_jax.config import reading, sizes
from uirl_jax.config.schema import RunConfig
from uirl_jax.config.suites import read_suite
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.table import family_of
from uirl_jax.models import hub
from uirl_jax.run import completed

MAX_TURNS = pix2act_tasks.MAX_TURNS


def test_tasks_are_59_and_have_the_turns_that_the_sixteen_have():
    assert len(MAX_TURNS) == sum(map(len, pix2act_tasks._NAMES.values())) == 59
    shared = set(MAX_TURNS) & set(miniwob_tasks.MAX_TURNS)
    assert len(shared) == 12
    assert all(MAX_TURNS[name] == miniwob_tasks.MAX_TURNS[name] for name in shared)


def test_suite_has_the_tasks_and_turns_of_the_config_with_100_instances_each():
    suite = read_suite("pix2act")
    turns = {task.name.removeprefix("miniwob/"): task.max_turns for task in suite.tasks}
    assert turns == MAX_TURNS and {task.instances for task in suite.tasks} == {100}


def pix2act_of_the_quickstart():
    cfg = quickstart.get_config()
    pix2act_tasks.pix2act(cfg)
    return cfg


@pytest.mark.parametrize(
    ("get_config", "instruction_tokens", "turn_tokens"),
    [
        (pix2act_of_the_quickstart, 96, 24),
        # With a tokenizer that spells. Most turns are a click, of four tokens with its end.
        (miniwob_pages.get_config, 64, 4),
        (pix2act_pages.get_config, 96, 4),
    ],
)
def test_contexts_and_rows_of_the_config_hold_the_longest_episode(
    get_config, instruction_tokens, turn_tokens
):
    cfg = get_config()
    if cfg.model.path.startswith("runs/"):
        cfg.model.path = "asset:miniwob-pages/start"  # of the same tool
    run = completed(reading.from_config(RunConfig, cfg))
    path = hub.model_directory(run.model.path, weights=False)
    family = family_of(path)
    inputs = family.make_inputs(family.read_config(path))
    run = dataclasses.replace(run, instruction_tokens=instruction_tokens)
    chat = Chat(path, run.chat, family.chat)
    screen = inputs.plan_screen((160, 210))
    longest = sizes._longest_episode(run, chat, screen, turn_tokens).longest
    room = run.actor.rollout.max_new_tokens
    assert longest <= run.engine.context_lengths[-1] <= run.learner.batch.row_lengths[-1] - room
    assert longest <= run.actor.rollout.max_context_tokens


def test_start_that_ships_is_what_the_config_names(tmp_path):
    name = pix2act_pages.get_config().model.path.removeprefix("runs/")
    with tarfile.open(Path(pix2act_pages.__file__).with_name("pix2act_start.tar.xz")) as file:
        file.extractall(tmp_path, filter="data")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    model = loading.load(tmp_path / name, lora=None, seed=0)
    run = reading.from_config(RunConfig, pix2act_pages.get_config())
    assert model.family.model_type == "qwen3_vl"
    assert run.chat.completed(tmp_path / name).format.name == "points_64"


def test_a_task_by_its_name_is_learnt_alone():
    alone = pix2act_pages.get_config("right-angle")
    assert [task.name for task in alone.tasks] == ["miniwob/right-angle"]
    together = pix2act_pages.get_config()
    assert len(together.tasks) == 59 and alone.tasks[0] in together.tasks
