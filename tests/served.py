"""The bundled server in the test's own process, and its calls over real HTTP."""

import contextlib
import json

import aiohttp

from uirl_jax.verifiers.server.server import serve

BUTTON, TEXT = "desktop/click_button", "desktop/enter_text"


@contextlib.asynccontextmanager
async def served(**options):
    async with (
        serve(**options) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        yield http


async def ask(http, method, path, **options):
    """(status, parsed JSON or bytes, content type)."""
    async with http.request(method, path, **options) as response:
        body = await response.read()
        if response.content_type == "application/json":
            body = json.loads(body)
        return response.status, body, response.content_type


async def create(http, name=BUTTON, **query):
    status, body, _ = await ask(http, "POST", "/session", params={"type": name, **query})
    assert status == 200, body
    return body["sessions"][0]
