"""OpenEnv's protocol on the bundled server: by raw messages, and by OpenEnv's own client.

The package openenv takes 478 MB with what it depends on (gradio, fastmcp), so the tests do not
install it. Its client is run in a Python that has it, named by UIRL_OPENENV_PYTHON:

    python3.11 -m venv /tmp/oe && /tmp/oe/bin/pip install openenv==0.10.0
    UIRL_OPENENV_PYTHON=/tmp/oe/bin/python pytest tests/test_openenv_server.py
"""

import asyncio
import base64
import contextlib
import importlib.util
import io
import json
import os
import socket
import subprocess
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image

from tests.chromium import REASON
from tests.recorded_rows import InMemory, row, step
from uirl_jax import seeds
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.open_session import ServerLimits
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.tasks import desktop

REPO = Path(__file__).parents[1]
OPENENV_PYTHON = os.environ.get("UIRL_OPENENV_PYTHON", "")
BUTTON = TaskSpec("desktop/click_button", 5)
RESET = {"type": "reset", "data": {"task": BUTTON.name, "seed": 5}}


def solution(task=BUTTON):
    session = desktop.open_session(task)
    action = desktop.scripted_action(session, np.random.default_rng(0), 1.0)
    return wire.action_fields(action)


def talk(use, *, limits=None, token=None, recorded=None, **headers):
    """Calls `use` with an HTTP session, the base URL, and a function that opens a WebSocket."""

    async def run():
        async with (
            serve(limits=limits, token=token, recorded=recorded) as port,
            aiohttp.ClientSession(headers=headers) as http,
            contextlib.AsyncExitStack() as stack,
        ):
            base = f"http://127.0.0.1:{port}"

            async def connect():
                socket = await stack.enter_async_context(http.ws_connect(f"{base}/ws"))

                async def ask(message):
                    text = message if isinstance(message, str) else json.dumps(message)
                    await socket.send_str(text)
                    return json.loads((await socket.receive()).data)

                ask.socket = socket
                return ask

            return await use(http, base, connect)

    return asyncio.run(run())


async def _status(http, base):
    sessions = await (await http.get(f"{base}/status")).json()
    return [info for info in sessions.values() if info["stop_time"] is None]


def test_session_shows_the_task_pays_the_step_and_ends_with_the_connection():
    async def use(http, base, connect):
        ask = await connect()
        first = await ask(RESET)
        assert first["type"] == "observation"
        seen = first["data"]["observation"]
        session = desktop.open_session(BUTTON)
        image = Image.open(io.BytesIO(base64.b64decode(seen["screenshot"])))
        assert np.array_equal(np.asarray(image), np.asarray(session.screenshot()))
        assert seen["goal"] == session.instruction
        assert (seen["screen_width"], seen["screen_height"]) == image.size
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        step = await ask({"type": "step", "data": {**solution(), "metadata": {"a": 1}}})
        assert (step["data"]["reward"], step["data"]["done"]) == (1.0, True)
        state = (await ask({"type": "state"}))["data"]
        assert state["step_count"] == 1 and state["task"] == BUTTON.name and state["seed"] == 5
        over = await ask({"type": "step", "data": solution()})
        assert over["data"]["code"] == "EXECUTION_ERROR" and "reset" in over["data"]["message"]
        assert len(await _status(http, base)) == 1
        again = await ask({"type": "reset", "data": {"episode_id": "mine", "seed": 6}})
        assert again["type"] == "observation" and len(await _status(http, base)) == 1
        assert (await ask({"type": "state"}))["data"]["episode_id"] == "mine"
        await ask.socket.close()
        await asyncio.sleep(0.1)
        assert await _status(http, base) == []

    talk(use)


