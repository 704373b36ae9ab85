"""The recorder's page over HTTP: loopback only, behind a random path, for one person.

The page shows a Demonstration's screenshot, sends gestures, and asks for it to be saved; every
answer is the whole state. `Recorder` owns the demonstration that is open and decides what comes
next. Not here: what a gesture means (`gestures`), what an action does (`episode`), the command.
"""

import asyncio
import contextlib
import dataclasses
import errno
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tools.recorder import gestures
from tools.recorder.episode import Demonstration, End
from uirl_jax.errors import (
    ActionError,
    ConfigError,
    RecordError,
    ShardError,
    UserCodeError,
    VerifierError,
)
from uirl_jax.types import TaskSpec, Trajectory
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted.http import equal_secrets

HOST = "127.0.0.1"
_MAX_BODY_BYTES = 64 * 1024
_SHUTDOWN_S = 2.0
_FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass
class Saved:
    """One demonstration on disk."""

    path: Path
    trajectory: Trajectory


class Recorder:
    """What is being demonstrated, one episode after the other.

    Args:
      open_next: opens a session of a task.
      task_at: the task of the n-th instance.
      save: writes a trajectory; raises ShardError or RecordError where it cannot.
      episodes: how many are to be saved.
    """

    def __init__(
        self,
        open_next: Callable[[TaskSpec], Awaitable[Demonstration]],
        task_at: Callable[[int], TaskSpec],
        save: Callable[[Trajectory], Path],
        episodes: int,
    ) -> None:
        self._open_next, self._task_at, self._save = open_next, task_at, save
        self._episodes = episodes
        self._instance = 0
        self._screens = 0  # what the page asks for next is another image
        self._lock = asyncio.Lock()
        self.saved: list[Saved] = []
        self.finished = asyncio.Event()
        self.demonstration: Demonstration | None = None

    async def open(self) -> None:
        """A session of the instance that is due. Raises VerifierError, UserCodeError."""
        self.demonstration = await self._open_next(self._task_at(self._instance))
        self._screens += 1

    async def close(self) -> None:
        if self.demonstration is not None:
            demonstration, self.demonstration = self.demonstration, None
            await demonstration.close()

    async def gesture(self, body: dict[str, object]) -> dict[str, Any]:
        """Does what a gesture means, if it was made on what is shown now; the state after it."""
        async with self._lock:
            demonstration = self.demonstration
            if demonstration is None:
                return self.state("there is no session")
            if body.get("screen") != self._screens:
                return self.state("that was meant for an earlier screen; nothing was done")
            session = demonstration.session
            try:
                action = gestures.read(body, (session.width_px, session.height_px))
                await demonstration.act(action)
                message = ""
            except ActionError as error:
                message = str(error)
            self._screens += 1  # also then: a drag may have moved the pointer before it was refused
            return self.state(message)

    async def end(self, how: str) -> dict[str, Any]:
        """Ends the episode: "save" it, start it "again", or "skip" this instance."""
        async with self._lock:
            if how == "save":
                if self.demonstration is None:
                    return self.state("there is nothing to save")
                try:
                    trajectory = self.demonstration.trajectory()
                    self.saved.append(Saved(self._save(trajectory), trajectory))
                except (ActionError, RecordError, ShardError) as error:
                    return self.state(str(error))
            elif how not in ("again", "skip"):
                return self.state(f"{how[:40]!r} is none of save, again, skip")
            await self.close()
            self._instance += how != "again"
            if len(self.saved) >= self._episodes:
                self.finished.set()
                return self.state()
            try:
                await self.open()
            except (VerifierError, UserCodeError) as error:
                return self.state(f"no session: {error}")
            return self.state()

    def state(self, message: str = "") -> dict[str, Any]:
        """All that the page shows."""
        common = {
            "message": message,
            "saved": [saved.path.name for saved in self.saved],
            "episodes": self._episodes,
            "finished": self.finished.is_set(),
            "screen": self._screens,
        }
        shown = self.demonstration
        if shown is None:
            return {**common, "open": False}
        return {
            **common,
            "open": True,
            "message": message or shown.message,
            "task": shown.task.name,
            "seed": shown.task.seed,
            "variant": shown.task.variant,
            "max_turns": shown.task.max_turns,
            "instruction": shown.session.instruction,
            "width": shown.session.width_px,
            "height": shown.session.height_px,
            "turns": shown.turns,
            "ended": shown.ended is not End.NOT_YET,
            "done": shown.progress["done"],
            "reward": shown.progress["reward"],
            "solved": shown.solved,
        }


def _routes(recorder: Recorder) -> list[web.RouteDef]:
    async def file(request: web.Request) -> web.Response:
        name, content_type = _FILES[request.match_info.get("file", "")]
        text = (Path(__file__).parent / name).read_text(encoding="utf-8")
        return web.Response(text=text, content_type=content_type)

    async def screen(request: web.Request) -> web.Response:
        if recorder.demonstration is None:
            raise web.HTTPNotFound
        return web.Response(body=recorder.demonstration.screenshot, content_type="image/png")

    async def state(request: web.Request) -> web.Response:
        return web.json_response(recorder.state())

    async def gesture(request: web.Request) -> web.Response:
        return web.json_response(await recorder.gesture(await _body(request)))

    async def end(request: web.Request) -> web.Response:
        return web.json_response(await recorder.end(str((await _body(request)).get("how"))))

    return [
        web.get("/{token}/", file),
        web.get("/{token}/{file:page\\.(?:css|js)}", file),
        web.get("/{token}/screen", screen),
        web.get("/{token}/state", state),
        web.post("/{token}/gesture", gesture),
        web.post("/{token}/end", end),
    ]


async def _body(request: web.Request) -> dict[str, object]:
    # A page of another origin cannot send this type without asking first, and is told no.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        return untrusted_json.parse(await request.read())
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body {error}") from error


def _guard(token: str) -> Handler:
    """Only the person who was told the path, on a page of ours."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.match_info.get("token", "")
        named = request.host.partition(":")[0]  # request.url raises on what is no address
        if named not in (HOST, "localhost") or not equal_secrets(given, token):
            raise web.HTTPNotFound
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.host}":
            raise web.HTTPForbidden
        response = await handler(request)
        response.headers.update(_HEADERS)
        return response

    return guard


@contextlib.asynccontextmanager
async def serve(recorder: Recorder, port: int = 0) -> AsyncIterator[str]:
    """Serves the page while the context is open; yields its address.

    Raises: ConfigError where the port cannot be had.
    """
    token = secrets.token_urlsafe(16)
    app = web.Application(middlewares=[_guard(token)], client_max_size=_MAX_BODY_BYTES)
    app.add_routes(_routes(recorder))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error}"
            raise ConfigError(
                f"--port={port}: the port {why}; give another one, or 0 for any"
            ) from error
        yield f"http://{HOST}:{runner.addresses[0][1]}/{token}/"
    finally:
        await runner.cleanup()
