"""The open sessions of the bundled verifier and the handlers of the calls on them.

Between HTTP (`server`, which has already decided who may speak) and what shows a screen. A
handler's ValueError is told to the caller as a 422. Not here: which tasks there are
(`session_types`), the fields of an action (`wire`).

Calls (parameters in the query; `act` also as a JSON body by POST: typed text stays out of URLs):
    GET    /                          name and version
    GET    /openapi.json              these calls, for programs
    GET    /status                    sessions, running and lately ended
    POST   /session                   type, n=1, seed, variant -> session_ids, sessions
    GET    /session/{id}              info; also for a while after its end
    GET    /session/{id}/act          action_type, x, y, x2, y2, text, keys, direction, amount,
    POST   /session/{id}/act          seconds, delay=1.0, format=png, request_id -> image
    GET    /session/{id}/screenshot   format=png -> image
    GET    /session/{id}/progress     counts of the task, done, reward
    DELETE /session/{id}              {"deleted": id}
    any    /proxy/{id}/{endpoint}     the session as a container of the field (`field_calls`)
OpenEnv's calls are in `openenv`, which opens its sessions here.
Errors are {"detail": reason} with 401, 403, 404, 405, 408, 413, 415, 422, 429, 500
or 503.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from aiohttp import web

from uirl_jax.errors import UserCodeError, VerifierError
from uirl_jax.log_lines import key_values
from uirl_jax.types import TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.browser import BrowserError, PoolFullError
from uirl_jax.verifiers.server import calls, field_calls
from uirl_jax.verifiers.server.calls import ON_SCREEN, ON_SESSION, Call
from uirl_jax.verifiers.server.open_session import (
    ActionRate,
    OpenSession,
    ServerLimits,
    close_task,
    refusal,
)
from uirl_jax.verifiers.server.session_types import RunningTask, SessionTypes

logger = logging.getLogger(__name__)

_COME_BACK = {"Retry-After": "1"}  # seconds: sessions end all the time

_ENDED_KEPT = 256
_PROXY_TIMEOUT_S = 30.0  # the field's proxy's own

_TEXT, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_INFO = calls.whole(
    id=_TEXT,
    start_time=_NUMBER,
    display={"type": "null"},
    action_count=_INTEGER,
    stop_time={"type": ["number", "null"]},
)
_OPENED = calls.whole(
    id=_TEXT,
    instruction=_TEXT,
    screen_width=_INTEGER,
    screen_height=_INTEGER,
    renderer=_TEXT,  # fingerprint of how its pages are drawn; empty: nothing depends on the machine
    judges_every_action={"type": "boolean"},  # takes `terminate` and `answer` too
)
_CREATED = calls.whole(
    session_ids={"type": "array", "items": _TEXT}, sessions={"type": "array", "items": _OPENED}
)
_JUDGED = {
    "type": "object",  # and what the task counts
    "properties": {"done": {"type": "boolean"}, "reward": {"type": ["number", "null"]}},
    "required": ["done", "reward"],
}
_SESSION = "/session/{id}"
_ACT = (*ON_SCREEN, 429)

ROOT = Call("GET", "/", "name and version")
PAGE = Call("GET", calls.PAGE_PATH, "this page", answers={"type": "object"})
STATUS = Call(
    "GET",
    "/status",
    "sessions, running and lately ended",
    answers={"type": "object", "additionalProperties": _INFO},
)
CREATE = Call(
    "POST",
    "/session",
    "opens n sessions of one task instance",
    query=("type", "n", "seed", "variant"),
    required=("type",),
    statuses=(429, 500, 503),
    answers=_CREATED,
)
INFO = Call("GET", _SESSION, "a session, or one that ended", statuses=ON_SESSION, answers=_INFO)
DELETE = Call(
    "DELETE", _SESSION, "ends a session", statuses=ON_SESSION, answers=calls.whole(deleted=_TEXT)
)
ACT_GET = Call(
    "GET",
    f"{_SESSION}/act",
    "applies an action; the screen after it",
    query=tuple(wire.FIELD_TYPES),
    required=("action_type",),
    statuses=_ACT,
    is_image=True,
)
ACT_POST = Call(
    "POST",
    f"{_SESSION}/act",
    "applies an action; the screen after it",
    has_body=True,
    statuses=(*_ACT, 408, 413),
    is_image=True,
)
SCREENSHOT = Call(
    "GET",
    f"{_SESSION}/screenshot",
    "the screen as it stands",
    query=("format",),
    statuses=ON_SCREEN,
    is_image=True,
)
PROGRESS = Call(
    "GET",
    f"{_SESSION}/progress",
    "counts of the task, done and reward",
    statuses=ON_SCREEN,
    answers=_JUDGED,
)


class Sessions:
    """Who is open, and one handler a call. An async context manager: leaving it ends them all.

    Args:
      more_calls: of the same server, for the page that lists them.
    """

    def __init__(
        self, types: SessionTypes, limits: ServerLimits, more_calls: Sequence[Call] = ()
    ) -> None:
        self._types = types
        self._limits = limits
        self._more_calls = more_calls
        self._num_opening = 0
        self._open: dict[str, OpenSession] = {}
        self._ended: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()

    async def __aenter__(self) -> Self:
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeper.cancel()
        for session in list(self._open.values()):
            await self.end(session)

    def routes(self) -> list[web.RouteDef]:
        handled = [calls.route(call, handler) for call, handler in self._handlers()]
        return [*handled, web.route("*", "/proxy/{id}/{endpoint:.*}", self.proxy)]

    def _handlers(self) -> list[tuple[Call, calls.Handler]]:
        return [
            (ROOT, self.root),
            (PAGE, self.page),
            (STATUS, self.status),
            (CREATE, self.create),
            (INFO, self.info),
            (DELETE, self.delete),
            (ACT_GET, self.act),
            (ACT_POST, self.act),
            (SCREENSHOT, self.screenshot),
            (PROGRESS, self.progress),
        ]

    async def page(self, request: web.Request, query: dict[str, str]) -> web.Response:
        behind = [
            dataclasses.replace(
                call,
                path=f"/proxy/{{id}}{call.path}",
                statuses=(*call.statuses, 404, 500),
                plain_errors=(404, 500),
            )
            for call in field_calls.CALLS.values()
        ]
        own = [call for call, _ in self._handlers()]
        return web.json_response(
            calls.page(
                "uirl_jax verifier, dialects G1+, G3 and OpenEnv",
                [*own, *behind, *self._more_calls],
                self._limits,
            )
        )

    async def root(self, request: web.Request, query: dict[str, str]) -> web.Response:
        name = "uirl_jax verifier: Session Server, dialect G1+"
        return web.Response(text=f"{name}\nExample task: {self._types.example}\n")

    async def status(self, request: web.Request, query: dict[str, str]) -> web.Response:
        running = {key: session.info() for key, session in self._open.items()}
        return web.json_response({**self._ended, **running})

    async def create(self, request: web.Request, query: dict[str, str]) -> web.Response:
        count = wire.whole_number("n", query.get("n", "1"))
        seed = secrets.randbelow(2**31)
        if "seed" in query:
            seed = wire.whole_number("seed", query["seed"])
        if not 1 <= count <= self._limits.max_sessions:
            raise ValueError(f"n is {count}, allowed: 1-{self._limits.max_sessions}")
        task = TaskSpec(query.get("type", ""), seed, query.get("variant", ""))
        opened = await self.open(task, count)
        if request.transport is None or request.transport.is_closing():
            # Nobody learns their ids, and each would stay, a browser perhaps, for idle_time_s.
            for session in opened:
                await self.end(session)
            raise refusal(web.HTTPBadRequest, "the connection was lost")
        sessions = [
            {
                "id": session.session_id,
                "instruction": session.task.instruction,
                "screen_width": session.task.width_px,
                "screen_height": session.task.height_px,
                "renderer": session.task.renderer,
                "judges_every_action": session.task.judges_every_action,
            }
            for session in opened
        ]
        return web.json_response(
            {"session_ids": [session["id"] for session in sessions], "sessions": sessions}
        )

    async def open(self, task: TaskSpec, count: int = 1) -> list[OpenSession]:
        """Opens sessions of one task instance: all of them or none.

        Raises:
          ValueError: no such task, with a printable reason.
          web.HTTPException: no room for them, or no browser.
        """
        num_open = len(self._open) + self._num_opening
        if num_open + count > self._limits.max_sessions:
            raise refusal(
                web.HTTPTooManyRequests,
                f"{num_open} of at most {self._limits.max_sessions} sessions are open: "
                "delete those that are done",
                capacity=self._limits.max_sessions,
                headers=_COME_BACK,
            )
        self._num_opening += count
        try:
            opened = await self._open_all(task, count)
        finally:
            self._num_opening -= count
        sessions = []
        for running in opened:
            rate = ActionRate(self._limits.max_actions_per_s)
            session = OpenSession(secrets.token_hex(8), task.name, running, rate)
            self._open[session.session_id] = session
            sessions.append(session)
        logger.info(
            "event=create type=%s seed=%d n=%d open=%d",
            task.name,
            task.seed,
            count,
            len(self._open),
        )
        return sessions

    async def _open_all(self, task: TaskSpec, count: int) -> list[RunningTask]:
        """All of them or none. One seed for all: they are attempts at one task instance."""
        opening = (self._types.open(task) for _ in range(count))
        results = await asyncio.gather(*opening, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        opened = [result for result in results if not isinstance(result, BaseException)]
        if not errors:
            return opened
        for running in opened:
            await close_task(running, task.name)
        reason = untrusted_json.printable(str(errors[0]), 300)
        if isinstance(errors[0], PoolFullError):
            raise refusal(
                web.HTTPTooManyRequests,
                reason,
                capacity=errors[0].capacity,
                headers=_COME_BACK,
            )
        if isinstance(errors[0], BrowserError):
            logger.warning("no session of %s: %s", task.label, reason)
            raise refusal(web.HTTPServiceUnavailable, reason)
        if isinstance(errors[0], VerifierError):
            raise ValueError(reason) from errors[0]
        if isinstance(errors[0], UserCodeError):  # would raise again: a 500 is asked for again
            logger.error("no session of %s", task.label, exc_info=errors[0])
            raise refusal(web.HTTPUnprocessableEntity, reason)
        raise errors[0]

    async def info(self, request: web.Request, query: dict[str, str]) -> web.Response:
        session_id = request.match_info["id"]
        if session_id in self._ended:
            return web.json_response(self._ended[session_id])
        return web.json_response(self._find(request).info())

    async def act(self, request: web.Request, query: dict[str, str]) -> web.Response:
        session = self._find(request)
        if request.method == "POST":
            fields = await calls.read_body(request)
        else:
            fields = wire.read_query(query)
        call = wire.read_call(
            fields,
            session.screen_size,
            self._limits.max_delay_s,
            default_delay_s=session.task.delay_s,
            said=session.task.judges_every_action,
        )
        async with self.in_turn(session):
            answer = await session.act(call)
        kind = "screenshot" if call.action is None else call.action.kind
        logger.debug("event=act session=%s kind=%s", session.session_id, kind)  # never its text
        return answer

    async def screenshot(self, request: web.Request, query: dict[str, str]) -> web.Response:
        image_format = wire.read_image_format(query.get("format", "png"))
        session = self._find(request)
        async with self.in_turn(session):
            return await session.image(image_format)

    async def progress(self, request: web.Request, query: dict[str, str]) -> web.Response:
        session = self._find(request)
        async with self.in_turn(session):
            return web.json_response(await session.task.progress())

    async def delete(self, request: web.Request, query: dict[str, str]) -> web.Response:
        session = self._find(request)
        await self.end(session)
        return web.json_response({"deleted": session.session_id})

    async def proxy(self, request: web.Request) -> web.Response:
        """G3. What the field's proxy finds by a label of the pod is here the session's id."""
        session = self._open.get(request.match_info["id"])
        if session is None:
            return web.Response(text="Pod not found", status=404)
        session.touched_s = time.monotonic()
        endpoint = f"/{request.match_info['endpoint']}"
        try:
            async with asyncio.timeout(_PROXY_TIMEOUT_S):
                return await field_calls.answer(
                    session, endpoint, request, self._limits, self.in_turn
                )
        except TimeoutError:
            return web.Response(text=f"no answer within {_PROXY_TIMEOUT_S:g} s", status=500)

    async def _sweep(self) -> None:
        """Ends sessions that nobody has touched for idle_time_s. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._limits.idle_time_s / 4))
            oldest_s = time.monotonic() - self._limits.idle_time_s
            for session in list(self._open.values()):
                if session.touched_s < oldest_s and not session.lock.locked():
                    logger.warning("event=idle_end session=%s", session.session_id)
                    await self.end(session)

    @contextlib.asynccontextmanager
    async def in_turn(self, session: OpenSession) -> AsyncIterator[None]:
        """One call at a time. A session whose browser is lost ends with the call that finds out."""
        async with session.lock:
            session.check_open()
            try:
                yield
            except BrowserError as error:
                logger.warning(key_values("lost", session=session.session_id, reason=error))
                if self._forget(session):
                    await close_task(session.task, session.session_id)
                reason = untrusted_json.printable(str(error), 300)
                raise refusal(web.HTTPInternalServerError, reason) from error

    async def end(self, session: OpenSession) -> None:
        """Closes what a session holds, after the call that is using it."""
        if self._forget(session):
            async with session.lock:
                await close_task(session.task, session.session_id)

    def _forget(self, session: OpenSession) -> bool:
        """Whether it was still open. The calls that wait for it are refused from now on."""
        if self._open.pop(session.session_id, None) is None:
            return False
        session.ended.set()
        self._ended[session.session_id] = session.info(stop_time_unix_s=time.time())
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        return True

    def _find(self, request: web.Request) -> OpenSession:
        session = self._open.get(request.match_info["id"])
        if session is None:
            raise refusal(web.HTTPNotFound, "Session not found")
        session.touched_s = time.monotonic()
        return session
