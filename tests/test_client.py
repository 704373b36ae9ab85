"""The verifier's client: against the bundled server, and against one that means it harm."""

import asyncio
import contextlib
import dataclasses
import gzip
import io
import json
import socket
import time
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from tests.hostile_server import (
    PNG,
    SESSION,
    SMALL,
    Hostile,
    client_of,
    drip,
    encoded,
    endless,
    http_answer,
    json_answer,
    redirect,
    reset,
    silence,
    slow_headers,
)
from uirl_jax.errors import RequestRefusedError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers.client.client import ClientLimits, VerifierClient
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.session_types import DesktopTask
from uirl_jax.verifiers.tasks.desktop import open_session, scripted_action

TASK = TaskSpec("desktop/click_button", 1)
CLICK = Action("click", x=1, y=1)
HASTY = dataclasses.replace(SMALL, read_timeout_s=0.4, attempt_timeout_s=0.5)


def _failure(server, call="screenshot", *arguments, limits=SMALL):
    """The VerifierError of one call after a good `create`, and the seconds that it took."""

    async def run():
        async with server, client_of(server, limits=limits) as client:
            await client.create(TASK)
            start_s = time.monotonic()
            with pytest.raises(VerifierError) as caught:
                await getattr(client, call)("s1", *arguments)
            return str(caught.value), time.monotonic() - start_s

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("image_format", "with_request_id"), [("png", True), ("png", False), ("jpeg", True)]
)
def test_client_plays_every_task_to_its_reward(image_format, with_request_id):
    async def play(client, name):
        task = TaskSpec(name, 2, "popup=1")
        local, rng = open_session(task), np.random.default_rng(0)
        session = await client.create(task)
        try:
            assert session.instruction == local.instruction
            assert (session.width_px, session.height_px) == (local.width_px, local.height_px)
            await client.screenshot(session.id)
            turn = 0
            while not local.progress()["done"]:
                action = scripted_action(local, rng)
                local.act(action)
                request_id = f"r{turn}" if with_request_id else None
                data = await client.act(session.id, action, request_id)
                image = Image.open(io.BytesIO(data))
                assert image.format == image_format.upper()
                if image_format == "png":
                    np.testing.assert_array_equal(np.asarray(image), local.screenshot())
                turn += 1
            progress = await client.progress(session.id)
            assert progress == local.progress() and progress["reward"] == 1.0
        finally:
            await client.delete(session.id)
        await client.delete(session.id)  # one that is gone is fine

    async def run():
        async with (
            serve() as port,
            VerifierClient(f"http://127.0.0.1:{port}", image_format=image_format) as client,
        ):
            names = ["click_button", "enter_text", "data_entry"]
            await asyncio.gather(*(play(client, f"desktop/{name}") for name in names))
            sessions = await client.transport.json("GET", ("status",), again_if="refused")
            assert len(sessions) == 3
            assert all(info["stop_time"] is not None for info in sessions.values())

    asyncio.run(run())


def test_client_sends_a_token_and_says_so_when_it_is_refused():
    async def run():
        async with serve(token="t" * 32) as port:
            url = f"http://127.0.0.1:{port}"
            async with VerifierClient(url, token="t" * 32) as client:
                await client.create(TASK)
            async with VerifierClient(url, token="wrong") as client:
                with pytest.raises(VerifierError, match=r"HTTP 401 \(the bearer token"):
                    await client.create(TASK)

    asyncio.run(run())


def test_client_passes_on_the_servers_reason_for_a_refusal():
    async def run():
        async with serve() as port, VerifierClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(VerifierError, match=r"HTTP 422 .*did you mean 'desktop/click_but"):
                await client.create(TaskSpec("desktop/click_buton", 0))

    asyncio.run(run())


