"""The open sessions of the bundled verifier and the handlers of the calls on them.

Between HTTP (`server`, which has already decided who may speak) and the desktop. A handler's
ValueError is told to the caller as a 422. Not here: what a task is (`desktop`), the fields of an
action (`wire`).

Calls (parameters in the query; `act` also as a JSON body by POST: typed text stays out of URLs):
    GET    /                          name and version
    GET    /status                    sessions, running and lately ended
    POST   /session                   type, n=1, seed, variant -> session_ids, sessions
    GET    /session/{id}              info; also for a while after its end
    GET    /session/{id}/act          action_type, x, y, x2, y2, text, keys, direction, amount,
    POST   /session/{id}/act          seconds, delay=1.0, format=png, request_id -> image
    GET    /session/{id}/screenshot   format=png -> image
    GET    /session/{id}/progress     counts of the task, done, reward
    DELETE /session/{id}              {"deleted": id}
Errors are {"detail": reason} with 401, 403, 404, 413, 422, 429 or 500.
"""

import asyncio
import collections
import dataclasses
import io
import logging
import secrets
import time
from collections.abc import Sequence

from aiohttp import web
from PIL import Image

from uirl_jax import untrusted_json
from uirl_jax.errors import VerifierError
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers import desktop, wire

logger = logging.getLogger(__name__)

_ENDED_KEPT = 256
_ANSWERS_KEPT = 4  # per session: a client repeats its latest request, never an older one


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """What a caller can make grow."""

    max_sessions: int = 256  # open at once; each is some kilobytes and its last few answers
    max_body_bytes: int = 64 * 1024
    max_delay_s: float = 10.0  # of one action
    idle_time_s: float = 1800.0  # longer than any compilation that the actor waits for


@dataclasses.dataclass
class _OpenSession:
    session_id: str
    desktop: desktop.Session
    touched_s: float  # monotonic
    start_time_unix_s: float = dataclasses.field(default_factory=time.time)
    action_count: int = 0
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    answers: collections.OrderedDict[str, tuple[bytes, str]] = dataclasses.field(
        default_factory=collections.OrderedDict
    )  # request_id -> body, content type

    def info(self, stop_time_unix_s: float | None = None) -> dict[str, object]:
        return {
            "id": self.session_id,
            "start_time": self.start_time_unix_s,
            "display": None,  # G1 names its X display here; this desktop has none
            "action_count": self.action_count,
            "stop_time": stop_time_unix_s,
        }


