"""Demonstrations by people: gestures to actions, the session and its page, and training on them."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests import tiny_model
from tests.actor_world import IMAGE_CFG, chat
from tests.chromium import needs_chromium
from tools.recorder import gestures, site
from tools.recorder.episode import Agent, Demonstration, End
from uirl_jax import vision_inputs
from uirl_jax.chat import Chat, ChatConfig
from uirl_jax.errors import ActionError, ConfigError, VerifierError
from uirl_jax.learner import cold_start, recorded_demonstrations
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.models import loading
from uirl_jax.models.lora import LoraConfig
from uirl_jax.shards import batching, reader
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers import desktop
from uirl_jax.verifiers.client import VerifierClient
from uirl_jax.verifiers.demonstrations import demonstrate
from uirl_jax.verifiers.server import serve

ROOT = Path(__file__).parents[1]
SCREEN = (224, 168)
TEXT = TaskSpec("desktop/enter_text", seed=3, max_turns=5)
MOUSE = {"kind": "mouse", "button": "left", "clicks": 1, "held_s": 0.1, "x": 9, "y": 8}
MOUSE |= {"x2": 9, "y2": 8}
KEY = {"kind": "key", "key": "a", "code": "KeyA", "modifiers": []}
WHEEL = {"kind": "wheel", "x": 9, "y": 8, "dx": 0, "dy": 0}
COMMAND = (sys.executable, "-m", "tools.record_demo", "--config=configs/sft.py:enter_text")
LAYOUT = TokenLayout(4096, 0, IMAGE_CFG.merge_size)


def layout() -> TokenLayout:
    return dataclasses.replace(LAYOUT, image_token_id=chat().image_token_id)


def scripted(task: TaskSpec, talk: Chat | None = None):
    """The scripted demonstrator's episode: in place of a person's."""
    return demonstrate(task, talk or chat(), IMAGE_CFG, np.random.default_rng(0))


# ------------------------------------------------------------------------------------ gestures


@pytest.mark.parametrize(
    ("gesture", "expected"),
    [
        (MOUSE, Action("click", x=9, y=8)),
        (MOUSE | {"clicks": 2}, Action("double_click", x=9, y=8)),
        (MOUSE | {"clicks": 3}, Action("triple_click", x=9, y=8)),
        (MOUSE | {"button": "right"}, Action("right_click", x=9, y=8)),
        (MOUSE | {"x2": 40}, Action("drag", x=9, y=8, x2=40, y2=8)),
        (MOUSE | {"x2": 40, "held_s": 3.0}, Action("drag", x=9, y=8, x2=40, y2=8)),
        (MOUSE | {"held_s": 1.2345}, Action("long_press", x=9, y=8, seconds=1.2)),
        (WHEEL | {"dy": 240}, Action("scroll", direction="down", amount=200, x=9, y=8)),
        (WHEEL | {"dy": -3}, Action("scroll", direction="up", amount=100, x=9, y=8)),
        (WHEEL | {"dx": 300, "dy": 9}, Action("scroll", direction="right", amount=300, x=9, y=8)),
        ({"kind": "text", "text": "Ada L."}, Action("type", text="Ada L.")),
        (KEY | {"modifiers": ["ctrl"]}, Action("keys", keys="ctrl+a")),
        (KEY | {"key": "A", "modifiers": ["shift", "ctrl"]}, Action("keys", keys="ctrl+shift+a")),
        (
            KEY | {"key": "!", "code": "Digit1", "modifiers": ["ctrl", "shift"]},
            Action("keys", keys="ctrl+shift+1"),
        ),
        (
            KEY | {"key": " ", "code": "Space", "modifiers": ["alt"]},
            Action("keys", keys="alt+space"),
        ),
        (KEY | {"key": "Enter", "code": "Enter"}, Action("keys", keys="enter")),
        (KEY | {"key": "ArrowDown", "code": "ArrowDown"}, Action("keys", keys="down")),
        (KEY | {"key": "PageUp", "code": "PageUp"}, Action("keys", keys="pageup")),
        (KEY | {"modifiers": ["meta"]}, Action("keys", keys="win+a")),
        ({"kind": "words", "text": "wait(1.5)"}, Action("wait", seconds=1.5)),
        ({"kind": "words", "text": "terminate(success)"}, Action("terminate", text="success")),
    ],
)
def test_gesture_is_the_action_that_it_looks_like(gesture, expected):
    assert gestures.read(gesture, SCREEN) == expected


@pytest.mark.parametrize(
    ("gesture", "reason"),
    [
        ({}, "gesture of kind 'None'"),
        ({"kind": ["mouse"]}, "gesture of kind"),
        (MOUSE | {"x": 224, "x2": 224}, "x=224 is off the screen"),
        (MOUSE | {"x": 1.5}, "x is '1.5', expected a whole number"),
        (MOUSE | {"y": True}, "y is 'True'"),
        (MOUSE | {"clicks": 4}, "4 clicks"),
        (MOUSE | {"held_s": 90.0}, "seconds=90.0 is outside"),
        ({"kind": "text", "text": ""}, "expected some text"),
        ({"kind": "text", "text": "\x1b"}, "which no key types"),
        (KEY | {"key": "AudioPlay", "code": "AudioPlay"}, "is no key"),
        (KEY | {"modifiers": ["hyper"]}, "modifiers are"),
        ({"kind": "words", "text": "__import__('os')"}, "unknown action '__import__'"),
    ],
)
def test_gesture_that_is_no_action_is_refused(gesture, reason):
    with pytest.raises(ActionError, match=re.escape(reason)):
        gestures.read(gesture, SCREEN)


# ------------------------------------------------------------------- the session and its page


def agent(talk: Chat | None = None, **changes) -> Agent:
    return dataclasses.replace(Agent(talk or chat(), IMAGE_CFG, 1024, 64, 1.0), **changes)


@contextlib.asynccontextmanager
async def recording(out: Path, task: TaskSpec = TEXT, *, whom: Agent | None = None, episodes=1):
    """(recorder, http session on its page, client of the verifier)."""

    def save(trajectory):
        path = out / f"{trajectory.episode_id}.tfrecord"
        write_shard(path, [trajectory], base_hash="", layout=layout())
        return path

    async with serve() as port, VerifierClient(f"http://127.0.0.1:{port}") as client:
        recorder = site.Recorder(
            lambda one: Demonstration.open(client, one, whom or agent()),
            lambda instance: dataclasses.replace(task, seed=task.seed + instance),
            save,
            episodes,
        )
        await recorder.open()
        async with site.serve(recorder) as address, aiohttp.ClientSession(address) as http:
            yield recorder, http, client
        await recorder.close()


async def do(http, **gesture):
    async with http.get("state") as answer:
        screen = (await answer.json())["screen"]
    async with http.post("gesture", json={"screen": screen, **gesture}) as answer:
        assert answer.status == 200
        return await answer.json()


async def end(http, how):
    async with http.post("end", json={"how": how}) as answer:
        return await answer.json()


def as_gesture(action: Action) -> dict:
    if action.kind == "click":
        return {**MOUSE, "x": action.x, "y": action.y, "x2": action.x, "y2": action.y}
    assert action.kind == "type", action
    return {"kind": "text", "text": action.text}


def test_what_is_shown_on_the_page_is_the_record_that_a_script_would_have_made(tmp_path):
    expected = scripted(TEXT)

    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            for turn in expected.turns:
                state = await do(http, **as_gesture(turn.action))
                assert state["message"] == ""
            assert state["solved"] and state["ended"] and state["reward"] == 1.0
            refused = await do(http, **MOUSE)
            assert "has ended" in refused["message"]
            state = await end(http, "save")
            assert state["finished"] and recorder.finished.is_set()

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    header, (got,) = reader.read_shard(path)
    assert (header.lowest_version, header.highest_version, header.base_hash) == (-1, -1, "")
    assert (got.success, got.reward, got.stop_reason) == (True, 1.0, StopReason.COMPLETED)
    assert (got.task, got.instruction) == (TEXT, expected.instruction)
    assert got.images == expected.images and len(got.turns) == len(expected.turns)
    for ours, theirs in zip(got.turns, expected.turns, strict=True):
        assert (ours.text, ours.action, ours.image_keys) == (
            theirs.text,
            theirs.action,
            theirs.image_keys,
        )
        np.testing.assert_array_equal(ours.context_ids, theirs.context_ids)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        assert (ours.policy_versions == -1).all() and (ours.logprobs == 0).all()


def test_page_is_for_nobody_else(tmp_path):
    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            state = recorder.state()
            base = str(http._base_url)
            body = {"screen": state["screen"], **MOUSE}
            other = base.replace("127.0.0.1", "localhost")
            asked = [
                await http.get(base[:-3] + "xx/state"),  # another token
                await http.get("state", headers={"Host": "evil.example"}),
                await http.post("gesture", json=body, headers={"Origin": "http://evil.example"}),
                await http.post("gesture", data=json.dumps(body)),
                await http.post("gesture", json={"text": "x" * 70_000}),
                await http.post(
                    "gesture", data=b"[1", headers={"Content-Type": "application/json"}
                ),
                await http.get(other + "state"),
                await http.get(""),
            ]
            assert [one.status for one in asked] == [404, 404, 403, 415, 413, 400, 200, 200]
            assert "default-src 'none'" in asked[-1].headers["Content-Security-Policy"]
            assert recorder.state() == state  # nothing was done

    asyncio.run(run())


def test_task_that_the_verifier_does_not_have_is_told(tmp_path):
    async def run():
        async with recording(tmp_path, TaskSpec("desktop/click_buton", seed=0)):
            pass

    with pytest.raises(VerifierError, match="did you mean 'desktop/click_button'"):
        asyncio.run(run())


def test_port_that_is_in_use_is_told(tmp_path):
    async def run(port):
        async with recording(tmp_path) as (recorder, _, _), site.serve(recorder, port):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: the port is in use"):
            asyncio.run(run(port))


def test_gesture_on_an_earlier_screen_is_not_done(tmp_path):
    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            shown = recorder.state()["screen"]
            await do(http, **MOUSE)
            async with http.post("gesture", json={"screen": shown, **MOUSE}) as answer:
                state = await answer.json()
            assert "earlier screen" in state["message"] and len(state["turns"]) == 1

    asyncio.run(run())


def test_start_over_and_skip_drop_what_was_done(tmp_path):
    async def run():
        async with recording(tmp_path) as (_, http, client):
            assert "nothing was done" in (await end(http, "save"))["message"]
            await do(http, **MOUSE)
            state = await end(http, "again")
            assert (state["seed"], state["turns"]) == (TEXT.seed, [])
            await do(http, **MOUSE)
            state = await end(http, "skip")
            assert (state["seed"], state["turns"]) == (TEXT.seed + 1, [])
            assert "none of save" in (await end(http, "burn"))["message"]
            assert len(client._open) == 1  # the others were deleted

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_session_that_goes_away_leaves_what_was_recorded(tmp_path):
    async def run():
        async with recording(tmp_path, episodes=2) as (recorder, http, client):
            await do(http, **MOUSE)
            session_id = recorder.demonstration.session.id
            await client.transport.send(  # by somebody else
                "DELETE",
                ("session", session_id),
                content_types=frozenset({"application/json"}),
                max_bytes=1000,
                again_if="never",
            )
            state = await do(http, **MOUSE)
            assert "session is lost" in state["message"] and state["ended"]
            assert len(state["turns"]) == 1
            state = await end(http, "save")
            assert state["open"] and state["turns"] == [] and len(state["saved"]) == 1

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    _, (got,) = reader.read_shard(path)
    assert (got.stop_reason, got.success, len(got.turns)) == (StopReason.ENV_ERROR, False, 1)


@pytest.mark.parametrize(
    ("words", "task", "ended", "stop_reason"),
    [
        ("terminate(success)", TEXT, End.TERMINATED, StopReason.FAILED),
        ("wait(0)", dataclasses.replace(TEXT, max_turns=1), End.MAX_TURNS, StopReason.MAX_TURNS),
        ("wait(0)", TEXT, End.NOT_YET, StopReason.MAX_TURNS),
    ],
)
def test_episode_that_is_not_solved_says_how_it_ended(tmp_path, words, task, ended, stop_reason):
    async def run():
        async with recording(tmp_path, task) as (recorder, http, _):
            state = await do(http, kind="words", text=words)
            assert state["turns"] == [words] and not state["solved"]
            assert recorder.demonstration.ended is ended
            return recorder.demonstration.trajectory()

    got = asyncio.run(run())
    assert (got.stop_reason, got.success) == (stop_reason, False)


def test_limits_of_the_agent_are_those_of_the_person(tmp_path):
    first = len(scripted(TEXT).turns[0].context_ids)

    async def run():
        async with recording(tmp_path, whom=agent(max_new_tokens=4)) as (_, http, _):
            state = await do(http, kind="text", text="much more than four tokens")
            assert "the agent says at most 4" in state["message"] and not state["turns"]
        async with recording(tmp_path, whom=agent(max_context_tokens=first)) as (_, http, _):
            state = await do(http, **MOUSE)
            assert f"at most {first} fit" in state["message"] and not state["ended"]

    asyncio.run(run())


@functools.cache
def talking(action_format: str) -> Chat:
    """The same tokenizer, another way to speak."""
    cfg = ChatConfig(action_format=action_format, system_prompt="", prompt_template="{instruction}")
    return Chat(chat_directory(), cfg, IMAGE_CFG.merge_size)


def chat_directory() -> Path:
    chat()
    from tests import actor_world

    return Path(actor_world._temporary_directory().name)


def test_drag_of_a_format_that_starts_at_the_cursor_moves_there_first(tmp_path):
    async def run():
        whom = agent(talking("computer_use"), max_context_tokens=100_000, max_new_tokens=512)
        async with recording(tmp_path, whom=whom) as (recorder, http, _):
            state = await do(http, **(MOUSE | {"x2": 40}))
            assert len(state["turns"]) == 2, state
            return [turn.action for turn in recorder.demonstration.trajectory().turns]

    move, drag = asyncio.run(run())
    assert (move.kind, drag.kind) == ("move", "drag")
    assert (drag.x, drag.y) == (move.x, move.y) == (10, 8)  # its image has half the pixels: 9 is 10


# --------------------------------------------------------------------------- learning from it


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A folder of two solved demonstrations and one that is not."""
    folder = tmp_path_factory.mktemp("demos")
    for seed, cut in ((3, 9), (4, 9), (5, 1)):
        told = scripted(dataclasses.replace(TEXT, seed=seed))
        if cut < len(told.turns):
            told = dataclasses.replace(
                told, turns=told.turns[:cut], success=False, stop_reason=StopReason.MAX_TURNS
            )
        write_shard(folder / f"{seed}.tfrecord", [told], base_hash="", layout=layout())
    return folder