def test_client_request_carries_its_guards(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def run():
        server = Hostile(http_answer(PNG, headers="Set-Cookie: a=b\r\n"))
        async with server, client_of(server, delay_s=0.25) as client:
            await client.create(TASK)
            assert await client.act("s1", Action("keys", keys="ctrl+c"), "r1") == PNG
            assert await client.act("s1", Action("keys", keys="ctrl+c")) == PNG
        (method, path, headers, body), (get_method, get_path, get_headers, _) = server.requests
        assert (method, path) == ("POST", "/session/s1/act")
        assert json.loads(body) == {
            "action_type": "keys",
            "keys": "ctrl+c",
            "delay": 0.25,
            "format": "png",
            "request_id": "r1",
        }
        assert headers["accept-encoding"] == "identity"
        assert get_method == "GET" and "keys=ctrl%2Bc" in get_path and "delay=0.25" in get_path
        assert "cookie" not in get_headers

    asyncio.run(run())


BOMB = gzip.compress(bytes(64 * 2**20))


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (
            http_answer(BOMB, headers="Content-Encoding: gzip\r\n"),
            "'gzip', which was not asked for",
        ),
        (http_answer(BOMB, headers="Content-Encoding: br, gzip\r\n"), "which was not asked for"),
        (http_answer(BOMB), "not a readable PNG"),
        (redirect("http://169.254.169.254/"), "HTTP 302"),
        (redirect("file:///etc/passwd"), "HTTP 302"),
        (redirect("/session/s1/screenshot"), "HTTP 302"),
        (endless, "longer than 1000000 bytes"),
        (http_answer(b"<html>hello</html>", "text/html"), "of type 'text/html'"),
        (http_answer(PNG, "application/octet-stream"), "expected image/jpeg or image/png"),
        (http_answer(b'{"reward": 1}'), "not a readable PNG"),
        (http_answer(b""), "not a readable PNG"),
        (http_answer(PNG[: len(PNG) // 2]), "not a readable PNG"),
        (http_answer(encoded((224, 169))), "224x169 pixels, the session announced 224x168"),
        (http_answer(encoded((168, 224))), "168x224 pixels"),
        (http_answer(encoded((5000, 5000))), "5000x5000 pixels"),
        (http_answer(encoded(image_format="GIF")), "not a readable PNG"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 999999999\r\n\r\nx",
            "999999999 bytes, cap 1000000",
        ),
        (json_answer({"detail": "no\x1b[31m"}, status="404 Not Found"), "HTTP 404 (no?[31m)"),
        (http_answer(b"x" * 99_999, "text/html", status="403 Forbidden"), "HTTP 403"),
        (http_answer(b"", status="410 Gone"), "HTTP 410"),
    ],
)
def test_screenshot_that_is_wrong_is_refused_at_once_and_in_little_memory(answer, word):
    server = Hostile(answer)
    tracemalloc.start()
    try:
        message, took_s = _failure(server)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert word in message and "s1" in message and f"127.0.0.1:{server.port}" in message
    assert "\n" not in message and message.isprintable()
    assert len(server.requests) == 1  # not asked again: it is wrong, not late
    assert took_s < 10 and peak_bytes < 30e6


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (drip, "no complete answer within 0.5 s"),
        (slow_headers, "no complete answer within 0.5 s"),
        (silence, "no complete answer within 0.5 s"),
        (reset, "Client"),
        (http_answer(PNG)[:-50], "ClientPayloadError"),
        (b"", "ServerDisconnectedError"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", "ClientResponseError"),
        (http_answer(PNG, headers=f"X-A: {'a' * 100_000}\r\n"), "ClientResponseError"),
        (http_answer(PNG, headers="Content-Length: 7\r\n"), "ClientResponseError"),
        (http_answer(b"", status="500 Internal Server Error"), "HTTP 500"),
        (http_answer(b"", status="503 Unavailable", headers="Retry-After: soon\r\n"), "HTTP 503"),
        (
            http_answer(b"", status="429 Slow Down", headers="Retry-After: 1000000000\r\n"),
            "HTTP 429",
        ),
    ],
)
def test_screenshot_that_fails_is_asked_for_three_times_within_its_time(answer, word):
    server = Hostile(answer)
    limits = HASTY if answer in (drip, slow_headers, silence) else SMALL
    message, took_s = _failure(server, limits=limits)
    assert word in message and "(3 attempts)" in message
    # Whatever answers with a status is running.
    assert message.endswith("; is the verifier running there?") != word.startswith("HTTP")
    assert len(server.requests) == 3
    assert took_s < 10


def test_redirect_is_not_followed():
    async def run():
        victim = Hostile(http_answer(PNG))
        async with victim:
            server = Hostile(redirect(f"http://127.0.0.1:{victim.port}/session/s1/screenshot"))
            async with server, client_of(server) as client:
                await client.create(TASK)
                with pytest.raises(VerifierError, match="HTTP 302"):
                    await client.screenshot("s1")
        assert victim.requests == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"done": true, "reward": NaN}', "holds NaN"),
        (b'{"done": true, "reward": -Infinity}', "holds -Infinity"),
        (b'{"done": true, "reward": 1e999}', "infinite"),
        (b'{"done": true, "reward": true}', "reward is a bool"),
        (b'{"done": true, "reward": "1"}', "reward is a str"),
        (b'{"done": true, "reward": [1]}', "reward is a list"),
        (b'{"done": 1, "reward": 1}', "done is not a boolean"),
        (b'{"done": null}', "done is not a boolean"),
        (b'{"reward": 0, "reward": 1}', "'reward' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": ' + b"[" * 20 + b"]" * 20 + b"}", "deeper than 16"),
        (b'{"a": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "deeper than 16"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": "' + b"x" * 100_000 + b'"}', "cap 100000"),
        (b'"done"', "expected an object"),
        (b"[]", "expected an object"),
        (b"", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"<html>", "is not JSON"),
    ],
)
def test_progress_that_is_wrong_is_refused(body, word):
    server = Hostile(json_answer(body))
    message, _ = _failure(server, "progress")
    assert word in message and "progress" in message and len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"done": True, "reward": 1}, {"done": True, "reward": 1.0}),
        ({"done": False, "reward": None}, {"done": False, "reward": None}),
        (
            {"submitted_row_indices": [0, 0], "num_incorrect_submissions": 2},  # of dialect G2b
            {"submitted_row_indices": [0, 0], "num_incorrect_submissions": 2},
        ),
    ],
)
def test_progress_comes_back_as_it_is(body, expected):
    async def run():
        server = Hostile(json_answer(body))
        async with server, client_of(server) as client:
            await client.create(TASK)
            progress = await client.progress("s1")
            assert progress == expected
            assert not isinstance(progress.get("reward"), int)

    asyncio.run(run())