class Sessions:
    """Who is open, and one handler a call."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._open: dict[str, _OpenSession] = {}
        self._ended: collections.OrderedDict[str, dict[str, object]] = collections.OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        session = "/session/{id}"
        return [
            web.get("/", self.root),
            web.get("/status", self.status),
            web.post("/session", self.create),
            web.get(session, self.info),
            web.delete(session, self.delete),
            web.get(f"{session}/act", self.act, allow_head=False),
            web.post(f"{session}/act", self.act),
            web.get(f"{session}/screenshot", self.screenshot),
            web.get(f"{session}/progress", self.progress),
        ]

    async def root(self, request: web.Request) -> web.Response:
        return web.Response(text="uirl_jax verifier: Session Server, dialect G1+\n")

    async def status(self, request: web.Request) -> web.Response:
        running = {key: session.info() for key, session in self._open.items()}
        return web.json_response({**self._ended, **running})

    async def create(self, request: web.Request) -> web.Response:
        query = _query(request, ("type", "n", "seed", "variant"))
        count = wire.whole_number("n", query.get("n", "1"))
        seed = secrets.randbelow(2**31)
        if "seed" in query:
            seed = wire.whole_number("seed", query["seed"])
        if not 1 <= count <= self._limits.max_sessions:
            raise ValueError(f"n is {count}, allowed: 1-{self._limits.max_sessions}")
        if len(self._open) + count > self._limits.max_sessions:
            raise refusal(
                web.HTTPTooManyRequests,
                f"{len(self._open)} of at most {self._limits.max_sessions} sessions are open: "
                "delete those that are done",
            )
        task = TaskSpec(query.get("type", ""), seed, query.get("variant", ""))
        try:
            # One seed for all n: they are n attempts at one task instance.
            desktops = [desktop.open_session(task) for _ in range(count)]
        except VerifierError as error:
            raise ValueError(untrusted_json.printable(str(error), 300)) from error
        sessions = []
        for opened in desktops:
            session_id = secrets.token_hex(8)
            self._open[session_id] = _OpenSession(session_id, opened, time.monotonic())
            sessions.append(
                {
                    "id": session_id,
                    "instruction": opened.instruction,
                    "screen_width": opened.width_px,
                    "screen_height": opened.height_px,
                }
            )
        logger.info(
            "event=create type=%s seed=%d n=%d open=%d", task.name, seed, count, len(self._open)
        )
        return web.json_response(
            {"session_ids": [session["id"] for session in sessions], "sessions": sessions}
        )

    async def info(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        if session_id in self._ended:
            return web.json_response(self._ended[session_id])
        return web.json_response(self._find(request).info())

    async def act(self, request: web.Request) -> web.Response:
        session = self._find(request)
        if request.method == "POST":
            fields = untrusted_json.parse(await request.read())
        else:
            fields = wire.read_query(_query(request))
        screen_size = (session.desktop.width_px, session.desktop.height_px)
        call = wire.read_call(fields, screen_size, self._limits.max_delay_s)
        async with session.lock:
            # Looked up under the lock: a repeated request waits for the first one's answer.
            if call.request_id in session.answers:
                body, content_type = session.answers[call.request_id]
                return web.Response(body=body, content_type=content_type)
            if call.action is not None:
                session.desktop.act(call.action)
                session.action_count += 1
                await asyncio.sleep(call.delay_s)
            answer = _image_response(session, call.image_format)
            if call.request_id:
                session.answers[call.request_id] = (answer.body, answer.content_type)
                if len(session.answers) > _ANSWERS_KEPT:
                    session.answers.popitem(last=False)
            session.touched_s = time.monotonic()
        kind = "screenshot" if call.action is None else call.action.kind
        logger.debug("event=act session=%s kind=%s", session.session_id, kind)  # never its text
        return answer

    async def screenshot(self, request: web.Request) -> web.Response:
        query = _query(request, ("format",))
        image_format = wire.read_image_format(query.get("format", "png"))
        session = self._find(request)
        async with session.lock:
            return _image_response(session, image_format)

    async def progress(self, request: web.Request) -> web.Response:
        session = self._find(request)
        async with session.lock:
            return web.json_response(session.desktop.progress())

    async def delete(self, request: web.Request) -> web.Response:
        session = self._find(request)
        self._end(session)
        return web.json_response({"deleted": session.session_id})

    async def sweep(self) -> None:
        """Ends sessions that nobody has touched for idle_time_s. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._limits.idle_time_s / 4))
            oldest_s = time.monotonic() - self._limits.idle_time_s
            for session in list(self._open.values()):
                if session.touched_s < oldest_s and not session.lock.locked():
                    logger.warning("event=idle_end session=%s", session.session_id)
                    self._end(session)

    def _end(self, session: _OpenSession) -> None:
        if self._open.pop(session.session_id, None) is None:
            return
        self._ended[session.session_id] = session.info(stop_time_unix_s=time.time())
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def _find(self, request: web.Request) -> _OpenSession:
        session = self._open.get(request.match_info["id"])
        if session is None:
            raise refusal(web.HTTPNotFound, "Session not found")
        session.touched_s = time.monotonic()
        return session


def encode_image(image: Image.Image, image_format: str) -> bytes:
    """A screenshot as bytes, one of wire.IMAGE_FORMATS.

    Quick rather than small. PNG takes 1 ms for 224x168 and 3 ms for 448x336, short enough to stay
    on the event loop: a hop to a thread and back is no shorter.
    """
    buffer = io.BytesIO()
    if image_format == "png":
        image.save(buffer, "PNG", compress_level=1)
    elif image_format == "jpeg":
        image.save(buffer, "JPEG", quality=90)
    else:
        image.save(buffer, "WEBP", quality=90, method=0)
    return buffer.getvalue()


def _image_response(session: _OpenSession, image_format: str) -> web.Response:
    body = encode_image(session.desktop.screenshot(), image_format)
    return web.Response(body=body, content_type=wire.IMAGE_FORMATS[image_format])


def _query(request: web.Request, known: Sequence[str] | None = None) -> dict[str, str]:
    """The query as a dict; ValueError for a parameter given twice or not known."""
    query = request.query
    for name in query:
        if len(query.getall(name)) > 1:
            raise ValueError(f"{untrusted_json.printable(name)!r} is given twice")
        if known is not None and name not in known:
            shown = untrusted_json.printable(name)
            raise ValueError(f"unknown parameter {shown!r}, known: {', '.join(known)}")
    return dict(query)


def refusal(kind: type[web.HTTPException], detail: str, **options: object) -> web.HTTPException:
    body = web.json_response({"detail": detail}).text
    return kind(text=body, content_type="application/json", **options)
