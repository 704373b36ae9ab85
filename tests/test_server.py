"""The bundled verifier over real HTTP: the calls of G1+, its limits, the life of its process."""

import asyncio
import contextlib
import gzip
import io
import json
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
import yarl
from PIL import Image

from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers import calls, session_types
from uirl_jax.verifiers import sessions as sessions_module
from uirl_jax.verifiers.desktop import open_session, scripted_action
from uirl_jax.verifiers.open_session import OpenSession
from uirl_jax.verifiers.server import serve
from uirl_jax.verifiers.session_types import DesktopTask
from uirl_jax.verifiers.sessions import ServerLimits
from uirl_jax.verifiers.wire import action_fields

REPO = Path(__file__).parents[1]
TOKEN = "t" * 32
BUTTON, TEXT = "desktop/click_button", "desktop/enter_text"


@contextlib.asynccontextmanager
async def _served(**options):
    async with (
        serve(**options) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        yield http


async def _call(http, method, path, **options):
    """(status, parsed JSON or bytes, content type)."""
    async with http.request(method, path, **options) as response:
        body = await response.read()
        if response.content_type == "application/json":
            body = json.loads(body)
        return response.status, body, response.content_type


async def _create(http, name=BUTTON, **query):
    status, body, _ = await _call(http, "POST", "/session", params={"type": name, **query})
    assert status == 200, body
    return body["sessions"][0]


def _image(body):
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))


def test_root_and_status_answer_without_a_session():
    async def run():
        async with _served() as http:
            status, body, _ = await _call(http, "GET", "/")
            assert status == 200 and b"Session Server" in body
            assert await _call(http, "GET", "/status") == (200, {}, "application/json")

    asyncio.run(run())