def test_a_key_that_is_there_twice_is_found_in_one_pass():
    """With a pass for each key this takes longer than anybody waits."""
    text = ",".join(f'"{number}":0' for number in [*range(200_000), 199_999])
    with pytest.raises(ValueError, match="holds the key '199999' twice"):
        untrusted_json.parse(f"{{{text}}}".encode())


SHAKY = (http_answer(b"", status="500 Internal Server Error"), reset, http_answer(PNG))


def test_act_with_a_request_id_is_sent_again_with_the_same_id():
    async def run():
        server = Hostile(*SHAKY)
        async with server, client_of(server) as client:
            await client.create(TASK)
            assert await client.act("s1", CLICK, "r7") == PNG
        assert [request[0] for request in server.requests] == ["POST"] * 3
        assert {json.loads(request[3])["request_id"] for request in server.requests} == {"r7"}

    asyncio.run(run())


@pytest.mark.parametrize("first", [SHAKY[0], reset, silence, b""])
def test_act_without_a_request_id_is_never_sent_again(first):
    server = Hostile(first, http_answer(PNG))
    message, _ = _failure(server, "act", CLICK, limits=HASTY)
    assert "attempts" not in message and len(server.requests) == 1


@pytest.mark.parametrize("answer", [SHAKY[0], reset, silence, b""])
def test_create_is_not_sent_again_once_the_server_may_have_seen_it(answer):
    async def run():
        server = Hostile(answer, create=...)
        limits = dataclasses.replace(HASTY, create_timeout_s=0.6)
        async with server, client_of(server, limits=limits) as client:
            with pytest.raises(VerifierError):
                await client.create(TASK)
        assert len(server.requests) == 1

    asyncio.run(run())


def test_create_waits_for_a_server_that_is_just_starting():
    async def run():
        async with serve() as port:
            pass  # a port that is free, most likely for the next second too
        limits = ClientLimits(attempts=6, backoff_s=0.1)
        async with VerifierClient(f"http://127.0.0.1:{port}", limits=limits) as client:
            creation = asyncio.create_task(client.create(TASK))
            await asyncio.sleep(0.2)
            async with serve(port=port):
                assert (await creation).instruction.startswith("Click the")

    asyncio.run(run())


def test_reason_of_a_server_that_cannot_serve_now_is_told():
    async def run():
        answer = json_answer({"detail": "no Chromium\nhere"}, status="503 Unavailable")
        server = Hostile(b"", create=answer)
        async with server, client_of(server) as client:
            with pytest.raises(VerifierError) as caught:
                await client.create(TASK)
        url = f"http://127.0.0.1:{server.port}/session"
        assert str(caught.value) == f"POST {url}: HTTP 503 (no Chromium?here)"

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"attempt_timeout_s": 180.0}, {"create_timeout_s": 4.0}])
def test_create_may_be_given_less_time_than_an_attempt(limits):
    async def opens_late(writer):
        await asyncio.sleep(0.05)
        writer.write(json_answer({"sessions": [SESSION]}))
        await writer.drain()

    async def run():
        server = Hostile(b"", create=opens_late)
        limited = dataclasses.replace(SMALL, **limits)
        async with server, client_of(server, limits=limited) as client:
            assert (await client.create(TASK)).id == "s1"

    asyncio.run(run())


