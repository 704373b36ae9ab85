"""What the bundled server refuses, and how it says so: fields, bodies, queries, hosts, tokens."""

import asyncio
import gzip

import aiohttp
import pytest
import yarl

from tests.served import BUTTON, TEXT, ask, create, served
from uirl_jax.errors import ConfigError
from uirl_jax.verifiers.server import calls
from uirl_jax.verifiers.server.server import serve

TOKEN = "t" * 32
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
        ({"action_type": "keys", "keys": "ctrl+nothing"}, "is not a key"),
    ],
)
def test_act_with_wrong_fields_is_422_with_the_reason_and_changes_nothing(fields, word):
    async def run():
        async with served() as http:
            path = f"/session/{(await create(http))['id']}"
            status, body, _ = await ask(http, "POST", f"{path}/act", json=fields)
            assert status == 422 and word in body["detail"]
            _, info, _ = await ask(http, "GET", path)
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
        async with served() as http:
            path = f"/session/{(await create(http))['id']}/act"
            got, answer, _ = await ask(http, "POST", path, data=body)
            assert got == status and answer["detail"]
            assert (await ask(http, "GET", "/"))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip", "x"])
def test_compressed_body_is_415_and_the_connection_ends(coding):
    async def run():
        async with served() as http:
            path = f"/session/{(await create(http))['id']}/act"
            for body in (b"hello", gzip.compress(bytes(40_000_000)), b"x" * 100_000):
                headers = {"Content-Encoding": coding}
                try:
                    got = await ask(http, "POST", path, data=body, headers=headers)
                    assert got[0] in (400, 415) and (coding == "br" or got[0] == 415)
                except aiohttp.ClientConnectionError:
                    pass  # it closed while the rest was still being sent
                assert (await ask(http, "GET", "/"))[0] == 200

    asyncio.run(run())


async def begin_an_act(port: int, session: dict) -> tuple:
    """A connection that sent one byte of a body of 50."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /session/{session['id']}/act HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Length: 50\r\n\r\n{".encode()
    )
    await writer.drain()
    return reader, writer


def test_body_that_does_not_come_is_408(monkeypatch):
    monkeypatch.setattr(calls, "_BODY_S", 0.2)

    async def run():
        async with serve() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            session = await create(http)
            reader, writer = await begin_an_act(port, session)
            async with asyncio.timeout(5.0):
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    asyncio.run(run())


def test_caller_that_leaves_in_the_middle_of_its_body_is_no_error(caplog):
    async def run():
        async with serve() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            session = await create(http)
            _, writer = await begin_an_act(port, session)
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.sleep(0.05)
            assert (await ask(http, "GET", "/"))[0] == 200

    asyncio.run(run())
    assert "event=error" not in caplog.text


def test_longest_text_may_come_by_get_too():
    async def run():
        async with served() as http:
            path = f"/session/{(await create(http, TEXT))['id']}/act"
            fields = {"action_type": "type", "text": "\U0001f600" * 4096, "delay": 0}
            assert (await ask(http, "GET", path, params=fields))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("text", ["%ff", "%ed%a0%80", "%c3"])
def test_query_that_is_no_text_is_422(text):
    async def run():
        async with served() as http:
            path = f"/session/{(await create(http, TEXT))['id']}/act"
            url = yarl.URL(f"{path}?action_type=type&text={text}", encoded=True)
            status, body, _ = await ask(http, "GET", url)
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
        async with served() as http:
            status, body, _ = await ask(http, "POST", "/session", params=query)
            assert status == 422 and word in body["detail"]
            assert (await ask(http, "GET", "/status"))[1] == {}

    asyncio.run(run())


@pytest.mark.parametrize("session_id", ["..%2fx", "%00", "a" * 10_000, "unknown", "%0d%0aX"])
def test_unknown_session_ids_are_never_found(session_id):
    async def run():
        async with served() as http:
            status, _, _ = await ask(http, "GET", f"/session/{session_id}/screenshot")
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
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({}, 200),
    ],
)
def test_other_hosts_and_browsers_are_refused(headers, status):
    async def run():
        async with served() as http:
            got, _, _ = await ask(http, "GET", "/", headers=headers)
            assert got == status

    asyncio.run(run())


def test_name_of_a_host_is_the_same_in_capital_letters():
    async def run():
        async with served(allowed_hosts=["GPU-Box"]) as http:
            for name in ("gpu-box:8000", "GPU-Box"):
                assert (await ask(http, "GET", "/", headers={"Host": name}))[0] == 200

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
        async with served(token=TOKEN) as http:
            headers = {} if header is None else {"Authorization": header}
            for method, path in [("GET", "/"), ("POST", f"/session?type={BUTTON}")]:
                got, _, _ = await ask(http, method, path, headers=headers)
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