def test_session_lives_through_all_its_calls():
    async def run():
        async with _served() as http:
            spec = TaskSpec(BUTTON, 5, "buttons=5")
            status, body, _ = await _call(
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
            _, shot, kind = await _call(http, "GET", f"{path}/screenshot")
            assert kind == "image/png"
            np.testing.assert_array_equal(_image(shot), np.asarray(local.screenshot()))
            _, progress, _ = await _call(http, "GET", f"{path}/progress")
            assert progress["done"] is False and progress["reward"] is None
            action = scripted_action(local, np.random.default_rng(0))
            query = {"action_type": "left_click", "x": action.x, "y": action.y, "delay": 0}
            status, shot, kind = await _call(http, "GET", f"{path}/act", params=query)
            assert (status, kind) == (200, "image/png") and _image(shot).shape == (168, 224, 3)
            _, progress, _ = await _call(http, "GET", f"{path}/progress")
            assert progress["done"] is True and progress["reward"] == 1.0
            _, other, _ = await _call(http, "GET", f"/session/{body['session_ids'][1]}/progress")
            assert other["done"] is False
            _, info, _ = await _call(http, "GET", path)
            assert info["action_count"] == 1 and info["stop_time"] is None
            deleted = await _call(http, "DELETE", path)
            assert deleted[:2] == (200, {"deleted": body["session_ids"][0]})
            status, info, _ = await _call(http, "GET", path)
            assert status == 200 and info["stop_time"] is not None
            for method, call in [("GET", "/screenshot"), ("GET", "/progress"), ("DELETE", "")]:
                gone = await _call(http, method, path + call)
                assert gone[:2] == (404, {"detail": "Session not found"})
            _, table, _ = await _call(http, "GET", "/status")
            assert set(table) == set(body["session_ids"])

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", [BUTTON, TEXT, "desktop/data_entry"])
def test_task_played_over_http_pays_in_full(method, name):
    async def run():
        async with _served() as http:
            session = await _create(http, name, seed=3, variant="popup=1")
            local, rng = open_session(TaskSpec(name, 3, "popup=1")), np.random.default_rng(0)
            path = f"/session/{session['id']}"
            while not local.progress()["done"]:
                action = scripted_action(local, rng)
                local.act(action)
                fields = {**action_fields(action), "delay": 0}
                options = {"params": fields} if method == "GET" else {"json": fields}
                status, shot, _ = await _call(http, method, f"{path}/act", **options)
                assert status == 200
                np.testing.assert_array_equal(_image(shot), np.asarray(local.screenshot()))
            _, progress, _ = await _call(http, "GET", f"{path}/progress")
            assert progress == local.progress() and progress["reward"] == 1.0

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_act_with_a_repeated_request_id_is_answered_and_not_applied_again(method):
    async def run():
        async with _served() as http:
            session = await _create(http, TEXT, seed=1)
            x0, y0, x1, y1 = open_session(TaskSpec(TEXT, 1)).targets["field"]
            path = f"/session/{session['id']}"

            async def act(**fields):
                options = {"params": fields} if method == "GET" else {"json": fields}
                return await _call(http, method, f"{path}/act", **options)

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
            _, info, _ = await _call(http, "GET", path)
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
        async with _served() as http:
            path = f"/session/{(await _create(http, seed=1))['id']}"
            calls = [
                ("GET", "/screenshot", {"params": {"format": image_format}}),
                ("POST", "/act", {"json": {"action_type": "screenshot", "format": image_format}}),
            ]
            for method, call, options in calls:
                _, body, kind = await _call(http, method, path + call, **options)
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
        async with _served(limits=limits) as http:
            path = f"/session/{(await _create(http))['id']}/act"
            monkeypatch.setattr(OpenSession, "pause", counted_pause)
            for fields, expected_s in [
                ({"action_type": "mouse_move", "x": 1, "y": 1}, [1.0]),  # the dialect's default
                ({"action_type": "mouse_move", "x": 1, "y": 1, "delay": 0.25}, [0.25]),
                ({"action_type": "wait", "seconds": 0.5, "delay": 1}, [1.5]),
                ({"action_type": "wait", "seconds": 60, "delay": 0}, [3.0]),
                ({"action_type": "screenshot"}, []),
            ]:
                slept_s.clear()
                status, _, _ = await _call(http, "POST", path, json=fields)
                assert status == 200
                assert slept_s == expected_s

    asyncio.run(run())


CLICK = {"action_type": "left_click", "x": 1, "y": 1, "delay": 0}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "action_type is ''"),
        ({"action_type": "click", "x": 1, "y": 1}, "known: screenshot, left_click"),
        ({"action_type": "screenshot", "x": 1, "text": "a"}, "a screenshot takes no x, text"),
        ({"action_type": "terminate", "text": "success"}, "action_type is 'terminate'"),
        ({"action_type": "left_click"}, "lacks an argument"),
        ({**CLICK, "x": 224}, "off the screen"),
        ({**CLICK, "y": -1}, "off the screen"),
        ({**CLICK, "x": 1.5}, "x is a float"),
        ({**CLICK, "x": True}, "x is a bool"),
        ({**CLICK, "x": "1"}, "x is a str"),
        ({**CLICK, "x": 10**30}, "31 digits"),
        ({**CLICK, "delay": 11}, "delay is 11 s"),
        ({**CLICK, "delay": -1}, "delay is -1 s"),
        ({**CLICK, "format": "gif"}, "format is 'gif'"),
        ({**CLICK, "request_id": "../x"}, "request_id"),
        ({**CLICK, "colour": 1}, "unknown field 'colour'"),
        ({"action_type": "type", "text": "x" * 5000}, "5000 characters"),
        ({"action_type": "keys", "keys": "ctrl+nothing"}, "is no key"),
    ],
)
def test_act_with_wrong_fields_is_422_with_the_reason_and_changes_nothing(fields, word):
    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http))['id']}"
            status, body, _ = await _call(http, "POST", f"{path}/act", json=fields)
            assert status == 422 and word in body["detail"]
            _, info, _ = await _call(http, "GET", path)
            assert info["action_count"] == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[1]", 422),
        (b"[" * 60_000, 422),
        (b'{"action_type":"screenshot","delay":NaN}', 422),
        (b'{"action_type":"screenshot","delay":1e999}', 422),
        (b'{"action_type":"screenshot","action_type":"type"}', 422),
        (b'{"action_type":"type","text":"\\ud800"}', 422),
        (b"\xff\xfe", 422),
        (b" " * 70_000 + b'{"action_type":"screenshot"}', 413),
    ],
)
def test_act_with_a_hostile_body_is_refused(body, status):
    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http))['id']}/act"
            got, answer, _ = await _call(http, "POST", path, data=body)
            assert got == status and answer["detail"]
            assert (await _call(http, "GET", "/"))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip", "x"])