def test_recorded_steps_are_listed_and_take_the_ends_that_they_judge():
    end = step(Action("terminate", text="success"))
    sets = RecordedSets({"made": InMemory([row(0, [end])])})
    said = {"type": "step", "data": {"action_type": "terminate", "text": "success"}}

    async def use(http, base, connect):
        async with http.post(f"{base}/uirl_jax/tasks", json={"split": "train"}) as listed:
            names = {task["task"] for task in (await listed.json())["tasks"]}
        assert {"recorded/made", BUTTON.name} <= names
        ask = await connect()
        await ask({"type": "reset", "data": {"task": "recorded/made", "seed": 0}})
        data = (await ask(said))["data"]
        assert (data["reward"], data["done"]) == (1.0, True)
        await ask(RESET)  # a screen is not told how the policy ends
        refused = (await ask(said))["data"]
        assert refused["code"] == "VALIDATION_ERROR" and "terminate" in refused["message"]

    talk(use, recorded=sets)


def test_pings_are_answered_while_a_call_runs_and_messages_wait_for_their_turn():
    async def use(http, base, connect):
        async with http.ws_connect(f"{base}/ws", autoping=False) as socket:
            await socket.send_json(RESET)
            assert (await socket.receive_json())["type"] == "observation"
            wait = {"action_type": "wait", "seconds": 3}
            await socket.send_json({"type": "step", "data": wait})
            await socket.send_json({"type": "state"})
            await asyncio.sleep(0.2)  # the call runs
            await socket.ping(b"there?")
            pong = await socket.receive(timeout=1.0)
            assert (pong.type, bytes(pong.data)) == (aiohttp.WSMsgType.PONG, b"there?")
            answers = [await socket.receive_json() for _ in range(2)]
            assert [answer["type"] for answer in answers] == ["observation", "state"]
            assert answers[1]["data"]["step_count"] == 1

    talk(use)


def test_rewards_of_the_steps_add_up_to_the_episodes():
    task = TaskSpec("desktop/data_entry", 3, "rows=2")

    async def use(http, base, connect):
        ask = await connect()
        await ask({"type": "reset", "data": {"task": task.name, "seed": 3, "variant": "rows=2"}})
        session, rng, rewards, done = (
            desktop.open_session(task),
            np.random.default_rng(0),
            [],
            False,
        )
        while not done:
            action = desktop.scripted_action(session, rng, 1.0)
            session.act(action)
            answer = await ask({"type": "step", "data": wire.action_fields(action)})
            rewards.append(answer["data"]["reward"])
            done = answer["data"]["done"]
        assert sum(rewards) == pytest.approx(session.progress()["reward"]) and len(rewards) > 2

    talk(use)


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ("{", "INVALID_JSON", "is not JSON"),
        ("[1]", "INVALID_JSON", "expected an object"),
        ("[" * 9000, "INVALID_JSON", "nested deeper"),
        ({"type": "mcp", "data": {}}, "UNKNOWN_TYPE", "'mcp'"),
        ({}, "UNKNOWN_TYPE", "'None'"),
        ({"type": "reset", "data": [1]}, "VALIDATION_ERROR", "data is not an object"),
        ({"type": "reset", "extra": 1}, "VALIDATION_ERROR", "'extra' of a message"),
        ({"type": "reset", "data": {"level": 1}}, "VALIDATION_ERROR", "unknown field 'level'"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR", "seed is -1"),
        ({"type": "reset", "data": {"seed": "1"}}, "VALIDATION_ERROR", "seed is a str"),
        ({"type": "reset", "data": {"task": "no/task"}}, "VALIDATION_ERROR", "unknown task"),
        ({"type": "reset", "data": {"variant": "a=1"}}, "VALIDATION_ERROR", "a"),
        ({"type": "reset", "data": {"episode_id": "e" * 256}}, "VALIDATION_ERROR", "256"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR", "action_type"),
        (
            {"type": "step", "data": {"action_type": "left_click", "x": 1, "y": 1, "z": 1}},
            "VALIDATION_ERROR",
            "unknown field 'z'",
        ),
        (
            {"type": "step", "data": {"action_type": "left_click", "x": 1000, "y": 1}},
            "VALIDATION_ERROR",
            "off the screen",
        ),
        (
            {"type": "step", "data": {**solution(), "metadata": "m"}},
            "VALIDATION_ERROR",
            "metadata is a str",
        ),
        (
            {"type": "step", "data": {**solution(), "request_id": "r"}},
            "VALIDATION_ERROR",
            "unknown field 'request_id'",
        ),
    ],
)
def test_refused_message_is_told_why_and_the_episode_goes_on(message, code, reason):
    async def use(http, base, connect):
        ask = await connect()
        await ask(RESET)
        answer = await ask(message)
        assert answer["type"] == "error" and answer["data"]["code"] == code
        assert reason in answer["data"]["message"]
        if message == {} or code != "VALIDATION_ERROR" or "reset" not in str(message):
            assert (await ask({"type": "step", "data": solution()}))["data"]["reward"] == 1.0

    talk(use)


