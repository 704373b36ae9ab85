"""The verifier's client: against the bundled server, and against one that means it harm."""

import asyncio
import contextlib
import dataclasses
import gzip
import io
import json
import time
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from uirl_jax.errors import InvalidRequestError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers.client.client import ClientLimits, VerifierClient
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.tasks.desktop import open_session, scripted_action

TASK = TaskSpec("desktop/click_button", 1)
CLICK = Action("click", x=1, y=1)
# Small caps and short pauses; its time-outs are the patient ones, for a machine that is busy.
SMALL = ClientLimits(
    backoff_s=0.01, max_retry_after_s=0.2, max_image_bytes=1_000_000, max_json_bytes=100_000
)
HASTY = dataclasses.replace(SMALL, read_timeout_s=0.4, attempt_timeout_s=0.5)


def _encoded(size=(224, 168), image_format="PNG", **options):
    buffer = io.BytesIO()
    Image.new("RGB", size, (9, 99, 199)).save(buffer, image_format, **options)
    return buffer.getvalue()


def _answer(body, content_type="image/png", status="200 OK", headers=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}Connection: close\r\n\r\n".encode() + body


def _json_answer(value, **options):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return _answer(body, "application/json", **options)


SESSION = {"id": "s1", "instruction": "Click.", "screen_width": 224, "screen_height": 168}
PNG = _encoded()


