"""OpenEnv servers for tests: one that behaves as BrowserGym's does, with the desktop behind it, and
one that breaks a rule.

Messages and error codes are those of openenv 0.10.0, core/env_server/http_server.py; the fields of
the observation those of huggingface/OpenEnv (385de5e), envs/browsergym_env/models.py.
"""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.tasks import desktop

BROWSERGYM = {"action": {"properties": {"action_str": {}, "metadata": {}}}}
OPENAPP = {"action": {"properties": {"action_type": {}, "bid": {}, "text": {}, "metadata": {}}}}
OWN = {"action": {"properties": {"action_type": {}, "x": {}, "y": {}}}}
STATE = {"benchmark": "miniwob", "task_name": "click-test", "episode_id": "e", "step_count": 0}
TASK = TaskSpec("browsergym/miniwob.click-test", 3)
Answer = Callable[[dict[str, Any], web.WebSocketResponse], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(
    answer: Answer, schema: Any = BROWSERGYM, *, heartbeat_s: float | None = None
) -> AsyncIterator[str]:
    """A server whose WebSocket hands every message to `answer`; its URL.

    Args:
      heartbeat_s: it pings so often, and drops who does not answer within half of that.
    """

    async def ws(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=heartbeat_s)
        await socket.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for message in socket:
                read = json.loads(message.data)
                if read["type"] == "close":
                    break
                await answer(read, socket)
        return socket

    app = web.Application()
    metadata = {"name": "Fake", "description": "an environment of a test"}
    app.add_routes(
        [
            web.get("/ws", ws),
            web.get("/schema", always(schema)),
            web.get("/metadata", always(metadata)),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def always(value: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that answers with this JSON."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(value)

    return handle


def observation(
    *, reward: Any = 0.0, done: Any = False, size: tuple[int, int] = (8, 6), **fields: Any
) -> dict[str, Any]:
    """A message with a grey screen of (width, height) as rows of pixels."""
    rows = np.full((size[1], size[0], 3), 90).tolist()
    seen = {"goal": "Click.", "screenshot": rows, "last_action_error": False, **fields}
    data = {"observation": seen, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "it failed", "code": code, **more}}


class FakeBrowserGym:
    """The desktop's button task, played by BrowserGym's strings; screens are rows of pixels.

    Args:
      coordinates: whether its action set has any, which that of OpenEnv's own server has not.
    """

    def __init__(self, task: TaskSpec, *, coordinates: bool = True) -> None:
        self._task, self._coordinates = task, coordinates
        self.actions: list[str] = []

    async def __call__(self, message: dict[str, Any], socket: web.WebSocketResponse) -> None:
        kind, data = message["type"], message.get("data", {})
        if kind == "state":
            await socket.send_json({"type": "state", "data": STATE})
            return
        refused = ""
        if kind == "reset":
            assert data == {"seed": self._task.seed}
            self._session = desktop.open_session(self._task)
        else:
            text = data["action_str"]
            self.actions.append(text)
            if not self._coordinates:
                refused = f"NameError: Invalid action type '{text.partition('(')[0]}'."
            elif found := re.fullmatch(r"mouse_click\((\d+), (\d+), 'left'\)", text):
                self._session.act(Action("click", x=int(found[1]), y=int(found[2])))
        progress = self._session.progress()
        fields = {
            "goal": self._session.instruction,
            "screenshot": np.asarray(self._session.screenshot().convert("RGB")).tolist(),
            "last_action_error": bool(refused),
            "metadata": {"browsergym_obs": {"last_action_error": refused}},
        }
        seen = {"observation": fields, "reward": progress["reward"], "done": progress["done"]}
        await socket.send_json({"type": "observation", "data": seen})
