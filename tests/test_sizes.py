"""Sizes that are derived from the screen: they hold the longest episode, and given ones stay."""

import dataclasses

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import own_task
from uirl_jax import assets
from uirl_jax.config import reading, sizes
from uirl_jax.config.schema import RunConfig
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.errors import ConfigError
from uirl_jax.families.chat import Chat
from uirl_jax.families.table import family_of
from uirl_jax.run import check_model, completed

MODEL = assets.find("asset:tiny-ui-base")
FAMILY = family_of(MODEL)
INPUTS = FAMILY.make_inputs(FAMILY.read_config(MODEL))


def config(**changes) -> RunConfig:
    cfg = own_task.get_config()
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        node = cfg
        for part in filter(None, section.split("__")):
            if part not in node:
                node[part] = ConfigDict()
            node = node[part]
        node[key] = value
    return reading.from_config(RunConfig, cfg)


def longest_context(cfg: RunConfig, turns: int, instruction: str) -> int:
    """The longest context of an episode that samples all it may, as the actor builds it."""
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    screen = INPUTS.plan_screen(cfg.screen_px)
    sampled = [np.full(cfg.actor.rollout.max_new_tokens, chat.encode("a")[0])] * turns
    lengths = [
        len(chat.context(instruction, [screen] * (turn + 1), sampled[:turn]).ids)
        for turn in range(turns)
    ]
    return max(lengths)


@pytest.mark.parametrize(
    ("turns", "screenshots"), [(1, 10), (6, 10), (6, 2), (40, 3)], ids=lambda value: str(value)
)
def test_derived_sizes_hold_the_longest_episode_and_little_more(turns, screenshots):
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": turns}),),
        chat__max_screenshots=screenshots,
        chat__drop_screenshots=1,
    )
    said = []
    whole = completed(cfg, said.append)
    instruction = "Set the thermostat to 21 degrees. " * 2
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    assert 32 < len(chat.encode(instruction)) <= cfg.instruction_tokens
    needed = longest_context(cfg, turns, instruction)
    assert needed <= whole.engine.context_lengths[-1] <= needed + 128
    new_tokens = cfg.actor.rollout.max_new_tokens
    assert whole.engine.max_new_tokens == new_tokens
    assert whole.engine.context_lengths[-1] + new_tokens <= whole.learner.batch.row_lengths[-1]
    patches = INPUTS.plan_screen((224, 168)).patches
    assert whole.engine.image_row_patches == patches
    assert whole.learner.batch.patch_lengths == (patches,)
    most = min(turns, screenshots)
    assert whole.learner.batch.image_rows[-1] >= whole.learner.batch.rows * most
    assert whole.screen_px == () and completed(whole) == whole
    check_model(whole)
    keys = {line.split("key=")[1].split()[0] for line in said}
    assert {"engine.context_lengths", "learner.batch.row_lengths"} <= keys
    assert all("reason=" in line for line in said)


def test_derived_context_holds_the_last_turn_of_a_very_long_episode():
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": 1000}),),
        chat__max_screenshots=1,
        chat__drop_screenshots=1,
        actor__rollout__max_context_tokens=200_000,
    )
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    screen = INPUTS.plan_screen(cfg.screen_px)
    sampled = [np.full(cfg.actor.rollout.max_new_tokens, chat.encode("a")[0])] * 999
    needed = len(chat.context("", [screen] * 1000, sampled).ids) + cfg.instruction_tokens
    assert needed <= completed(cfg).engine.context_lengths[-1] <= needed + 128


@pytest.mark.parametrize("turns", [10, 100])
def test_derived_context_holds_a_history_of_lines(turns):
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": turns}),),
        chat__action_format="mobile_use",
        actor__rollout__max_context_tokens=200_000,
    )
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    screen = INPUTS.plan_screen(cfg.screen_px)
    said = chat.encode("Action:" + " the button to the left of it" * 32)
    sampled = [np.array(said[: cfg.actor.rollout.max_new_tokens], np.int32)] * (turns - 1)
    needed = len(chat.context("", [screen] * turns, sampled).ids) + cfg.instruction_tokens
    # The word before the line is among what is sampled, and not in the line.
    spare = turns * len(chat.encode("Action:")) + 128
    assert needed <= completed(cfg).engine.context_lengths[-1] <= needed + spare