def test_demonstration_is_told_again_in_the_words_of_the_run(recorded):
    other = talking("coordinates")
    told = recorded_demonstrations.load([str(recorded)], other, IMAGE_CFG)
    assert [len(one.turns) for one in told] == [3, 3, 1]
    assert "3 recorded demonstrations, 2 of them solved, 7 turns" in (
        recorded_demonstrations.describe(told)
    )
    for one in told[:2]:
        expected = scripted(one.task, other)
        for got, wanted in zip(one.turns, expected.turns, strict=True):
            assert got.text == wanted.text and got.text.endswith((" click", " type"))
            np.testing.assert_array_equal(got.context_ids, wanted.context_ids)
            np.testing.assert_array_equal(got.token_ids, wanted.token_ids)
    cfg = batching.BatchConfig(
        rows=2,
        row_lengths=(512,),
        sampled_lengths=(128,),
        image_rows=(16,),
        patch_lengths=(192,),
    )
    batches = batching.make_batches(
        told, image_cfg=IMAGE_CFG, image_token_id=other.image_token_id, cfg=cfg
    )
    trained = [  # of every turn the action's tokens and no other
        other.decode(batch.token_ids_bt[row][batch.turn_ids_bt[row] == turn])
        for batch in batches
        for row in range(2)
        for turn in range(1, batch.turn_ids_bt[row].max() + 1)
    ]
    assert sorted(trained) == sorted(turn.text for one in told for turn in one.turns)
    assert all(
        np.array_equal(batch.completion_mask_bt > 0, batch.turn_ids_bt > 0) for batch in batches
    )