class Hostile:
    """A server that writes raw bytes: a good session, then whatever `answers` says, in turn.

    An answer is bytes, or a coroutine function of the writer. The last one is repeated.
    """

    def __init__(self, *answers, create=None):
        self.answers = list(answers)
        self.create = _json_answer({"sessions": [SESSION]}) if create is None else create
        self.requests = []  # (method, path, headers, body) but for the first good POST /session
        self.port = 0
        self._running = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await self._server.wait_closed()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._running.add(asyncio.current_task())
        try:
            await self._respond(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._running.discard(asyncio.current_task())

    async def _respond(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request, *lines = head.strip().split("\r\n")
            method, path, _ = request.split(" ")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if path.startswith("/session?") and self.create is not Ellipsis:
                answer = self.create
            else:
                self.requests.append((method, path, headers, body))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)


async def _endless(writer):
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    while True:
        writer.write(chunk)
        await writer.drain()


async def _drip(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 9999\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _slow_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-A: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _silence(writer):
    await asyncio.sleep(3)


async def _reset(writer):
    writer.write(_answer(PNG)[:-50])
    await writer.drain()
    writer.transport.abort()


def _redirect(location):
    return _answer(b"", status="302 Found", headers=f"Location: {location}\r\n")


def _client(server, **options):
    return VerifierClient(f"http://127.0.0.1:{server.port}", **{"limits": SMALL, **options})


def _failure(server, call="screenshot", *arguments, limits=SMALL):
    """The VerifierError of one call after a good `create`, and the seconds that it took."""

    async def run():
        async with server, _client(server, limits=limits) as client:
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
            sessions = await client.transport.json("GET", ("status",), again_if="never")
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
        server = Hostile(_answer(PNG, headers="Set-Cookie: a=b\r\n"))
        async with server, _client(server, delay_s=0.25) as client:
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
        (_answer(BOMB, headers="Content-Encoding: gzip\r\n"), "'gzip', which was not asked for"),
        (_answer(BOMB, headers="Content-Encoding: br, gzip\r\n"), "which was not asked for"),
        (_answer(BOMB), "not a readable PNG"),
        (_redirect("http://169.254.169.254/"), "HTTP 302"),
        (_redirect("file:///etc/passwd"), "HTTP 302"),
        (_redirect("/session/s1/screenshot"), "HTTP 302"),
        (_endless, "longer than 1000000 bytes"),
        (_answer(b"<html>hello</html>", "text/html"), "of type 'text/html'"),
        (_answer(PNG, "application/octet-stream"), "expected image/jpeg or image/png"),
        (_answer(b'{"reward": 1}'), "not a readable PNG"),
        (_answer(b""), "not a readable PNG"),
        (_answer(PNG[: len(PNG) // 2]), "not a readable PNG"),
        (_answer(_encoded((224, 169))), "224x169 pixels, the session announced 224x168"),
        (_answer(_encoded((168, 224))), "168x224 pixels"),
        (_answer(_encoded((5000, 5000))), "5000x5000 pixels"),
        (_answer(_encoded(image_format="GIF")), "not a readable PNG"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 999999999\r\n\r\nx",
            "999999999 bytes, cap 1000000",
        ),
        (_json_answer({"detail": "no\x1b[31m"}, status="404 Not Found"), "HTTP 404 (no?[31m)"),
        (_answer(b"x" * 99_999, "text/html", status="403 Forbidden"), "HTTP 403"),
        (_answer(b"", status="410 Gone"), "HTTP 410"),
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
        (_drip, "no complete answer within 0.5 s"),
        (_slow_headers, "no complete answer within 0.5 s"),
        (_silence, "no complete answer within 0.5 s"),
        (_reset, "Client"),
        (_answer(PNG)[:-50], "ClientPayloadError"),
        (b"", "ServerDisconnectedError"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", "ClientResponseError"),
        (_answer(PNG, headers=f"X-A: {'a' * 100_000}\r\n"), "ClientResponseError"),
        (_answer(PNG, headers="Content-Length: 7\r\n"), "ClientResponseError"),
        (_answer(b"", status="500 Internal Server Error"), "HTTP 500"),
        (_answer(b"", status="503 Unavailable", headers="Retry-After: soon\r\n"), "HTTP 503"),
        (_answer(b"", status="429 Slow Down", headers="Retry-After: 1000000000\r\n"), "HTTP 429"),
    ],
)
def test_screenshot_that_fails_is_asked_for_three_times_within_its_time(answer, word):
    server = Hostile(answer)
    limits = HASTY if answer in (_drip, _slow_headers, _silence) else SMALL
    message, took_s = _failure(server, limits=limits)
    assert word in message and "(3 attempts)" in message and "is the verifier running" in message
    assert len(server.requests) == 3
    assert took_s < 10


def test_redirect_is_not_followed():
    async def run():
        victim = Hostile(_answer(PNG))
        async with victim:
            server = Hostile(_redirect(f"http://127.0.0.1:{victim.port}/session/s1/screenshot"))
            async with server, _client(server) as client:
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
    server = Hostile(_json_answer(body))
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
        server = Hostile(_json_answer(body))
        async with server, _client(server) as client:
            await client.create(TASK)
            progress = await client.progress("s1")
            assert progress == expected
            assert not isinstance(progress.get("reward"), int)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ("Ouvrez\u00a0: 👩\u200d💻", "Ouvrez\u00a0: 👩\u200d💻"),
        ("a\u202eb \x1b[2Jc\r\nd", "ab [2Jc\nd"),
    ],
)
def test_create_takes_instructions_of_every_language_without_what_acts(told, read):
    async def run():
        server = Hostile(_answer(PNG), create=_json_answer(_created(instruction=told)))
        async with server, _client(server) as client:
            assert (await client.create(TASK)).instruction == read

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "read"), [({"renderer": "5c5d4f"}, "5c5d4f"), ({"renderer": ""}, ""), ({}, "")]
)
def test_create_takes_the_renderer_where_the_server_names_one(told, read):
    async def run():
        server = Hostile(_answer(PNG), create=_json_answer(_created(**told)))
        async with server, _client(server) as client:
            assert (await client.create(TASK)).renderer == read

    asyncio.run(run())


