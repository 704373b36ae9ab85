"""LLaVA-1.5 where a run meets it: margins wherever a text becomes an action, and back; its limit.

A screen of 224x168 lies in a square of 224x224, 28 pixels below its upper edge: what is at y on the
screen is at y + 28 for the model.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import uirl_jax
from tests import actor_world as world
from tests import tiny_config
from tools import make_base_model
from tools.base_models.tiny_architectures import BASES
from uirl_jax import actions
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.config import reading, schema
from uirl_jax.demonstrations.recording import Recording
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.errors import ConfigError, ContextError
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import plan_screen
from uirl_jax.run import check_model, completed
from uirl_jax.types import Action, TaskSpec

BASE = BASES["llava"]
SCREEN = (224, 168)
TOP = 28


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = BASE.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(BASE)[:200], 512)
    cfg = BASE.config(tokenizer)
    cfg = dataclasses.replace(cfg, num_hidden_layers=1, intermediate_size=64)
    model = BASE.family.make_model(cfg, lora=None, rngs=nnx.Rngs(0))
    make_base_model.write_model(BASE, model, tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def chat(model_dir):
    return Chat(model_dir, BASE.chat, BASE.family.chat)


@pytest.fixture(scope="module")
def inputs(model_dir):
    return BASE.family.make_inputs(BASE.family.read_config(model_dir))


class Saying:
    """An engine that says one text."""

    def __init__(self, chat: Chat, text: str) -> None:
        self._ids = chat.completion_ids(text)

    async def __aenter__(self) -> "Saying":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def sample(self, request: SampleRequest) -> SampleResult:
        logprobs = np.zeros(len(self._ids), np.float32)
        versions = np.zeros(len(self._ids), np.int32)
        return SampleResult(self._ids, logprobs, 0, True, logprobs, versions)

    def release(self, episode: str) -> None:
        pass


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SCREEN).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("text", "point"),
    [("click(60, 68)", (60, 40)), ("click(0, 28)", (0, 0)), ("click(60, 10)", None)],
)
def test_rollout_clicks_where_the_model_saw_it_and_no_margin(text, point, chat, inputs):
    task = TaskSpec("desktop/click_button", seed=3, max_turns=1)

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(world.verifier())
            client = await stack.enter_async_context(world.client(url))
            setup = RolloutSetup(client, Saying(chat, text), chat, inputs, RolloutConfig())
            where = {"seed": 0, "group_id": "g", "run_id": "run", "actor_id": "a0"}
            return await run_episode(task, setup, **where)

    (turn,) = asyncio.run(run()).turns
    if point is None:
        assert turn.action is None  # y=10 lies in the margin above the screen
    else:
        assert (turn.action.kind, turn.action.x, turn.action.y) == ("click", *point)


def test_recorded_click_is_said_as_the_model_sees_it(chat, inputs):
    task = TaskSpec("desktop/click_button", seed=3, max_turns=1)
    recording = Recording(task, "Click the red button.", SCREEN, chat, inputs)
    recording.see(Image.new("RGB", SCREEN), png())
    text, _, meant = recording.say(Action("click", x=60, y=40))
    assert text.replace(" ", "") == f"click(60,{40 + TOP})"
    assert (meant.x, meant.y) == (60, 40)


def test_random_clicks_reach_the_whole_screen_and_no_margin(chat, inputs):
    screen = plan_screen(inputs, png(), SCREEN)
    engine = RandomEngine(chat)

    async def run():
        request = SampleRequest(np.zeros(1, np.int32), (screen,), 1, 1.0, seed=0)
        asked = [dataclasses.replace(request, seed=seed) for seed in range(200)]
        return [chat.decode((await engine.sample(one)).token_ids) for one in asked]

    seen = [actions.parse(text, (224, 224)).y for text in asyncio.run(run())]  # as it is written
    assert TOP <= min(seen) < TOP + 10
    assert 224 - TOP - 10 < max(seen) < 224 - TOP


def test_predicted_click_is_on_the_screen(model_dir, monkeypatch):
    vlm = uirl_jax.VLM.from_pretrained(model_dir)
    monkeypatch.setattr(vlm, "_engine", lambda chat, *sizes: Saying(chat, "click(60, 68)"))
    said = vlm.predict_action(Image.new("RGB", SCREEN), "Click the red button.")
    assert (said.action.x, said.action.y) == (60, 40)


def test_notebook_refuses_contexts_beyond_the_positions_of_its_training(model_dir):
    vlm = uirl_jax.VLM.from_pretrained(model_dir)
    screen = Image.new("RGB", (64, 64))
    with pytest.raises(ContextError, match=r"tokens, 100000 of them new: .* positions \(max_pos"):
        vlm.predict_action(screen, "Go", max_new_tokens=100_000)
    cfg = dataclasses.replace(vlm.model.cfg, max_position_embeddings=4)
    vlm.model = dataclasses.replace(vlm.model, cfg=cfg)
    for call in (
        lambda: vlm.forward([screen], ["Go"], ["click(1, 2)"]),
        lambda: vlm.logits(np.ones((1, 5), np.int32), np.ones((1, 5), np.int32)),
    ):
        with pytest.raises(ContextError, match=r"takes 4 positions") as error:
            call()
        assert "\n" not in str(error.value)


def test_contexts_beyond_the_positions_of_its_training_are_refused_in_one_line(model_dir, tmp_path):
    directory = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    cfg = tiny_config.get_config()
    cfg.model.path = str(directory)
    cfg.learner.batch.patch_lengths = (64,)
    cfg.engine.image_row_patches = 64
    whole = completed(reading.from_config(schema.RunConfig, cfg))
    longest = whole.max_context_tokens + whole.actor.rollout.max_new_tokens

    def set_limit(positions: int) -> None:
        config["text_config"]["max_position_embeddings"] = positions
        (directory / "config.json").write_text(json.dumps(config))

    set_limit(longest)
    check_model(whole)
    set_limit(longest - 1)
    with pytest.raises(ConfigError, match=rf"takes {longest - 1} positions \(max_pos") as error:
        check_model(whole)
    assert "\n" not in str(error.value)