def test_every_demonstration_is_picked_once_a_pass(recorded):
    told = recorded_demonstrations.load([str(recorded)], chat(), IMAGE_CFG)
    picked = [recorded_demonstrations.pick(told, index, seed=1).task.seed for index in range(30)]
    passes = [picked[at : at + 3] for at in range(0, 30, 3)]
    assert all(sorted(one) == [3, 4, 5] for one in passes)
    assert len(set(map(tuple, passes))) > 1


def test_folder_that_holds_no_demonstrations_is_told_with_all_its_faults(tmp_path, recorded):
    (tmp_path / "broken.tfrecord").write_bytes((recorded / "3.tfrecord").read_bytes()[:-9])
    drag = scripted(TEXT)
    first = dataclasses.replace(drag.turns[0], action=Action("triple_click", x=1, y=1))
    write_shard(
        tmp_path / "unsaid.tfrecord",
        [dataclasses.replace(drag, turns=(first,))],
        base_hash="",
        layout=layout(),
    )
    with pytest.raises(ConfigError) as told:
        recorded_demonstrations.load(
            [str(tmp_path), str(tmp_path / "none")], talking("ui_tars"), IMAGE_CFG
        )
    for part in ("broken.tfrecord", "unsaid.tfrecord: turn 0", "triple_click", "none: no *.tfrec"):
        assert part in str(told.value)