def _created(**changes):
    return {"sessions": [{**SESSION, **changes}]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"session_ids": [1]}, "is this a G1+ server"),
        ({"sessions": []}, "with one entry"),
        ({"sessions": [SESSION, SESSION]}, "with one entry"),
        ({"sessions": ["s1"]}, "with one entry"),
        (_created(id=1), "id is not a string"),
        *((_created(id=bad), "expected 1-64 letters") for bad in ("", "../x", "%2e%2e", "a\r\nb")),
        *((_created(id=bad), "expected 1-64 letters") for bad in ("/", "\x00", "a" * 65, "a\n")),
    ],
)
def test_create_with_a_wrong_answer_is_refused(body, word):
    async def run():
        server = Hostile(b"", create=_json_answer(body))
        async with server, _client(server) as client:
            with pytest.raises(VerifierError) as caught:
                await client.create(TASK)
            assert word in str(caught.value) and str(caught.value).isprintable()
        assert server.requests == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (_created(instruction=None), "instruction"),
        (_created(instruction=""), "instruction"),
        (_created(instruction="\u202e\x1b"), "instruction"),
        (_created(instruction="x" * 5000), "instruction"),
        (_created(screen_width=0), "not positive integers"),
        (_created(screen_width=True), "not positive integers"),
        (_created(screen_height="168"), "not positive integers"),
        (_created(screen_height=10**9), "at most 16000000 are accepted"),
        (_created(renderer=5), "renderer is not a string"),
        (_created(renderer="\x1b[2J"), "a session's renderer is"),
    ],
)
def test_create_deletes_a_session_that_is_described_wrongly(body, word):
    """Nobody else knows of it, and the server would be full of such sessions."""

    async def run():
        server = Hostile(b"", create=_json_answer(body))
        async with server, _client(server) as client:
            with pytest.raises(VerifierError) as caught:
                await client.create(TASK)
            assert word in str(caught.value) and str(caught.value).isprintable()
        assert {request[:2] for request in server.requests} == {("DELETE", "/session/s1")}

    asyncio.run(run())


@pytest.mark.parametrize(
    "changes", [{"instruction": ""}, {"instruction": "x" * 5000}, {"screen_height": 10**9}]
)
def test_create_of_a_task_that_is_never_accepted_says_so(changes):
    async def run():
        server = Hostile(b"", create=_json_answer(_created(**changes)))
        async with server, _client(server) as client:
            with pytest.raises(InvalidRequestError):
                await client.create(TASK)

    asyncio.run(run())


def test_a_key_that_is_there_twice_is_found_in_one_pass():
    """With a pass for each key this takes longer than anybody waits."""
    text = ",".join(f'"{number}":0' for number in [*range(200_000), 199_999])
    with pytest.raises(ValueError, match="holds the key '199999' twice"):
        untrusted_json.parse(f"{{{text}}}".encode())


def test_create_with_an_id_that_is_open_already_is_refused():
    async def run():
        server = Hostile(b"")
        async with server, _client(server) as client:
            await client.create(TASK)
            with pytest.raises(VerifierError, match="taken by an open session"):
                await client.create(TASK)

    asyncio.run(run())


SHAKY = (_answer(b"", status="500 Internal Server Error"), _reset, _answer(PNG))


def test_act_with_a_request_id_is_sent_again_with_the_same_id():
    async def run():
        server = Hostile(*SHAKY)
        async with server, _client(server) as client:
            await client.create(TASK)
            assert await client.act("s1", CLICK, "r7") == PNG
        assert [request[0] for request in server.requests] == ["POST"] * 3
        assert {json.loads(request[3])["request_id"] for request in server.requests} == {"r7"}

    asyncio.run(run())


@pytest.mark.parametrize("first", [SHAKY[0], _reset, _silence, b""])
def test_act_without_a_request_id_is_never_sent_again(first):
    server = Hostile(first, _answer(PNG))
    message, _ = _failure(server, "act", CLICK, limits=HASTY)
    assert "attempts" not in message and len(server.requests) == 1


@pytest.mark.parametrize("answer", [SHAKY[0], _reset, _silence, b""])
def test_create_is_not_sent_again_once_the_server_may_have_seen_it(answer):
    async def run():
        server = Hostile(answer, create=...)
        limits = dataclasses.replace(HASTY, create_timeout_s=0.6)
        async with server, _client(server, limits=limits) as client:
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


def test_calls_on_sessions_and_ids_that_are_not_ours_never_leave():
    async def run():
        server = Hostile(_answer(PNG))
        async with server, _client(server) as client:
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