def test_limits_hold_for_connections_sessions_messages_and_actions():
    limits = ServerLimits(max_sessions=2, max_body_bytes=2000, max_actions_per_s=1.0)

    async def use(http, base, connect):
        created = await http.post(f"{base}/session", params={"type": BUTTON.name, "n": "2"})
        assert created.status == 200
        ask, other = await connect(), await connect()
        full = await ask(RESET)
        assert full["data"]["code"] == "CAPACITY_REACHED" and full["data"]["max_sessions"] == 2
        third = await connect()
        refused = json.loads((await third.socket.receive()).data)
        assert refused["data"]["code"] == "CAPACITY_REACHED"
        assert (await third.socket.receive()).type is aiohttp.WSMsgType.CLOSE
        session_id = (await created.json())["session_ids"][0]
        await http.delete(f"{base}/session/{session_id}")
        assert (await other(RESET))["type"] == "observation"
        wait = {"type": "step", "data": {"action_type": "wait", "seconds": 0}}
        assert (await other(wait))["type"] == "observation"
        assert "too many actions" in (await other(wait))["data"]["message"]
        await ask.socket.send_str("x" * 3000)
        assert (await ask.socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await other.socket.send_bytes(b"\x00")
        assert json.loads((await other.socket.receive()).data)["data"]["code"] == "INVALID_JSON"

    talk(use, limits=limits)


def test_websocket_needs_what_every_call_needs():
    async def use(http, base, connect):
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await connect()
        token = {"Authorization": "Bearer " + "t" * 32}
        async with http.ws_connect(f"{base}/ws", headers=token) as socket:
            await socket.send_json(RESET)
            assert json.loads((await socket.receive()).data)["type"] == "observation"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await http.ws_connect(f"{base}/ws", headers={**token, "Origin": "http://x"})
        assert (await http.get(f"{base}/ws", headers=token)).status == 400

    talk(use, token="t" * 32)


def test_calls_by_http_leave_no_session():
    async def use(http, base, connect):
        async def post(path, body):
            answer = await http.post(f"{base}{path}", json=body)
            return answer.status, await answer.json()

        status, first = await post("/reset", {"task": BUTTON.name, "seed": 5})
        assert status == 200 and first["reward"] is None
        assert (await http.post(f"{base}/reset")).status == 200
        status, step = await post("/step", {"action": solution(), **RESET["data"], "timeout_s": 3})
        assert (status, step["reward"], step["done"]) == (200, 1.0, True)
        for body in (
            {},
            {"action": {**solution(), "z": 1}},
            {"action": solution(), "timeout_s": 0},
        ):
            assert (await post("/step", body))[0] == 422
        assert await (await http.get(f"{base}/health")).json() == {"status": "healthy"}
        state = await (await http.get(f"{base}/state")).json()
        assert (state["episode_id"], state["step_count"]) == (None, 0)
        schema = await (await http.get(f"{base}/schema")).json()
        assert schema["action"]["additionalProperties"] is False
        assert {"action_type", "x", "y", "metadata"} <= set(schema["action"]["properties"])
        observation = set(schema["observation"]["properties"])
        assert observation == set(first["observation"]) | {"reward", "done"}
        assert await _status(http, base) == []

    talk(use)


def test_task_lists_have_disjoint_seeds_and_their_entries_are_resets():
    async def use(http, base, connect):
        async def ask(path, **body):
            answer = await http.post(f"{base}/uirl_jax/{path}", json=body)
            return answer.status, await answer.json()

        splits = await (await http.get(f"{base}/uirl_jax/splits")).json()
        assert [split["name"] for split in splits] == ["train", "validation", "test"]
        assert await (await http.get(f"{base}/list_environments")).json() == ["uirl_jax"]
        ranges = (seeds.TRAIN_SEEDS, seeds.TUNE_SEEDS, seeds.EVAL_SEEDS)
        for split, known in zip(splits, ranges, strict=True):
            _, count = await ask("num_tasks", split=split["name"])
            _, last = await ask("task", split=split["name"], index=count["num_tasks"] - 1)
            assert last["task"]["seed"] == known[-1]
            _, listed = await ask("tasks", split=split["name"])
            assert len(listed["tasks"]) == 1000 and listed["env_name"] == "uirl_jax"
            assert all(task["seed"] in known for task in listed["tasks"])
            status, _ = await ask("task", split=split["name"], index=count["num_tasks"])
            assert status == 400
        _, some = await ask("task_range", split="train", start=1, stop=3)
        _, listed = await ask("tasks", split="train")
        assert some["tasks"] == listed["tasks"][1:3]
        observed = await (await connect())({"type": "reset", "data": some["tasks"][0]})
        assert observed["type"] == "observation"
        for path, body in (
            ("tasks", {"split": "dev"}),
            ("tasks", {}),
            ("task", {"split": "train"}),
            ("task", {"split": "train", "index": -1}),
            ("task", {"split": "train", "index": True}),
            ("task_range", {"split": "train"}),
            ("num_tasks", {"split": "train", "more": 1}),
        ):
            assert (await ask(path, **body))[0] == 422, (path, body)
        assert (await http.post(f"{base}/other/tasks", json={"split": "train"})).status == 404

    talk(use)


def test_server_that_ends_closes_its_websockets():
    async def run():
        async with aiohttp.ClientSession() as http:
            async with serve() as port:
                socket = await http.ws_connect(f"http://127.0.0.1:{port}/ws")
                await socket.send_json(RESET)
                await socket.receive()
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE

    asyncio.run(run())


def test_caller_who_never_reads_is_left_when_the_server_ends(monkeypatch):
    monkeypatch.setattr("uirl_jax.verifiers.server.openenv._CLOSE_S", 0.2)
    reset = json.dumps(RESET).encode()
    message = bytes([0x81, 0x80 | len(reset)]) + bytes(4) + reset  # a frame whose mask is 0

    async def run():
        loop = asyncio.get_running_loop()
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.setblocking(False)
            async with asyncio.timeout(60), serve() as port:
                await loop.sock_connect(caller, ("127.0.0.1", port))
                upgrade = (
                    f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
                    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
                )
                await loop.sock_sendall(caller, upgrade.encode())
                with contextlib.suppress(TimeoutError):  # until nothing is taken any more
                    while True:
                        async with asyncio.timeout(2):
                            await loop.sock_sendall(caller, message)

    asyncio.run(run())


@pytest.mark.browser
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_miniwob_is_played_through_the_door():
    async def use(http, base, connect):
        ask = await connect()
        reset = {"type": "reset", "data": {"task": "miniwob/click-test", "seed": 1}}
        first = (await ask(reset))["data"]["observation"]
        assert first["goal"] == "Click the button." and first["renderer"]
        assert (first["screen_width"], first["screen_height"]) == (160, 210)
        for y in range(60, 200, 12):  # the button is wherever the seed puts it
            for x in range(6, 160, 12):
                click = {"action_type": "left_click", "x": x, "y": y}
                answer = (await ask({"type": "step", "data": click}))["data"]
                if answer["done"]:
                    assert answer["reward"] == 1.0
                    return
        raise AssertionError("no click hit the button")

    talk(use)


_CLIENT = """
import asyncio, json, sys
from openenv.core.env_server import types
from openenv.core.generic_client import GenericEnvClient
import requests

url, action = sys.argv[1], json.loads(sys.argv[2])

async def main():
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(task="desktop/click_button", seed=5)
        try:
            await env.step({**action, "z": 1})
        except RuntimeError as error:
            refused = str(error)
        last = await env.step(action)
        return {"goal": first.observation["goal"], "refused": refused, "reward": last.reward,
                "done": last.done, "state": await env.state()}

played = asyncio.run(main())
with GenericEnvClient(base_url=url).sync() as env:
    assert not env.reset().done
types.SchemaResponse(**requests.get(url + "/schema").json())
types.EnvironmentMetadata(**requests.get(url + "/metadata").json())
types.HealthResponse(**requests.get(url + "/health").json())
types.ResetResponse(**requests.post(url + "/reset", json={}).json())
print(json.dumps(played))
"""


@pytest.mark.skipif(not OPENENV_PYTHON, reason="UIRL_OPENENV_PYTHON names no Python with openenv")
def test_openenvs_own_client_plays_a_task():
    async def use(http, base, connect):
        command = [OPENENV_PYTHON, "-c", _CLIENT, base, json.dumps(solution())]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120
        )

    done = talk(use)
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)
    assert played["goal"] == desktop.open_session(BUTTON).instruction
    assert (played["reward"], played["done"]) == (1.0, True)
    assert "unknown field 'z'" in played["refused"] and "VALIDATION_ERROR" in played["refused"]
    assert played["state"]["step_count"] == 1


