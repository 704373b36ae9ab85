"""Servers that speak the dialects of the field, with the hermetic desktop behind them.

Routes, answers and errors are those of TobiasNorlund/ui-verifiers (g1: ui_verifiers/server.py of
f82ccc2; g2: tasks/simple_data_entry of f53cfb2, g2a: of 88c365e^; g3: proxy/proxy.py of f53cfb2),
with their keep-alive. Only the sheet is the desktop's own.
"""

import asyncio
import contextlib
import datetime
import io
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.tasks import desktop

SHEET = TaskSpec("desktop/data_entry", seed=5, variant="rows=3,columns=1")
_KINDS = {"mouse_move": "move", "left_click": "click", "right_click": "right_click"}
_KINDS |= {"double_click": "double_click", "triple_click": "triple_click"}
_NEEDS = {"type": "text", "keys": "keys", "scroll": "direction", **dict.fromkeys(_KINDS, "x")}


class Screen:
    """One desktop, acted upon as `computer.act` does."""

    def __init__(self) -> None:
        self.desktop = desktop.open_session(SHEET)
        self.cursor = (100, 100)
        self.acts: list[dict[str, str]] = []

    def act(self, query: dict[str, str]) -> web.Response | None:
        """Applies an action; the error response that FastAPI would give, or None."""
        kind = query["action_type"]
        if kind == "screenshot":
            return None
        if kind not in _NEEDS:
            detail = [{"type": "enum", "loc": ["query", "action_type"]}]
            return web.json_response({"detail": detail}, status=422)
        self.acts.append(query)
        # pyautogui looks where the pointer is before it does anything, and raises in a corner.
        if self.cursor in self._corners() or _NEEDS[kind] not in query:
            return _internal_error()
        if kind in _KINDS:
            self.cursor = (int(query["x"]), int(query["y"]))
            if self.cursor in self._corners():
                return _internal_error()
            self._apply(Action(_KINDS[kind], x=self.cursor[0], y=self.cursor[1]))
        elif kind == "type":
            self._apply(Action("type", text=query["text"]))
        elif kind == "keys":
            keys = "+".join(key.strip().lower() for key in query["keys"].split("+"))
            self._apply(Action("keys", keys=keys))
        return None

    def png(self) -> web.Response:
        buffer = io.BytesIO()
        self.desktop.screenshot().save(buffer, "PNG", compress_level=1)
        return web.Response(body=buffer.getvalue(), content_type="image/png")

    def progress(self, counting: str) -> dict[str, object]:
        counts = self.desktop.judge.counts()
        if counting == "g2a":
            right = len(counts.pop("submitted_row_indices"))
            return {"num_correct_submissions": right, **counts}
        return counts

    def _apply(self, action: Action) -> None:
        # The desktop ends an episode by itself; these servers go on for ever.
        event = self.desktop.window.apply(action)
        if event is not None:
            self.desktop.judge.handle(event, self.desktop.window)

    def _corners(self) -> set[tuple[int, int]]:
        right, low = self.desktop.width_px - 1, self.desktop.height_px - 1
        return {(0, 0), (right, 0), (0, low), (right, low)}


def _internal_error() -> web.Response:
    return web.Response(text="Internal Server Error", status=500)


Fault = Callable[[web.Request], web.StreamResponse | None]


class Container:
    """g2a or g2b: one session, which cannot be reset."""

    def __init__(self, counting: str, fault: Fault = lambda request: None) -> None:
        self.screen, self.counting, self.fault = Screen(), counting, fault
        self.requests: list[str] = []  # raw path and query
        self._start_time = datetime.datetime.now()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root),
            web.get("/act", self.act),
            web.get("/progress", self.progress),
        ]

    async def root(self, request: web.Request) -> web.Response:
        now = datetime.datetime.now()
        return web.Response(
            text="UI Verifiers Session Server\nSession Type: Simple Data Entry\n"
            f"Start time: {self._start_time}\nDuration: {now - self._start_time}\n"
        )

    async def act(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.raw_path)
        query = dict(request.query)
        error = self.screen.act(query)
        faulty = self.fault(request)  # after it was applied
        if error is not None or faulty is not None:
            return error or faulty
        if query["action_type"] != "screenshot":
            await asyncio.sleep(float(query.get("delay", 1.0)))
        return self.screen.png()

    async def progress(self, request: web.Request) -> web.Response:
        return web.json_response(self.screen.progress(self.counting))