def test_compressed_body_is_415_and_the_connection_ends(coding):
    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http))['id']}/act"
            for body in (b"hello", gzip.compress(bytes(40_000_000)), b"x" * 100_000):
                headers = {"Content-Encoding": coding}
                try:
                    got = await _call(http, "POST", path, data=body, headers=headers)
                    assert got[0] in (400, 415) and (coding == "br" or got[0] == 415)
                except aiohttp.ClientConnectionError:
                    pass  # it closed while the rest was still being sent
                assert (await _call(http, "GET", "/"))[0] == 200

    asyncio.run(run())


def test_body_that_does_not_come_is_408(monkeypatch):
    monkeypatch.setattr(calls, "_BODY_S", 0.2)

    async def run():
        async with serve() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            session = await _create(http)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /session/{session['id']}/act HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Length: 50\r\n\r\n{".encode()
            )
            async with asyncio.timeout(5.0):
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    asyncio.run(run())


def test_caller_that_leaves_in_the_middle_of_its_body_is_no_error(caplog):
    async def run():
        async with serve() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            session = await _create(http)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /session/{session['id']}/act HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Length: 50\r\n\r\n{".encode()
            )
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.sleep(0.05)
            assert (await _call(http, "GET", "/"))[0] == 200

    asyncio.run(run())
    assert "event=error" not in caplog.text


def test_longest_text_may_come_by_get_too():
    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http, TEXT))['id']}/act"
            fields = {"action_type": "type", "text": "\U0001f600" * 4096, "delay": 0}
            assert (await _call(http, "GET", path, params=fields))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("text", ["%ff", "%ed%a0%80", "%c3"])
def test_query_that_is_no_text_is_422(text):
    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http, TEXT))['id']}/act"
            url = yarl.URL(f"{path}?action_type=type&text={text}", encoded=True)
            status, body, _ = await _call(http, "GET", url)
            assert (status, body) == (422, {"detail": "the query is not UTF-8"})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"type": "desktop/click_buton"}, "did you mean 'desktop/click_button'"),
        ({}, "unknown task ''"),
        ({"type": BUTTON, "variant": "button=3"}, "did you mean 'buttons'"),
        ({"type": BUTTON, "n": "0"}, "n is 0"),
        ({"type": BUTTON, "n": "many"}, "whole number"),
        ({"type": BUTTON, "seed": "1e3"}, "whole number"),
        ({"type": BUTTON, "sede": "1"}, "unknown parameter 'sede'"),
        ([("type", BUTTON), ("type", TEXT)], "given twice"),
    ],
)
def test_session_with_wrong_parameters_is_422_with_the_reason(query, word):
    async def run():
        async with _served() as http:
            status, body, _ = await _call(http, "POST", "/session", params=query)
            assert status == 422 and word in body["detail"]
            assert (await _call(http, "GET", "/status"))[1] == {}

    asyncio.run(run())


def test_sessions_beyond_the_limit_are_refused_until_one_is_deleted():
    async def run():
        async with _served(limits=ServerLimits(max_sessions=2)) as http:
            first = await _create(http)
            await _create(http)
            status, body, _ = await _call(http, "POST", "/session", params={"type": BUTTON})
            assert status == 429 and "2 of at most 2" in body["detail"]
            await _call(http, "DELETE", f"/session/{first['id']}")
            await _create(http)

    asyncio.run(run())


