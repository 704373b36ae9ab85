"""The bundled verifier over real HTTP: the calls of G1+, its limits, the life of its process."""

import asyncio
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from PIL import Image

from tests.processes import killed
from tests.served import BUTTON, TEXT, ask, create, served
from uirl_jax.errors import VerifierError
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.server import session_types
from uirl_jax.verifiers.server import sessions as sessions_module
from uirl_jax.verifiers.server.open_session import OpenSession
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.session_types import DesktopTask, SessionTypes
from uirl_jax.verifiers.server.sessions import ServerLimits
from uirl_jax.verifiers.tasks.desktop import open_session, scripted_action
from uirl_jax.verifiers.wire import action_fields

REPO = Path(__file__).parents[1]


def _image(body):
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))


def test_root_and_status_answer_without_a_session():
    async def run():
        async with served() as http:
            status, body, _ = await ask(http, "GET", "/")
            assert status == 200 and b"Session Server" in body
            assert await ask(http, "GET", "/status") == (200, {}, "application/json")

    asyncio.run(run())


def test_session_lives_through_all_its_calls():
    async def run():
        async with served() as http:
            spec = TaskSpec(BUTTON, 5, "buttons=5")
            status, body, _ = await ask(
                http,
                "POST",
                "/session",
                params={"type": BUTTON, "n": 2, "seed": 5, "variant": "buttons=5"},
            )
            assert status == 200
            assert [s["id"] for s in body["sessions"]] == body["session_ids"]
            local = open_session(spec)
            for session in body["sessions"]:
                assert session["instruction"] == local.instruction
                assert (session["screen_width"], session["screen_height"]) == (224, 168)
            path = f"/session/{body['session_ids'][0]}"
            _, shot, kind = await ask(http, "GET", f"{path}/screenshot")
            assert kind == "image/png"
            np.testing.assert_array_equal(_image(shot), np.asarray(local.screenshot()))
            _, progress, _ = await ask(http, "GET", f"{path}/progress")
            assert progress["done"] is False and progress["reward"] is None
            action = scripted_action(local, np.random.default_rng(0))
            query = {"action_type": "left_click", "x": action.x, "y": action.y, "delay": 0}
            status, shot, kind = await ask(http, "GET", f"{path}/act", params=query)
            assert (status, kind) == (200, "image/png") and _image(shot).shape == (168, 224, 3)
            _, progress, _ = await ask(http, "GET", f"{path}/progress")
            assert progress["done"] is True and progress["reward"] == 1.0
            _, other, _ = await ask(http, "GET", f"/session/{body['session_ids'][1]}/progress")
            assert other["done"] is False
            _, info, _ = await ask(http, "GET", path)
            assert info["action_count"] == 1 and info["stop_time"] is None
            deleted = await ask(http, "DELETE", path)
            assert deleted[:2] == (200, {"deleted": body["session_ids"][0]})
            status, info, _ = await ask(http, "GET", path)
            assert status == 200 and info["stop_time"] is not None
            for method, call in [("GET", "/screenshot"), ("GET", "/progress"), ("DELETE", "")]:
                gone = await ask(http, method, path + call)
                assert gone[:2] == (404, {"detail": "Session not found"})
            _, table, _ = await ask(http, "GET", "/status")
            assert set(table) == set(body["session_ids"])

    asyncio.run(run())