def test_learner_takes_no_demonstration_for_its_actors(tmp_path, recorded):
    name = f"a0-{'0' * 32}-00000000-v0.tfrecord"
    (tmp_path / "shards" / "a0").mkdir(parents=True)
    (tmp_path / "shards" / "a0" / name).write_bytes((recorded / "3.tfrecord").read_bytes())
    queue = reader.ShardQueue(tmp_path, "run", "base")
    queue.poll()
    assert queue.take_groups(1, 0, 10) is None
    assert len(list((tmp_path / "quarantine").glob("*.reason"))) == 1


def test_cold_start_learns_what_was_recorded(tmp_path, recorded):
    model_dir = tiny_model.write(tmp_path / "model")
    model = loading.load(model_dir, lora=LoraConfig(4, 8.0, ("attention", "mlp")), seed=0)
    talk = Chat(
        model_dir,
        ChatConfig(system_prompt="", prompt_template="{instruction}"),
        model.image_cfg.merge_size,
    )
    cfg = cold_start.ColdStartConfig(
        steps=6,
        episodes_per_step=2,
        demonstrations=(str(recorded),),
        optimizer=OptimizerConfig(lr=3e-2),
    )
    cold_start.run_cold_start(
        cfg,
        model,
        talk,
        [TaskSpec("desktop/no_such_task", 0)],  # no script is asked
        workdir=tmp_path / "run",
        seed=0,
        batch_cfg=batching.BatchConfig(
            rows=1,
            row_lengths=(320,),
            sampled_lengths=(160,),
            image_rows=(8,),
            patch_lengths=(192,),
        ),
    )
    lines = (tmp_path / "run" / "cold_start" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["learner/loss"] for line in lines]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