@pytest.mark.parametrize(("concurrency", "screenshots"), [(1, 10), (2, 40), (64, 10)])
def test_engine_keeps_the_screenshots_of_a_context_however_few_play_at_a_time(
    concurrency, screenshots
):
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": 60}),),
        actor__concurrency=concurrency,
        chat__max_screenshots=screenshots,
        chat__drop_screenshots=1,
        actor__rollout__max_context_tokens=100_000,
    )
    tokens = INPUTS.plan_screen(cfg.screen_px).tokens
    assert completed(cfg).engine.table_rows(INPUTS) >= screenshots * tokens


def test_given_sizes_stay_and_are_checked():
    cfg = config(engine__context_lengths=(700,), learner__batch__rows=3)
    whole = completed(cfg)
    assert whole.engine.context_lengths == (700,) and whole.learner.batch.rows == 3
    whole = completed(config(engine__context_lengths=(2000,)))
    assert whole.learner.batch.row_lengths[-1] >= 2016  # follows from the given one
    rows = {"learner__batch__row_lengths": (400,)}
    with pytest.raises(ConfigError, match="an episode may have 512 tokens of context"):
        completed(config(**rows))


def test_config_without_a_screen_is_left_alone():
    cfg = dataclasses.replace(config(), screen_px=())
    assert completed(cfg).engine == EngineConfig()


def test_screen_that_does_not_fit_says_what_is_needed():
    with pytest.raises(ConfigError, match=r"up to \d+ tokens of context, 312 of them for each"):
        completed(config(screen_px=(1920, 1080)))
    with pytest.raises(ConfigError, match=r"screen_px=\(224,\): expected \(width, height\)"):
        config(screen_px=(224,))
    with pytest.raises(ConfigError, match="screen_px"):
        completed(config(screen_px=(100_000, 1)))


def test_many_turns_are_continued_at_the_growth_that_was_measured():
    chat = Chat(MODEL, config().chat.completed(MODEL), FAMILY.chat)
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": 400}),),
        chat__max_screenshots=2,
        chat__drop_screenshots=1,
        actor__rollout__max_context_tokens=100_000,
    )
    found = sizes.derived(cfg, chat, INPUTS, lambda line: None).engine.context_lengths[-1]
    assert longest_context(cfg, 400, "") <= found


@pytest.mark.parametrize("history", [0, 2, 20, 500])
def test_derived_sizes_of_a_limited_history_hold_the_longest_context(history):
    cfg = config(
        tasks=(ConfigDict({"name": "own/thermostat", "max_turns": 400}),),
        chat__max_screenshots=2,
        chat__drop_screenshots=1,
        chat__history_turns=history,
        actor__rollout__max_context_tokens=100_000,
    )
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    found = sizes.derived(cfg, chat, INPUTS, lambda line: None).engine.context_lengths[-1]
    needed = longest_context(cfg, min(400, 5 + history), "") + cfg.instruction_tokens
    assert needed <= found <= needed + 128


def test_derived_prefill_of_a_family_without_chunks_takes_the_longest_context_whole():
    cfg = config(tasks=(ConfigDict({"name": "own/thermostat", "max_turns": 6}),))
    chat = Chat(MODEL, cfg.chat.completed(MODEL), FAMILY.chat)
    engine = sizes.derived(cfg, chat, INPUTS, lambda line: None, chunked_prefill=False).engine
    assert engine.prefill_lengths[-1] == engine.context_lengths[-1] > engine.prefill_lengths[0]
    chunked = sizes.derived(cfg, chat, INPUTS, lambda line: None).engine
    assert chunked.prefill_lengths[-1] < chunked.context_lengths[-1]