def test_sessions_of_a_caller_that_is_gone_when_they_open_are_ended():
    class SlowTypes(SessionTypes):
        def __init__(self):
            super().__init__(warm_browsers=0, max_browsers=1)
            self.asked, self.ready = asyncio.Event(), asyncio.Event()

        async def open(self, task):
            self.asked.set()
            await self.ready.wait()
            return await super().open(task)

    async def run():
        types = SlowTypes()
        async with (
            serve(types=types) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            query = {"type": BUTTON, "n": 2}
            creating = asyncio.create_task(ask(http, "POST", "/session", params=query))
            await types.asked.wait()
            creating.cancel()
            await asyncio.wait([creating])
            await asyncio.sleep(0.2)  # until the server has seen that the connection is closed
            types.ready.set()
            ended = []
            async with asyncio.timeout(10):
                while len(ended) < 2:
                    _, sessions, _ = await ask(http, "GET", "/status")
                    ended = [session for session in sessions.values() if session["stop_time"]]
            await create(http)  # of a caller that stays
            _, sessions, _ = await ask(http, "GET", "/status")
            assert len(sessions) == 3
            assert sum(session["stop_time"] is None for session in sessions.values()) == 1

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", [BUTTON, TEXT, "desktop/data_entry"])
def test_task_played_over_http_pays_in_full(method, name):
    async def run():
        async with served() as http:
            session = await create(http, name, seed=3, variant="popup=1")
            local, rng = open_session(TaskSpec(name, 3, "popup=1")), np.random.default_rng(0)
            path = f"/session/{session['id']}"
            while not local.progress()["done"]:
                action = scripted_action(local, rng)
                local.act(action)
                fields = {**action_fields(action), "delay": 0}
                options = {"params": fields} if method == "GET" else {"json": fields}
                status, shot, _ = await ask(http, method, f"{path}/act", **options)
                assert status == 200
                np.testing.assert_array_equal(_image(shot), np.asarray(local.screenshot()))
            _, progress, _ = await ask(http, "GET", f"{path}/progress")
            assert progress == local.progress() and progress["reward"] == 1.0

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_act_with_a_repeated_request_id_is_answered_and_not_applied_again(method):
    async def run():
        async with served() as http:
            session = await create(http, TEXT, seed=1)
            x0, y0, x1, y1 = open_session(TaskSpec(TEXT, 1)).targets["field"]
            path = f"/session/{session['id']}"

            async def act(**fields):
                options = {"params": fields} if method == "GET" else {"json": fields}
                return await ask(http, method, f"{path}/act", **options)

            await act(
                action_type="left_click",
                x=(x0 + x1) // 2,
                y=(y0 + y1) // 2,
                delay=0,
                request_id="a",
            )
            one = {"action_type": "type", "text": "ab", "delay": 0.05, "request_id": "b"}
            # The repetition arrives while the first is still under way, and once more later.
            first, second = await asyncio.gather(act(**one), act(**one))
            third = await act(**one)
            assert first == second == third and first[0] == 200
            _, info, _ = await ask(http, "GET", path)
            assert info["action_count"] == 2
            new = await act(**{**one, "request_id": "c"})
            assert new[1] != first[1]
            for i in range(6):  # the memory for answers is bounded: "b" falls out
                await act(action_type="wait", seconds=0, delay=0, request_id=f"d{i}")
            assert (await act(**one))[1] != first[1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("image_format", "pillow_format"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")]
)
def test_format_decides_the_encoding(image_format, pillow_format):
    async def run():
        async with served() as http:
            path = f"/session/{(await create(http, seed=1))['id']}"
            calls = [
                ("GET", "/screenshot", {"params": {"format": image_format}}),
                ("POST", "/act", {"json": {"action_type": "screenshot", "format": image_format}}),
            ]
            for method, call, options in calls:
                _, body, kind = await ask(http, method, path + call, **options)
                assert kind == f"image/{image_format}"
                assert Image.open(io.BytesIO(body)).format == pillow_format
                expected = np.asarray(open_session(TaskSpec(BUTTON, 1)).screenshot()).astype(int)
                error = np.abs(_image(body).astype(int) - expected)
                assert error.max() == 0 if image_format == "png" else error.mean() < 6

    asyncio.run(run())


def test_delay_is_waited_for_and_screenshots_are_not_delayed(monkeypatch):
    slept_s = []

    async def counted_pause(session, seconds):
        slept_s.append(seconds)

    async def run():
        limits = ServerLimits(max_delay_s=3.0)
        async with served(limits=limits) as http:
            path = f"/session/{(await create(http))['id']}/act"
            monkeypatch.setattr(OpenSession, "pause", counted_pause)
            for fields, expected_s in [
                ({"action_type": "mouse_move", "x": 1, "y": 1}, [1.0]),  # the dialect's default
                ({"action_type": "mouse_move", "x": 1, "y": 1, "delay": 0.25}, [0.25]),
                ({"action_type": "wait", "seconds": 0.5, "delay": 1}, [1.5]),
                ({"action_type": "wait", "seconds": 60, "delay": 0}, [3.0]),
                ({"action_type": "screenshot"}, []),
            ]:
                slept_s.clear()
                status, _, _ = await ask(http, "POST", path, json=fields)
                assert status == 200
                assert slept_s == expected_s

    asyncio.run(run())


def test_sessions_beyond_the_limit_are_refused_until_one_is_deleted():
    async def run():
        async with served(limits=ServerLimits(max_sessions=2)) as http:
            first = await create(http)
            await create(http)
            status, body, _ = await ask(http, "POST", "/session", params={"type": BUTTON})
            assert status == 429 and "2 of at most 2" in body["detail"]
            await ask(http, "DELETE", f"/session/{first['id']}")
            await create(http)

    asyncio.run(run())


def test_deletion_ends_the_delay_and_refuses_the_calls_that_wait(monkeypatch):
    """What a session held is another's from then on: a browser's page goes to the next one."""
    acts, closed = [], []
    monkeypatch.setattr(DesktopTask, "act", _noting(acts))
    monkeypatch.setattr(DesktopTask, "close", _noting(closed))

    async def run():
        async with served() as http:
            path = f"/session/{(await create(http))['id']}"
            slow = {"action_type": "mouse_move", "x": 1, "y": 1, "delay": 9}
            waiting = [
                asyncio.create_task(ask(http, method, path + call, **options))
                for method, call, options in [
                    ("POST", "/act", {"json": slow}),
                    ("POST", "/act", {"json": slow}),
                    ("GET", "/screenshot", {}),
                    ("GET", "/progress", {}),
                ]
            ]
            while not acts:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the others wait for the first one
            async with asyncio.timeout(5.0):
                assert (await ask(http, "DELETE", path))[0] == 200
                for answer in await asyncio.gather(*waiting):
                    assert answer[:2] == (404, {"detail": "Session not found"})
            assert len(acts) == len(closed) == 1

    asyncio.run(run())


def _noting(calls):
    async def note(*arguments):
        calls.append(arguments)

    return note


def test_idle_session_is_ended_and_a_used_one_is_not():
    async def run():
        async with served(limits=ServerLimits(idle_time_s=0.6)) as http:
            idle, used = await create(http), await create(http)
            for _ in range(200):
                status, _, _ = await ask(http, "GET", f"/session/{used['id']}/progress")
                assert status == 200
                _, table, _ = await ask(http, "GET", "/status")
                if table[idle["id"]]["stop_time"] is not None:
                    break
                await asyncio.sleep(0.05)
            assert (await ask(http, "GET", f"/session/{idle['id']}/progress"))[0] == 404

    asyncio.run(run())


@pytest.mark.parametrize("error", [BrowserError("gone"), RuntimeError("odd")])
def test_session_whose_close_fails_costs_no_other_session(monkeypatch, caplog, error):
    closed = []

    async def close(task):
        closed.append(task)
        if len(closed) == 1:
            raise error

    monkeypatch.setattr(DesktopTask, "close", close)

    async def run():
        async with served(limits=ServerLimits(idle_time_s=0.4)) as http:
            await create(http)
            await _until(lambda: len(closed) == 1)  # this close raised
            await create(http)
            await _until(lambda: len(closed) == 2)  # the sweeper goes on
            closed.clear()
            await create(http, n=3)
        assert len(closed) == 3  # at the end too the first close raises

    asyncio.run(run())
    assert str(error) in caplog.text


def test_session_that_is_lost_and_cannot_be_closed_tells_why_it_was_lost(monkeypatch):
    async def lost(task, image_format):
        raise BrowserError("the page crashed")

    async def close(task):
        raise BrowserError("no such page")

    monkeypatch.setattr(DesktopTask, "screenshot", lost)
    monkeypatch.setattr(DesktopTask, "close", close)

    async def run():
        async with served() as http:
            path = f"/session/{(await create(http))['id']}/screenshot"
            status, body, _ = await ask(http, "GET", path)
            assert (status, body["detail"]) == (500, "the page crashed")

    asyncio.run(run())


def test_error_of_a_page_with_a_line_break_is_one_line_of_the_log(monkeypatch, caplog):
    async def lost(task, image_format):
        raise BrowserError("odd page\nevent=forged")

    monkeypatch.setattr(DesktopTask, "screenshot", lost)

    async def run():
        async with served() as http:
            session = await create(http)
            await ask(http, "GET", f"/session/{session['id']}/screenshot")

    asyncio.run(run())
    (line,) = [r.getMessage() for r in caplog.records if "event=lost" in r.getMessage()]
    assert line.endswith(' reason="odd page\\nevent=forged"') and line.isprintable()


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.02)


def test_ended_sessions_are_remembered_only_so_far(monkeypatch):
    monkeypatch.setattr(sessions_module, "_ENDED_KEPT", 3)

    async def run():
        async with served() as http:
            for _ in range(5):
                await ask(http, "DELETE", f"/session/{(await create(http))['id']}")
            assert len((await ask(http, "GET", "/status"))[1]) == 3

    asyncio.run(run())


def test_defect_in_a_handler_is_500_without_a_traceback(monkeypatch, caplog):
    def broken(image, image_format):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(session_types, "encode_image", broken)

    async def run():
        async with served() as http:
            path = f"/session/{(await create(http))['id']}/screenshot"
            got = await ask(http, "GET", path)
            assert got[:2] == (500, {"detail": "Internal Server Error"})
            assert (await ask(http, "GET", "/"))[0] == 200

    asyncio.run(run())
    assert "secret detail" in caplog.text  # the operator is told


def test_typed_text_is_never_logged(caplog):
    caplog.set_level(logging.DEBUG)

    async def run():
        async with served() as http:
            path = f"/session/{(await create(http, TEXT))['id']}/act"
            fields = {"action_type": "type", "text": "hunter2", "delay": 0}
            await ask(http, "POST", path, json=fields)
            await ask(http, "GET", path, params=fields)

    asyncio.run(run())
    ours = [record for record in caplog.records if record.name.startswith(("uirl_jax", "aiohttp"))]
    assert any("kind=type" in record.getMessage() for record in ours)
    assert not any("hunter2" in record.getMessage() for record in ours)


def _start(tmp_path, *arguments):
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "uirl_jax.verifiers.server",
        "--port-file",
        str(port_file),
    ]
    process = subprocess.Popen([*command, *arguments], cwd=REPO, stderr=subprocess.PIPE, text=True)
    return process, port_file


