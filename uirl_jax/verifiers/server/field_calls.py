"""G2 and G3: a session with the calls of ui-verifiers' containers and of their proxy.

    GET /            text with the type and the start time; 200 means ready
    GET /act         action_type, x, y, text, keys, direction, delay=1.0 -> PNG
    GET /openapi.json    these calls, for programs
    GET /progress    the counts of the task, without done and reward, which the client computes

`SingleSession` is a server of one session that cannot be reset; a second episode needs a second
process. `sessions` offers the same calls for every session below `/proxy/{session_id}/`. Actions
are in `wire`, access checks in `server`.

Source: TobiasNorlund/ui-verifiers, tasks/simple_data_entry/server.py (850446c).
"""

import datetime
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

from aiohttp import web

from uirl_jax.errors import ConfigError
from uirl_jax.log_lines import key_values
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import dialects, wire
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.server import calls
from uirl_jax.verifiers.server.calls import Call
from uirl_jax.verifiers.server.open_session import (
    ActionRate,
    OpenSession,
    ServerLimits,
    close_task,
    refusal,
)
from uirl_jax.verifiers.server.session_types import SessionTypes

logger = logging.getLogger(__name__)

_G2B = dialects.DIALECTS["g2b"]
_ACTION_TYPES = (
    "screenshot",
    *sorted(str(wire.action_fields(Action(kind))["action_type"]) for kind in _G2B.kinds or ()),
)

CALLS = {
    call.path: call
    for call in (
        Call("GET", "/", "the type and the start time"),
        Call("GET", calls.PAGE_PATH, "this page", answers={"type": "object"}),
        Call(
            "GET",
            "/act",
            "applies an action; the screen after it",
            query=("action_type", "x", "y", "text", "keys", "direction", "delay"),
            required=("action_type",),
            statuses=(429, 500),
            is_image=True,
            narrower={
                "action_type": {"enum": list(_ACTION_TYPES)},
                "direction": {"enum": ["up", "down"]},
            },
        ),
        Call("GET", "/progress", "the counts", statuses=(500,), answers={"type": "object"}),
    )
}

InTurn = Callable[[OpenSession], AbstractAsyncContextManager[None]]


async def answer(
    session: OpenSession, endpoint: str, request: web.Request, limits: ServerLimits, in_turn: InTurn
) -> web.Response:
    """What a container answers.

    Args:
      endpoint: the path below the container: "/", "/act", "/progress" or "/openapi.json".
      in_turn: holds the session's lock, and knows what to do when its browser is lost.

    Raises:
      ValueError: wrong parameters, with a printable reason.
    """
    call = CALLS.get(endpoint)
    if call is None:
        raise refusal(web.HTTPNotFound, "Not Found")
    if request.method != call.method:
        raise web.HTTPMethodNotAllowed(request.method, [call.method])
    query = calls.read_query(request, call.query)
    if endpoint == "/":
        return web.Response(text=_root(session))
    if endpoint == calls.PAGE_PATH:
        title = "uirl_jax verifier, dialect G2b"
        return web.json_response(calls.page(title, CALLS.values(), limits))
    if endpoint == "/progress":
        async with in_turn(session):
            return web.json_response(_counts(await session.task.progress()))
    act = _read_act(session, query, limits.max_delay_s)
    async with in_turn(session):
        return await session.act(act)


def _root(session: OpenSession) -> str:
    """In the field's words: a client tells a new container from a used one by the start time."""
    started = datetime.datetime.fromtimestamp(session.start_time_unix_s)
    return (
        f"UI Verifiers Session Server (uirl_jax)\nSession Type: {session.type_name}\n"
        f"Start time: {started}\nDuration: {datetime.datetime.now() - started}\n"
    )


def _counts(progress: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in progress.items() if key not in ("done", "reward")}


def _read_act(session: OpenSession, query: dict[str, str], max_delay_s: float) -> wire.ActCall:
    fields = wire.read_query(query)
    kind = fields.get("action_type", "")
    if kind not in _ACTION_TYPES:
        shown = untrusted_json.printable(kind)
        raise ValueError(f"action_type is {shown!r}, known: {', '.join(_ACTION_TYPES)}")
    if kind == "scroll" and fields.get("direction") not in ("up", "down"):
        raise ValueError("direction is none of up and down")
    return wire.read_call(fields, session.screen_size, max_delay_s)


class SingleSession:
    """A server that is one session. An async context manager: entering it opens the session."""

    def __init__(self, types: SessionTypes, task: TaskSpec, limits: ServerLimits) -> None:
        self._types = types
        self._task = task
        self._limits = limits
        self._session: OpenSession

    async def __aenter__(self) -> Self:
        """
        Raises:
          ConfigError: the task does not count rows, which is all that a caller of G2 can read.
          VerifierError: no such task, or it cannot be started.
        """
        running = await self._types.open(self._task)
        try:
            counts = _counts(await running.progress())
            if set(counts) not in _G2B.counts:
                raise ConfigError(
                    f"--single={self._task.name}: counts {', '.join(counts) or 'nothing'}; a "
                    f"server of {_G2B.name} counts {dialects.ROWS} and {dialects.WRONG}, as "
                    "simple_data_entry and desktop/data_entry do"
                )
        except BaseException:
            await close_task(running, self._task.name)
            raise
        rate = ActionRate(self._limits.max_actions_per_s)
        self._session = OpenSession("single", self._task.name, running, rate)
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_task(self._session.task, self._session.session_id)

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{endpoint:.*}", self._handle)]

    async def _handle(self, request: web.Request) -> web.Response:
        endpoint = f"/{request.match_info['endpoint']}"
        return await answer(self._session, endpoint, request, self._limits, self._in_turn)

    @asynccontextmanager
    async def _in_turn(self, session: OpenSession) -> AsyncIterator[None]:
        async with session.lock:
            try:
                yield
            except BrowserError as error:
                logger.warning(key_values("lost", reason=error))
                reason = untrusted_json.printable(str(error), 300)
                raise refusal(web.HTTPInternalServerError, reason) from error
