"""OpenEnv's protocol on the bundled server, so that TRL and others can play its tasks.

    WebSocket /ws      {"type": "reset" | "step" | "state" | "close", "data": {...}}
    POST /reset        seed, episode_id, task, variant -> observation, reward, done
    POST /step         action, and a reset's fields -> the same; GET /state -> an empty state
    GET  /health  /metadata  /schema  /list_environments  /uirl_jax/splits
    POST /uirl_jax/tasks  /num_tasks  /task  /task_range     the task lists

A WebSocket is a session; a reset in it begins another episode. A call by HTTP has a session for
itself alone, as OpenEnv's own server has it: `/step` acts once on the first screen. Sessions are
those of `sessions`, with its limits; an action has the fields of `wire`, and unknown ones are
refused. The reward of a step is what it added to the episode's.

Source: openenv 0.10.0 (PyPI), core/env_server/http_server.py and types.py: calls, messages, error
codes. Differences: a reset refuses parameters that it does not know; the reason of a refusal stands
in `message`, the only part that OpenEnv's client shows; there is no MCP and no web page.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from uirl_jax.types import TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server import calls
from uirl_jax.verifiers.server.open_session import OpenSession, ServerLimits, refusal
from uirl_jax.verifiers.server.openenv_calls import (
    ACTION_FIELDS,
    ANY,
    CALLS,
    ENV_NAME,
    MAX_LISTED,
    OBSERVATION,
    RESET,
    SPLITS,
    STATE,
    STEP,
    check_fields,
    message_data,
    read_reset,
    task_fields,
)
from uirl_jax.verifiers.server.session_types import SessionTypes
from uirl_jax.verifiers.server.sessions import Sessions

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0  # for the goodbye of a caller who may not read any more
_HEARD = 8  # messages that wait for the call that runs; behind them pings wait too


@dataclasses.dataclass
class _Episode:
    """The session of a WebSocket between two resets."""

    session: OpenSession
    task: TaskSpec
    episode_id: str
    steps: int = 0
    reward: float = 0.0  # so far
    done: bool = False

    def state(self) -> dict[str, Any]:
        told = task_fields(self.task)
        return {"episode_id": self.episode_id, "step_count": self.steps, **told}


class OpenEnvDoor:
    """The calls of OpenEnv, on the sessions of the bundled server.

    Args:
      types: what the task lists have, and the task of a reset that names none.
    """

    def __init__(self, sessions: Sessions, types: SessionTypes, limits: ServerLimits) -> None:
        self._sessions, self._names, self._limits = sessions, types.names(), limits
        self._no_state = {"episode_id": None, "step_count": 0}
        self._no_state |= task_fields(TaskSpec(types.example, 0))
        self._sockets: set[web.WebSocketResponse] = set()
        self._action = calls.action_schema(limits, ACTION_FIELDS)

    def routes(self) -> list[web.RouteDef]:
        handlers: dict[str, calls.Handler] = {
            "/reset": self._reset_once,
            "/step": self._step_once,
            "/state": self._told(self._no_state),
            "/health": self._told({"status": "healthy"}),
            "/metadata": self._told(self._metadata()),
            "/schema": self._told(self._schemas()),
            "/list_environments": self._told([ENV_NAME]),
            f"/{ENV_NAME}/splits": self._told([{"name": name, "type": name} for name in SPLITS]),
            f"/{ENV_NAME}/tasks": self._list,
            f"/{ENV_NAME}/num_tasks": self._list,
            f"/{ENV_NAME}/task": self._list,
            f"/{ENV_NAME}/task_range": self._list,
        }
        routes = [calls.route(call, handlers[path]) for path, call in CALLS.items()]
        return [*routes, web.get("/ws", self._serve_socket, allow_head=False)]

    async def close(self, app: web.Application) -> None:
        """Closes every WebSocket: the server ends."""
        ends = {"code": 1001, "message": b"the server ends"}
        await asyncio.gather(*(_close(socket, **ends) for socket in list(self._sockets)))

    async def _serve_socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            max_msg_size=self._limits.max_body_bytes, compress=False, timeout=_CLOSE_S
        )
        await socket.prepare(request)
        if len(self._sockets) >= self._limits.max_sessions:
            most = self._limits.max_sessions
            with contextlib.suppress(TimeoutError, ConnectionError):
                full = _full(f"{most} of at most {most} connections are open", most)
                await self._send(socket, full)
            await _close(socket)
            return socket
        self._sockets.add(socket)
        held = _Held()
        heard: asyncio.Queue[str | bytes | None] = asyncio.Queue(_HEARD)
        listening = asyncio.create_task(_listen(socket, heard))
        try:
            while True:
                async with asyncio.timeout(self._limits.idle_time_s):
                    message = await heard.get()
                if message is None:
                    break
                if isinstance(message, bytes):
                    await self._send(socket, _error("INVALID_JSON", "bytes, expected text"))
                    continue
                answer = await self._answer(held, message)
                if answer is None:
                    break
                await self._send(socket, answer)
        except (TimeoutError, ConnectionError):  # idle, or gone
            pass
        finally:
            self._sockets.discard(socket)
            listening.cancel()
            await asyncio.wait([listening])  # `close` reads what follows
            await asyncio.shield(self._end(held))
            await _close(socket)
        return socket

    async def _send(self, socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
        """Raises: TimeoutError: the caller does not read."""
        async with asyncio.timeout(self._limits.idle_time_s):
            await socket.send_str(json.dumps(message))

    async def _answer(self, held: "_Held", text: str) -> dict[str, Any] | None:
        """What a message is answered with; None: the caller says goodbye."""
        try:
            message = untrusted_json.parse(text.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            return _error("INVALID_JSON", f"the message {error}")
        kind = message.get("type")
        try:
            data = message_data(message)
            if kind == "reset":
                observed = await self._reset(held, data)
            elif kind == "step":
                observed = await self._step(held, data)
            elif kind == "state":
                episode = held.episode
                state = self._no_state if episode is None else episode.state()
                return {"type": "state", "data": state}
            elif kind == "close":
                return None
            else:
                shown = untrusted_json.printable(str(kind))
                return _error("UNKNOWN_TYPE", f"type is {shown!r}: reset, step, state or close")
        except ValueError as error:
            return _error("VALIDATION_ERROR", str(error))
        except web.HTTPException as error:
            detail = untrusted_json.parse((error.text or "{}").encode())
            reason = str(detail.get("detail", error.reason))
            if error.status == 429 and (capacity := detail.get("capacity")):
                return _full(reason, capacity)
            return _error("EXECUTION_ERROR", reason)
        except Exception:
            logger.exception("event=error call=openenv")
            return _error("EXECUTION_ERROR", "Internal Server Error")
        return {"type": "observation", "data": observed}

    async def _reset(self, held: "_Held", data: Mapping[str, Any]) -> dict[str, Any]:
        task, episode_id = read_reset(data, self._no_state["task"])
        await self._end(held)  # what it holds may be the last browser
        (session,) = await self._sessions.open(task)
        held.episode = _Episode(session, task, episode_id)
        return await self._observe(held.episode, first=True)

    async def _step(self, held: "_Held", data: Mapping[str, Any]) -> dict[str, Any]:
        episode = held.episode
        if episode is None or episode.session.ended.is_set():
            raise refusal(web.HTTPConflict, "no episode runs: reset first")
        if episode.done:
            raise refusal(web.HTTPConflict, "the episode is done: reset begins another")
        return await self._act(episode, data)

    async def _act(self, episode: _Episode, fields: Mapping[str, Any]) -> dict[str, Any]:
        call = self._read_action(fields, episode.session)
        async with self._sessions.in_turn(episode.session):
            await episode.session.apply(call)
        episode.steps += 1
        return await self._observe(episode)

    async def _observe(self, episode: _Episode, *, first: bool = False) -> dict[str, Any]:
        session = episode.session
        async with self._sessions.in_turn(session):
            screen = await session.task.screenshot("png")
            progress = await session.task.progress()
        told = progress.get("reward")
        total = episode.reward if told is None else float(told)
        added, episode.reward, episode.done = total - episode.reward, total, progress["done"]
        observation = {
            "goal": session.task.instruction,
            "screenshot": base64.b64encode(screen).decode("ascii"),
            "screen_width": session.task.width_px,
            "screen_height": session.task.height_px,
            "renderer": session.task.renderer,
            "judges_every_action": session.task.judges_every_action,
            "progress": progress,
            "last_action_error": "",
            "metadata": {},
        }
        reward = None if first else added
        return {"observation": observation, "reward": reward, "done": episode.done}

    async def _end(self, held: "_Held") -> None:
        episode, held.episode = held.episode, None
        if episode is not None:
            await self._sessions.end(episode.session)

    def _read_action(self, fields: Mapping[str, Any], session: OpenSession) -> wire.ActCall:
        """Raises ValueError, with a printable reason."""
        if (metadata := fields.get("metadata")) is not None:  # OpenEnv's actions all have it
            check_fields({"metadata": metadata}, {"metadata": ANY})
        given = {name: value for name, value in fields.items() if name != "metadata"}
        for name in given:
            if name not in ACTION_FIELDS:
                shown = untrusted_json.printable(name)
                raise ValueError(f"unknown field {shown!r}, known: {', '.join(ACTION_FIELDS)}")
        return wire.read_call(
            given,
            session.screen_size,
            self._limits.max_delay_s,
            default_delay_s=0.0,
            said=session.task.judges_every_action,
        )

    async def _reset_once(self, request: web.Request, query: dict[str, str]) -> web.Response:
        fields = await calls.read_body(request) if request.can_read_body else {}
        held = _Held()
        try:
            return web.json_response(await self._reset(held, fields))
        finally:
            await asyncio.shield(self._end(held))

    async def _step_once(self, request: web.Request, query: dict[str, str]) -> web.Response:
        fields = await calls.read_body(request)
        check_fields(fields, {**RESET, **STEP})
        if "action" not in fields:
            raise ValueError("action is missing")
        action = fields["action"]
        fields = {name: value for name, value in fields.items() if name in RESET}
        held = _Held()
        try:
            await self._reset(held, fields)
            return web.json_response(await self._step(held, action))
        finally:
            await asyncio.shield(self._end(held))

    async def _list(self, request: web.Request, query: dict[str, str]) -> web.Response:
        body = await calls.read_body(request)
        call = CALLS[request.path]
        assert call.body is not None  # all lists have one
        check_fields(body, call.body["properties"])
        split = body.get("split")
        if split not in SPLITS:
            shown = untrusted_json.printable(str(split))
            raise ValueError(f"split is {shown!r}, known: {', '.join(SPLITS)}")
        most = len(self._names) * len(SPLITS[split])
        endpoint = request.path.rpartition("/")[2]
        if endpoint == "num_tasks":
            return web.json_response({"num_tasks": most})
        if endpoint == "task":
            if (index := body.get("index")) is None:
                raise ValueError("index is missing")
            if index >= most:
                raise refusal(web.HTTPBadRequest, "Invalid task index")
            return web.json_response({"task": self._task(split, index)})
        start, stop = body.get("start") or 0, body.get("stop")
        if endpoint == "tasks":
            stop = MAX_LISTED  # a split that large may be listed in part
        stop = most if stop is None else min(stop, most)
        if stop - start > MAX_LISTED:
            raise ValueError(f"{stop - start} tasks, at most {MAX_LISTED} are listed at a time")
        answer: dict[str, Any] = {"tasks": [self._task(split, i) for i in range(start, stop)]}
        if endpoint == "tasks":
            answer["env_name"] = ENV_NAME
        return web.json_response(answer)

    def _task(self, split: str, index: int) -> dict[str, Any]:
        """The task at an index: the names in turn, with a new seed for each round."""
        number, which = divmod(index, len(self._names))
        return task_fields(TaskSpec(self._names[which], SPLITS[split][number]))

    def _told(self, value: Any) -> calls.Handler:
        async def handle(request: web.Request, query: dict[str, str]) -> web.Response:
            return web.json_response(value)

        return handle

    def _metadata(self) -> dict[str, Any]:
        return {
            "name": ENV_NAME,
            "description": f"{len(self._names)} UI tasks, played by coordinates",
            "readme_content": None,
            "version": None,
            "author": None,
            "documentation_url": None,
        }

    def _schemas(self) -> dict[str, Any]:
        action = {**self._action, "title": "Action"}
        action["properties"] = {**self._action["properties"], "metadata": ANY}
        observation = {
            **OBSERVATION,
            "title": "Observation",
            "properties": {
                **OBSERVATION["properties"],
                "done": {"type": "boolean"},
                "reward": {"type": ["number", "null"]},
            },
        }
        return {
            "action": action,
            "observation": observation,
            "reset_observation": observation,
            "state": {**STATE, "title": "State"},
        }


async def _close(socket: web.WebSocketResponse, **options: Any) -> None:
    """Closes a WebSocket; one whose caller does not read is left after a while."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await socket.close(**options)


async def _listen(socket: web.WebSocketResponse, heard: asyncio.Queue[str | bytes | None]) -> None:
    """Hands on the messages, and None at their end. aiohttp answers pings in `receive` alone, so
    this goes on while a call runs: clients of `websockets` hang up 20 s after such a ping."""
    with contextlib.suppress(ConnectionError):
        while (message := await socket.receive()).type in (
            web.WSMsgType.TEXT,
            web.WSMsgType.BINARY,
        ):
            await heard.put(message.data)
    await heard.put(None)


@dataclasses.dataclass
class _Held:
    """What a connection holds at present."""

    episode: _Episode | None = None


def _error(code: str, reason: str, **more: int) -> dict[str, Any]:
    return {"type": "error", "data": {"message": reason, "code": code, **more}}


def _full(reason: str, capacity: int) -> dict[str, Any]:
    return _error("CAPACITY_REACHED", reason, active_sessions=capacity, max_sessions=capacity)
