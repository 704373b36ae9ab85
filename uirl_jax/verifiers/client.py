"""The actor's way to a verifier: HTTP in the dialect G1+, and no belief in what comes back.

Opens sessions, acts, fetches screenshots and progress. Whatever goes wrong (no answer, a late, an
endless, a compressed or a redirected one, HTML, another image size, a reward that is no number)
is a VerifierError that says what, where and what to do, within its time and in bounded memory: an
`env_error` of the episode, never a crash and never a reward. Retries live here and nowhere else.
Not here: what an episode is (`actor.rollout`) and how progress becomes reward.

What is sent again: reads, DELETE, and an `act` with a request_id, which the server applies once.
`POST /session` only when the connection was refused, since a lost answer would leak a session. An
`act` without a request_id never.
"""

import asyncio
import dataclasses
import math
import random
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import aiohttp

from uirl_jax import untrusted_json
from uirl_jax.errors import ImageError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted_http import check_base_url, read_body, retry_after_s
from uirl_jax.verifiers import wire
from uirl_jax.vision_inputs import decode_image

_JSON_TYPE = "application/json"
_IMAGE_TYPES = frozenset(wire.IMAGE_FORMATS.values())
_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """What an answer may cost."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0  # of silence; attempt_timeout_s is what ends a slow drip
    attempt_timeout_s: float = 15.0  # one attempt as a whole, besides the delay that it asks for
    create_timeout_s: float = 120.0  # real desktops take tens of seconds to start
    attempts: int = 3
    backoff_s: float = 0.2  # before the second attempt; doubled for each further one, with jitter
    max_retry_after_s: float = 5.0  # more than that of patience is not to be had
    max_image_bytes: int = 16 * 1024 * 1024
    max_image_pixels: int = 16_000_000
    max_json_bytes: int = 1024 * 1024
    max_instruction_chars: int = 4096
    max_connections: int = 256


@dataclasses.dataclass(frozen=True)
class Session:
    """One session that the verifier has opened for us."""

    id: str
    instruction: str
    width_px: int
    height_px: int


class _TryAgain(Exception):
    """An attempt that failed in a way that may pass."""

    def __init__(self, reason: str, *, refused: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.refused = refused  # no connection: the server has not seen the request
        self.wait_s = wait_s


class VerifierClient:
    """One verifier. An async context manager; leaving it closes the connections, not the sessions.

    Args:
      base_url: http or https, host, port, perhaps a path. All requests go there and nowhere else.
      delay_s: what every act asks the server to wait before its screenshot; 0 suits the hermetic
        desktop, whose screen is never behind.
      image_format: png, jpeg or webp.
      token: sent as a bearer token.

    Raises:
      VerifierError: base_url or image_format is none. All methods raise VerifierError and, but for
        cancellation, nothing else.
    """

    def __init__(
        self,
        base_url: str,
        *,
        limits: ClientLimits | None = None,
        delay_s: float = 0.0,
        image_format: str = "png",
        token: str | None = None,
    ) -> None:
        self._base = check_base_url(base_url, "verifier address", VerifierError)
        self._limits = limits or ClientLimits()
        self._delay_s = delay_s
        try:
            self._image_format = wire.read_image_format(image_format)
        except ValueError as error:
            raise VerifierError(f"verifier client: {error}") from error
        self._headers = {"Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._sessions: dict[str, Session] = {}
        self._http: aiohttp.ClientSession | None = None
        # One thread: decode_image guards itself through `warnings`, whose state is the process's.
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="verifier-image")

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._limits.max_connections,
                keepalive_timeout=4.0,  # uvicorn drops an idle connection after 5 s
            ),
            auto_decompress=False,  # 1 MB of gzip became 1 GiB with the default
            trust_env=False,  # no proxy and no netrc from the environment
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._decoder.shutdown(wait=False)
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def create(self, task: TaskSpec) -> Session:
        """Opens a session of the task. The caller deletes it in a `finally`."""
        query = {"type": task.name, "n": "1", "seed": str(task.seed), "variant": task.variant}
        answer = await self._json(
            "POST",
            ("session",),
            query=query,
            again_if="refused",
            extra_s=self._limits.create_timeout_s - self._limits.attempt_timeout_s,
        )
        session = self._read_session(answer)
        self._sessions[session.id] = session
        return session

    async def screenshot(self, session_id: str) -> bytes:
        """The screen as an encoded image of the announced size, decoded once to be sure."""
        return await self._image(
            "GET", session_id, "screenshot", query={"format": self._image_format}, again_if="failed"
        )

    async def act(self, session_id: str, action: Action, request_id: str | None = None) -> bytes:
        """Applies an action and returns the screen after it.

        Args:
          request_id: new for every action; the server applies it once however often it arrives.
            Without one, the action goes by GET as older dialects have it, and is never sent again.
        """
        fields = {
            **wire.action_fields(action),
            "delay": self._delay_s,
            "format": self._image_format,
        }
        wait_s = self._delay_s + (action.seconds or 0.0)
        if request_id is None:
            query = {name: str(value) for name, value in fields.items()}
            return await self._image(
                "GET", session_id, "act", query=query, again_if="never", extra_s=wait_s
            )
        _check_id(request_id, "request_id")
        body = {**fields, "request_id": request_id}
        return await self._image(
            "POST", session_id, "act", body=body, again_if="failed", extra_s=wait_s
        )

    async def progress(self, session_id: str) -> dict[str, object]:
        """What the task counts, as it came. `done` is a bool and `reward` a finite float or None,
        where the dialect has them."""
        path = ("session", _check_id(session_id), "progress")
        progress = await self._json("GET", path, again_if="failed")
        where = f"progress of session {session_id} at {self._base}"
        if not isinstance(progress.get("done", False), bool):
            raise VerifierError(f"{where}: done is no boolean")
        reward = progress.get("reward")
        if reward is not None:
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                raise VerifierError(f"{where}: reward is a {type(reward).__name__}, not a number")
            progress["reward"] = float(reward)
            if not math.isfinite(progress["reward"]):
                raise VerifierError(f"{where}: reward is not finite")
        return progress

    async def delete(self, session_id: str) -> None:
        """Ends a session; one that is gone already is fine."""
        path = ("session", _check_id(session_id))
        self._sessions.pop(session_id, None)
        await self._send(
            "DELETE",
            path,
            content_types=frozenset({_JSON_TYPE}),
            max_bytes=self._limits.max_json_bytes,
            again_if="failed",
            gone_is_fine=True,
        )

    def _read_session(self, answer: dict[str, object]) -> Session:
        where = f"POST {self._base}/session"
        sessions = answer.get("sessions")
        if (
            not isinstance(sessions, list)
            or len(sessions) != 1
            or not isinstance(sessions[0], dict)
        ):
            raise VerifierError(
                f"{where}: the answer has no `sessions` with one entry; is this a G1+ server?"
            )
        entry = sessions[0]
        session_id, instruction = entry.get("id"), entry.get("instruction")
        if not isinstance(session_id, str):
            raise VerifierError(f"{where}: a session's id is no string")
        _check_id(session_id, f"{where}: a session's id")
        if session_id in self._sessions:
            raise VerifierError(f"{where}: the id {session_id} is taken by an open session")
        if (
            not isinstance(instruction, str)
            or not 1 <= len(instruction) <= self._limits.max_instruction_chars
            or not instruction.replace("\n", " ").isprintable()
        ):
            raise VerifierError(
                f"{where}: the instruction is no printable text of "
                f"1-{self._limits.max_instruction_chars} characters"
            )
        size = (entry.get("screen_width"), entry.get("screen_height"))
        if not all(isinstance(px, int) and not isinstance(px, bool) and px > 0 for px in size):
            raise VerifierError(f"{where}: screen_width and screen_height are no positive integers")
        if size[0] * size[1] > self._limits.max_image_pixels:
            raise VerifierError(
                f"{where}: a screen of {size[0]}x{size[1]} pixels, "
                f"at most {self._limits.max_image_pixels} pixels are accepted"
            )
        return Session(session_id, instruction, *size)

    async def _image(self, method: str, session_id: str, call: str, **request: object) -> bytes:
        session = self._sessions.get(_check_id(session_id))
        if session is None:
            raise VerifierError(f"session {session_id} was not opened here, or is deleted")
        data = await self._send(
            method,
            ("session", session_id, call),
            content_types=_IMAGE_TYPES,
            max_bytes=self._limits.max_image_bytes,
            **request,
        )
        where = f"{method} {call} of session {session_id} at {self._base}"
        try:
            # In a thread: a large screenshot takes tens of milliseconds, and others wait meanwhile.
            size = await asyncio.get_running_loop().run_in_executor(
                self._decoder,
                lambda: decode_image(data, max_pixels=self._limits.max_image_pixels).size,
            )
        except ImageError as error:
            raise VerifierError(f"{where}: {error}") from error
        if size != (session.width_px, session.height_px):
            raise VerifierError(
                f"{where}: the image has {size[0]}x{size[1]} pixels, "
                f"the session announced {session.width_px}x{session.height_px}"
            )
        return data

    async def _json(
        self, method: str, path: tuple[str, ...], **request: object
    ) -> dict[str, object]:
        data = await self._send(
            method,
            path,
            content_types=frozenset({_JSON_TYPE}),
            max_bytes=self._limits.max_json_bytes,
            **request,
        )
        try:
            return untrusted_json.parse(data)
        except ValueError as error:
            url = self._base.joinpath(*path)
            raise VerifierError(f"{method} {url}: the answer {error}") from error

    async def _send(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        again_if: str,
        extra_s: float = 0.0,
        **request: object,
    ) -> bytes:
        """One call with its retries.

        Args:
          again_if: "never", "refused" (no connection), or "failed" (anything that may pass).
          extra_s: time that the call itself asks for, on top of an attempt's.
        """
        limits = self._limits
        where = f"{method} {self._base.joinpath(*path)}"
        timeout = aiohttp.ClientTimeout(
            total=limits.attempt_timeout_s + extra_s,
            connect=limits.connect_timeout_s,
            sock_connect=limits.connect_timeout_s,
            sock_read=limits.read_timeout_s + extra_s,
        )
        for attempt in range(1, limits.attempts + 1):
            try:
                return await self._attempt(method, path, where, timeout=timeout, **request)
            except _TryAgain as failure:
                allowed = again_if == "failed" or (again_if == "refused" and failure.refused)
                if not allowed or attempt == limits.attempts:
                    tries = "" if attempt == 1 else f" ({attempt} attempts)"
                    raise VerifierError(
                        f"{where}: {failure}{tries}; is the verifier running there?"
                    ) from failure
                backoff_s = limits.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff_s, min(failure.wait_s, limits.max_retry_after_s)))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self,
        method: str,
        path: tuple[str, ...],
        where: str,
        *,
        timeout: aiohttp.ClientTimeout,
        content_types: frozenset[str],
        max_bytes: int,
        query: dict[str, str] | None = None,
        body: dict[str, object] | None = None,
        gone_is_fine: bool = False,
    ) -> bytes:
        if self._http is None:
            raise VerifierError(f"{where}: the client is not open (use `async with`)")
        url = self._base.joinpath(*path).with_query(query)  # encodes the "+" of ctrl+c
        try:
            async with self._http.request(
                method,
                url,
                json=body,
                timeout=timeout,
                allow_redirects=False,
                middlewares=(_send_once(),),
            ) as response:
                if gone_is_fine and response.status == 404:
                    return b""
                if response.status in _RETRIED_STATUS:
                    raise _TryAgain(f"HTTP {response.status}", wait_s=retry_after_s(response))
                if response.status != 200:
                    raise VerifierError(f"{where}: HTTP {response.status}{await _detail(response)}")
                encoding = response.headers.get("Content-Encoding", "identity").lower()
                if encoding != "identity":
                    shown = untrusted_json.printable(encoding)
                    raise VerifierError(f"{where}: a body in {shown!r}, which was not asked for")
                if response.content_type not in content_types:
                    raise VerifierError(
                        f"{where}: an answer of type "
                        f"{untrusted_json.printable(response.content_type)!r}, "
                        f"expected {' or '.join(sorted(content_types))}"
                    )
                return await read_body(response, max_bytes, where, VerifierError)
        except aiohttp.ClientConnectorError as error:
            raise _TryAgain("cannot connect", refused=True) from error
        except TimeoutError as error:
            raise _TryAgain(f"no complete answer within {timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: aiohttp lets some malformed headers and URLs through as one.
            reason = untrusted_json.printable(f"{type(error).__name__}: {error}", 160)
            raise _TryAgain(reason) from error


def _send_once() -> aiohttp.ClientMiddlewareType:
    """Keeps aiohttp (3.14) from repeating a lost GET by itself: a GET act would click twice."""
    sent = False

    async def middleware(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        nonlocal sent
        if sent:
            raise aiohttp.ServerDisconnectedError
        sent = True
        return await handler(request)

    return middleware


async def _detail(response: aiohttp.ClientResponse) -> str:
    """The server's own reason for a refusal, as far as it gives a short and clean one."""
    if response.content_type != _JSON_TYPE or "Content-Encoding" in response.headers:
        return ""
    body = await response.content.read(4096)
    try:
        detail = untrusted_json.parse(body).get("detail")
    except ValueError:
        return ""
    return f" ({untrusted_json.printable(detail, 200)})" if isinstance(detail, str) else ""


def _check_id(text: str, what: str = "session id") -> str:
    if not wire.SESSION_ID.fullmatch(text):
        shown = untrusted_json.printable(text)
        raise VerifierError(f"{what} is {shown!r}, expected 1-64 letters, digits, _ or -")
    return text