def test_host_that_does_not_answer_was_sent_nothing_and_is_asked_again():
    async def run(listener, waiting):
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for one in waiting:  # until its queue is full, and the system drops what else comes
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        limits = dataclasses.replace(SMALL, connect_timeout_s=0.2)
        async with VerifierClient(url, limits=limits) as client:
            with pytest.raises(RequestRefusedError, match=r"no connection within 0\.2 s \(3 att"):
                await client.create(TASK)

    with contextlib.ExitStack() as stack:
        listener, *waiting = (stack.enter_context(socket.socket()) for _ in range(4))
        asyncio.run(run(listener, waiting))


def test_unreachable_verifier_is_named_with_what_to_do():
    async def run():
        async with serve() as port:
            pass
        async with VerifierClient(f"http://127.0.0.1:{port}", limits=SMALL) as client:
            with pytest.raises(VerifierError) as caught:
                await client.create(TASK)
        assert str(caught.value) == (
            f"POST http://127.0.0.1:{port}/session: cannot connect (3 attempts); "
            "is the verifier running there?"
        )

    asyncio.run(run())


def test_time_out_exceeds_the_delay_that_was_asked_for():
    async def run():
        limits = ClientLimits(read_timeout_s=0.4, attempt_timeout_s=0.5, attempts=1)
        async with (
            serve() as port,
            VerifierClient(f"http://127.0.0.1:{port}", limits=limits, delay_s=0.4) as client,
        ):
            session = await client.create(TASK)
            start_s = time.monotonic()
            await client.act(session.id, Action("wait", seconds=0.4), "r1")
            assert time.monotonic() - start_s >= 0.8

    asyncio.run(run())


def test_time_out_exceeds_what_typing_takes(monkeypatch):
    """The server is slow for a text as if every key were pressed on a busy machine."""
    act = DesktopTask.act

    async def slow(self, action):
        await asyncio.sleep(1.0)
        await act(self, action)

    monkeypatch.setattr(DesktopTask, "act", slow)

    async def run():
        limits = ClientLimits(read_timeout_s=0.4, attempt_timeout_s=0.5, attempts=1)
        async with (
            serve() as port,
            VerifierClient(f"http://127.0.0.1:{port}", limits=limits, delay_s=0.0) as client,
        ):
            session = await client.create(TASK)
            await client.act(session.id, Action("type", text="x" * 400), "r1")

    asyncio.run(run())


def test_calls_on_sessions_and_ids_that_are_not_ours_never_leave():
    async def run():
        server = Hostile(http_answer(PNG))
        async with server, client_of(server) as client:
            with pytest.raises(VerifierError, match="was not opened here"):
                await client.screenshot("s1")
            await client.create(TASK)
            for session_id in ("../x", "", "s1/../s2", "a" * 65, "s1\n"):
                for call in (client.screenshot, client.progress, client.delete):
                    with pytest.raises(VerifierError, match="expected 1-64 letters"):
                        await call(session_id)
            with pytest.raises(VerifierError, match="request_id"):
                await client.act("s1", CLICK, "a b")
            with pytest.raises(VerifierError, match="'terminate' cannot be sent"):
                await client.act("s1", Action("terminate", text="success"), "r1")
        assert server.requests == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "base_url",
    [
        *("", "127.0.0.1:8000", "ftp://127.0.0.1", "file:///etc/passwd", "http://"),
        *("http://user:secret@127.0.0.1", "http://127.0.0.1/?a=b", "http://127.0.0.1:99999"),
        "http://127.0.0.1:port",
    ],
)
def test_base_url_that_is_none_is_refused_without_showing_a_password(base_url):
    with pytest.raises(VerifierError, match="verifier address") as caught:
        VerifierClient(base_url)
    assert "secret" not in str(caught.value)


def test_client_outside_its_context_says_so():
    async def run():
        with pytest.raises(VerifierError, match="the client is not open"):
            await VerifierClient("http://127.0.0.1:1").progress("s1")

    asyncio.run(run())