class Sessions:
    """g1: many sessions with whole numbers for ids; `counting` None is the version whose progress
    was not implemented."""

    def __init__(self, counting: str | None = "g2a") -> None:
        self.counting = counting
        self.open: dict[int, Screen] = {}
        self.infos: dict[int, dict[str, object]] = {}

    def routes(self) -> list[web.RouteDef]:
        session = r"/session/{id:\d+}"
        return [
            web.get("/", self.root),
            web.get("/status", self.status),
            web.post("/session", self.create),
            web.get(session, self.info),
            web.delete(session, self.delete),
            web.get(f"{session}/act", self.act),
            web.get(f"{session}/screenshot", self.screenshot),
            web.get(f"{session}/progress", self.progress),
        ]

    async def root(self, request: web.Request) -> web.Response:
        return web.Response(text="UI Verifiers Server v0.1.0")

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self.infos)

    async def create(self, request: web.Request) -> web.Response:
        if request.query.get("type", "simple_data_entry") != "simple_data_entry":
            return web.json_response({"detail": [{"type": "enum"}]}, status=422)
        ids = []
        for _ in range(int(request.query.get("n", "1"))):
            ids.append(len(self.infos) + 1)
            self.open[ids[-1]] = Screen()
            self.infos[ids[-1]] = {"id": ids[-1], "action_count": 0, "stop_time": None}
        return web.json_response({"session_ids": ids})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self.infos[int(request.match_info["id"])])

    async def delete(self, request: web.Request) -> web.Response:
        number = int(request.match_info["id"])
        if self.open.pop(number, None) is None:
            return self._gone()
        self.infos[number]["stop_time"] = datetime.datetime.now().isoformat()
        return web.json_response({"deleted": number})

    async def act(self, request: web.Request) -> web.StreamResponse:
        screen = self._find(request)
        if screen is None:
            return self._gone()
        query = dict(request.query)
        if query["action_type"] not in (*_KINDS, "screenshot"):
            return web.json_response({"detail": [{"type": "enum"}]}, status=422)
        error = screen.act(query)
        if error is not None:
            return error
        await asyncio.sleep(float(query.get("delay", 1.0)))
        return screen.png()

    async def screenshot(self, request: web.Request) -> web.Response:
        screen = self._find(request)
        return self._gone() if screen is None else screen.png()

    async def progress(self, request: web.Request) -> web.Response:
        screen = self._find(request)
        if screen is None:
            return self._gone()
        if self.counting is None:
            return _internal_error()
        return web.json_response(screen.progress(self.counting))

    def _find(self, request: web.Request) -> Screen | None:
        return self.open.get(int(request.match_info["id"]))

    def _gone(self) -> web.Response:
        return web.json_response({"detail": "Session not found"}, status=404)


class Proxy:
    """g3: the way to containers, by the id of their session."""

    def __init__(self, pods: dict[str, str], timeout_s: float = 30.0) -> None:
        self.pods, self._timeout_s = pods, timeout_s

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/proxy/{session}/{endpoint:.*}", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        target = self.pods.get(request.match_info["session"])
        if target is None:
            return web.Response(text="Pod not found", status=404)
        url = f"{target}/{request.match_info['endpoint']}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self._timeout_s)) as http,
                http.request(request.method, url, params=request.query) as response,
            ):
                body = await response.read()
                return web.Response(
                    body=body, status=response.status, content_type=response.content_type
                )
        except aiohttp.ClientConnectorError as error:
            return web.Response(text=f"Failed to connect to pod: {error}", status=502)
        except Exception as error:
            return web.Response(text=str(error), status=500)


@contextlib.asynccontextmanager
async def serving(
    server: Container | Sessions | Proxy, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Its base URL, while the context is open."""
    app = web.Application()
    app.add_routes(server.routes())
    keep_alive_s = 20.0 if isinstance(server, Proxy) else 5.0
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=0.5, keepalive_timeout=keep_alive_s
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