# ------------------------------------------------------------------------------- the bridge


class _FakeEnv:
    """A gymnasium environment with BrowserGym's observations."""

    def __init__(self, name):
        self.name, self.actions = name, []

    def reset(self, seed):
        self.actions.append(seed)
        return self._see(), {}

    def step(self, action):
        self.actions.append(action)
        if action == "mouse_click(1, 1, 'left')":
            raise RuntimeError("Target page, context or browser has been closed")
        solved = action == "mouse_click(4, 2, 'left')"
        return self._see("" if solved else "TimeoutError: no"), float(solved), solved, False, {}

    def close(self):
        self.actions.append("closed")

    def _see(self, error=""):
        pixels_hwc = np.full((6, 8, 3), len(self.actions), np.uint8)
        return {"goal": "Click.", "screenshot": pixels_hwc, "last_action_error": error}


def test_bridge_serves_an_environment_of_browsergym_in_our_protocol():
    from uirl_jax.errors import VerifierError
    from uirl_jax.types import Action
    from uirl_jax.verifiers.client.client import VerifierClient

    path = REPO / "examples/browsergym_bridge.py"
    spec = importlib.util.spec_from_file_location("browsergym_bridge", path)
    bridge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bridge)
    made = []

    def make(name):
        if name != "browsergym/miniwob.click-test":
            raise VerifierError(f"unknown task {name!r}")
        made.append(_FakeEnv(name))
        return made[-1]

    async def run():
        async with (
            serve(types=bridge.BrowserGymTypes(make)) as port,
            VerifierClient(f"http://127.0.0.1:{port}") as client,
        ):
            task = TaskSpec("browsergym/miniwob.click-test", 7)
            session = await client.create(task)
            assert (session.width_px, session.height_px) == (8, 6)
            await client.act(session.id, Action("click", x=2, y=2), "a")
            await client.act(session.id, Action("click", x=2, y=2), "a")  # its answer was lost
            await client.act(session.id, Action("triple_click", x=2, y=2), "b")
            progress = await client.progress(session.id)
            assert "no triple_click" in progress["last_action_error"] and not progress["done"]
            await client.act(session.id, Action("click", x=4, y=2), "c")
            progress = await client.progress(session.id)
            assert (progress["reward"], progress["done"]) == (1.0, True)
            await client.delete(session.id)
            assert made[0].actions == [
                7,
                "mouse_click(2, 2, 'left')",
                "mouse_click(4, 2, 'left')",
                "closed",
            ]
            broken = await client.create(task)
            with pytest.raises(VerifierError, match="HTTP 500"):
                await client.act(broken.id, Action("click", x=1, y=1))
            with pytest.raises(VerifierError, match="unknown task"):
                await client.create(TaskSpec("desktop/click_button", 1))
            with pytest.raises(VerifierError, match="has no variant"):
                await client.create(TaskSpec(task.name, 1, "scale=2"))

    asyncio.run(run())
    assert len(path.read_text().splitlines()) <= 200