def _wait_for(condition, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def test_process_writes_its_port_serves_and_ends_on_sigterm(tmp_path):
    process, port_file = _start(tmp_path)
    with killed(process):
        _wait_for(port_file.exists)
        port = int(port_file.read_text())

        async def run():
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                assert (await ask(http, "GET", "/"))[0] == 200

        asyncio.run(run())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert "Traceback" not in process.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_port_in_use_is_a_verifier_error():
    async def run():
        async with serve() as port, serve(port=port):
            pass

    with pytest.raises(VerifierError, match=r"port \d+ of 127.0.0.1 is in use"):
        asyncio.run(run())


def test_process_with_its_port_in_use_says_so_in_one_line_and_exits_1(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process, port_file = _start(tmp_path, "--port", str(taken.getsockname()[1]))
        with killed(process):
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.count("\n") == 1 and "is in use" in errors
        assert not port_file.exists()


def test_process_ends_with_its_parent_even_after_sigkill(tmp_path):
    port_file = tmp_path / "port"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'uirl_jax.verifiers.server',"
        f" '--port-file', {str(port_file)!r}, '--exit-with-parent'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with killed(parent):
        child_pid = int(parent.stdout.readline())
        _wait_for(port_file.exists)
        port = int(port_file.read_text())
        os.kill(child_pid, 0)
        parent.kill()
        parent.wait()

    def closed():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    _wait_for(closed)
