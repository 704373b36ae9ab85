"""The client's POST /session: which answers of a server that means it harm it takes."""

import asyncio

import pytest

from tests.hostile_server import PNG, SESSION, Hostile, client_of, http_answer, json_answer
from uirl_jax.errors import InvalidRequestError, VerifierError
from uirl_jax.types import TaskSpec

TASK = TaskSpec("desktop/click_button", 1)


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ("Ouvrez\u00a0: 👩\u200d💻", "Ouvrez\u00a0: 👩\u200d💻"),
        ("a\u202eb \x1b[2Jc\r\nd", "ab [2Jc\nd"),
    ],
)
def test_create_takes_instructions_of_every_language_without_what_acts(told, read):
    async def run():
        server = Hostile(http_answer(PNG), create=json_answer(_created(instruction=told)))
        async with server, client_of(server) as client:
            assert (await client.create(TASK)).instruction == read

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "read"), [({"renderer": "5c5d4f"}, "5c5d4f"), ({"renderer": ""}, ""), ({}, "")]
)
def test_create_takes_the_renderer_where_the_server_names_one(told, read):
    async def run():
        server = Hostile(http_answer(PNG), create=json_answer(_created(**told)))
        async with server, client_of(server) as client:
            assert (await client.create(TASK)).renderer == read

    asyncio.run(run())


def _created(**changes):
    return {"sessions": [{**SESSION, **changes}]}


def refused(body):
    """What `create` says of an answer, and the requests that follow it."""

    async def run():
        server = Hostile(b"", create=json_answer(body))
        async with server, client_of(server) as client:
            with pytest.raises(VerifierError) as caught:
                await client.create(TASK)
        return caught.value, [request[:2] for request in server.requests]

    return asyncio.run(run())


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
    error, requests = refused(body)
    assert word in str(error) and str(error).isprintable()
    assert requests == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"instruction": None}, "instruction"),
        ({"instruction": ""}, "instruction"),
        ({"instruction": "\u202e\x1b"}, "instruction"),
        ({"instruction": "x" * 5000}, "instruction"),
        ({"screen_width": 0}, "not positive integers"),
        ({"screen_width": True}, "not positive integers"),
        ({"screen_height": "168"}, "not positive integers"),
        ({"screen_height": 10**9}, "at most 16000000 are accepted"),
        ({"renderer": 5}, "renderer is not a string"),
        ({"renderer": "\x1b[2J"}, "a session's renderer is"),
    ],
)
def test_create_deletes_a_session_that_is_described_wrongly(changes, word):
    """Nobody else knows of it, and the server would be full of such sessions."""
    error, requests = refused(_created(**changes))
    assert word in str(error) and str(error).isprintable()
    assert set(requests) == {("DELETE", "/session/s1")}


@pytest.mark.parametrize(
    "changes", [{"instruction": ""}, {"instruction": "x" * 5000}, {"screen_height": 10**9}]
)
def test_create_of_a_task_that_is_never_accepted_says_so(changes):
    error, _ = refused(_created(**changes))
    assert isinstance(error, InvalidRequestError)


def test_create_with_an_id_that_is_open_already_is_refused():
    async def run():
        server = Hostile(b"")
        async with server, client_of(server) as client:
            await client.create(TASK)
            with pytest.raises(VerifierError, match="taken by an open session"):
                await client.create(TASK)

    asyncio.run(run())