# ---------------------------------------------------------------------------------- the command


@contextlib.contextmanager
def started(out: Path, *arguments: str):
    """The tool as a process, and the page's address."""
    process = subprocess.Popen(
        [*COMMAND, f"--out={out}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+/", line)
            assert found, line + process.stdout.read()
            yield process, found[0]
        finally:
            process.kill()


class TestInChromium:
    pytestmark = needs_chromium

    def test_person_solves_a_task_on_the_page_and_leaves_in_the_next_one(self, tmp_path):
        from playwright.async_api import async_playwright

        from uirl_jax.verifiers.browser.pool import find_chromium

        task = TaskSpec("desktop/enter_text", seed=11, max_turns=6)
        script = [turn.action for turn in scripted(task).turns]
        shown = desktop.open_session(task).screenshot()

        async def act(page, box, action):
            if action.kind == "type":
                await page.keyboard.type(action.text + "x")
                await page.keyboard.press("Backspace")  # corrected before it is sent
                return
            scale = box["width"] / shown.width
            x, y = (value * scale + scale / 2 for value in (action.x, action.y))
            await page.mouse.click(box["x"] + x, box["y"] + y)

        async def run(address):
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=find_chromium(), args=["--no-sandbox"]
                )
                page = await browser.new_page(viewport={"width": 1200, "height": 800})
                wrong = []
                page.on("pageerror", lambda error: wrong.append(str(error)))
                page.on("console", lambda said: wrong.append(said.text))
                await page.goto(address)
                await page.get_by_text(desktop.open_session(task).instruction).wait_for()
                screen = page.locator("#screen")
                box = await screen.bounding_box()
                seen = vision_inputs.decode_image(await screen.screenshot())
                for number, action in enumerate(script):
                    await act(page, box, action)
                    if action.kind != "type":  # a text goes with the next click
                        await page.locator("#turns li").nth(number).wait_for()
                verdict = await page.locator("#verdict").inner_text()
                turns = await page.locator("#turns").inner_text()
                await page.locator("#save").click()
                await page.get_by_text("demonstration 2 of 2").wait_for()
                await page.keyboard.press("Control+a")
                await page.get_by_text("keys(ctrl+a)").wait_for()
                await browser.close()
            return seen, verdict, turns, wrong

        arguments = ("--max_turns=6", "--seed=11", "--episodes=2")
        with started(tmp_path, *arguments) as (process, address):
            seen, verdict, turns, wrong = asyncio.run(run(address))
            process.send_signal(signal.SIGINT)  # in the second one
            said = process.stdout.read()
            assert process.wait(60) == 0, said
        assert wrong == []
        assert verdict == "Solved, reward 1."
        # What the person saw is the session's screen, three times as large.
        assert seen.size == tuple(3 * side for side in shown.size)
        np.testing.assert_array_equal(np.asarray(seen)[1::3, 1::3], np.asarray(shown))
        (path,) = tmp_path.glob("*.tfrecord")
        _, (got,) = reader.read_shard(path)
        assert [turn.action for turn in got.turns] == script
        assert turns.split("\n") == [turn.text for turn in got.turns]
        assert (got.reward, got.success, got.task) == (1.0, True, task)
        assert f"{path}: {len(script)} actions" in said
        assert "not saved and gone: a demonstration of 1 actions" in said