def test_deletion_ends_the_delay_and_refuses_the_calls_that_wait(monkeypatch):
    """What a session held is another's from then on: a browser's page goes to the next one."""
    acts, closed = [], []
    monkeypatch.setattr(DesktopTask, "act", _noting(acts))
    monkeypatch.setattr(DesktopTask, "close", _noting(closed))

    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http))['id']}"
            slow = {"action_type": "mouse_move", "x": 1, "y": 1, "delay": 9}
            waiting = [
                asyncio.create_task(_call(http, method, path + call, **options))
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
                assert (await _call(http, "DELETE", path))[0] == 200
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
        async with _served(limits=ServerLimits(idle_time_s=0.6)) as http:
            idle, used = await _create(http), await _create(http)
            for _ in range(200):
                status, _, _ = await _call(http, "GET", f"/session/{used['id']}/progress")
                assert status == 200
                _, table, _ = await _call(http, "GET", "/status")
                if table[idle["id"]]["stop_time"] is not None:
                    break
                await asyncio.sleep(0.05)
            assert (await _call(http, "GET", f"/session/{idle['id']}/progress"))[0] == 404

    asyncio.run(run())


def test_ended_sessions_are_remembered_only_so_far(monkeypatch):
    monkeypatch.setattr(sessions_module, "_ENDED_KEPT", 3)

    async def run():
        async with _served() as http:
            for _ in range(5):
                await _call(http, "DELETE", f"/session/{(await _create(http))['id']}")
            assert len((await _call(http, "GET", "/status"))[1]) == 3

    asyncio.run(run())


@pytest.mark.parametrize("session_id", ["..%2fx", "%00", "a" * 10_000, "unknown", "%0d%0aX"])
def test_unknown_session_ids_are_never_found(session_id):
    async def run():
        async with _served() as http:
            status, _, _ = await _call(http, "GET", f"/session/{session_id}/screenshot")
            assert status in (400, 404)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "localhost:99999999"}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 200),
    ],
)
def test_other_hosts_and_browsers_are_refused(headers, status):
    async def run():
        async with _served() as http:
            got, _, _ = await _call(http, "GET", "/", headers=headers)
            assert got == status

    asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer \u00e9", 401),
        (f"Bearer {TOKEN}", 200),
    ],
)
def test_token_is_required_where_one_is_configured(header, status):
    async def run():
        async with _served(token=TOKEN) as http:
            headers = {} if header is None else {"Authorization": header}
            for method, path in [("GET", "/"), ("POST", f"/session?type={BUTTON}")]:
                got, _, _ = await _call(http, method, path, headers=headers)
                assert got == status

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "word"),
    [({"host": "0.0.0.0"}, "needs a token"), ({"token": "short"}, "at least 32 bytes")],
)
def test_serving_without_a_good_token_is_refused(options, word):
    async def run():
        async with serve(**options):
            pass

    with pytest.raises(ConfigError, match=word):
        asyncio.run(run())


def test_defect_in_a_handler_is_500_without_a_traceback(monkeypatch, caplog):
    def broken(image, image_format):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(session_types, "encode_image", broken)

    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http))['id']}/screenshot"
            got = await _call(http, "GET", path)
            assert got[:2] == (500, {"detail": "Internal Server Error"})
            assert (await _call(http, "GET", "/"))[0] == 200

    asyncio.run(run())
    assert "secret detail" in caplog.text  # the operator is told


def test_typed_text_is_never_logged(caplog):
    caplog.set_level(logging.DEBUG)

    async def run():
        async with _served() as http:
            path = f"/session/{(await _create(http, TEXT))['id']}/act"
            fields = {"action_type": "type", "text": "hunter2", "delay": 0}
            await _call(http, "POST", path, json=fields)
            await _call(http, "GET", path, params=fields)

    asyncio.run(run())
    ours = [record for record in caplog.records if record.name.startswith(("uirl_jax", "aiohttp"))]
    assert any("kind=type" in record.getMessage() for record in ours)
    assert not any("hunter2" in record.getMessage() for record in ours)


def _start(tmp_path, *arguments):
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "uirl_jax.verifiers.server", "--port-file", str(port_file)]
    process = subprocess.Popen([*command, *arguments], cwd=REPO, stderr=subprocess.PIPE, text=True)
    return process, port_file


def _wait_for(condition, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)


def test_process_writes_its_port_serves_and_ends_on_sigterm(tmp_path):
    process, port_file = _start(tmp_path)
    with process:
        _wait_for(port_file.exists)
        port = int(port_file.read_text())

        async def run():
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                assert (await _call(http, "GET", "/"))[0] == 200

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
        with process:
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
    with parent:
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
