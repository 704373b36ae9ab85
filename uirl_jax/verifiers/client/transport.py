"""HTTP to one verifier: one call in, checked bytes out.

`client` knows what the calls mean. Every fault (no answer, a late, endless, compressed or
redirected one, HTML) raises a VerifierError that says what, where and what to do, within the
time-out and in bounded memory. Only this module retries. In some dialects typed text is part of the
URL, so no message quotes a query.
"""

import asyncio
import dataclasses
import random
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from uirl_jax.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestRefusedError,
    VerifierError,
    VerifierFullError,
)
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted.http import (
    check_base_url,
    check_encoding,
    open_session,
    read_body,
    retry_after_s,
)
from uirl_jax.untrusted.images import MAX_PIXELS

JSON_TYPE = "application/json"
_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


def _seconds(default: float) -> Any:
    return dataclasses.field(default=default, metadata={"above": 0.0, "max": 86_400.0})


def _size(default: int, most: int = 2**30) -> Any:
    return dataclasses.field(default=default, metadata={"min": 1, "max": most})


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """What an answer may cost."""

    # Of one attempt.
    connect_timeout_s: float = _seconds(5.0)
    read_timeout_s: float = _seconds(10.0)  # of silence; attempt_timeout_s ends a slow drip
    attempt_timeout_s: float = _seconds(15.0)  # one attempt, besides the delay that it asks for
    create_timeout_s: float = _seconds(120.0)  # real desktops take tens of seconds to start
    # Of a request that failed and may be sent again.
    attempts: int = dataclasses.field(default=3, metadata={"min": 1, "max": 100})
    # Before the second attempt; doubled for each further one, with jitter.
    backoff_s: float = _seconds(0.2)
    max_retry_after_s: float = _seconds(5.0)  # of what a server asks for
    # Larger screenshots are refused before they are read.
    max_image_bytes: int = _size(16 * 1024 * 1024)
    # Told by an image's header, before it is decoded.
    max_image_pixels: int = _size(MAX_PIXELS, MAX_PIXELS)
    # Of any answer but a screenshot.
    max_json_bytes: int = _size(1024 * 1024)
    # A longer instruction is refused.
    max_instruction_chars: int = _size(4096)
    # At a time, to one verifier.
    max_connections: int = dataclasses.field(default=256, metadata={"min": 1, "max": 65_536})


class _TryAgain(Exception):
    """An attempt that failed in a way that may pass."""

    def __init__(
        self, reason: str, *, refused: bool = False, wait_s: float = 0.0, answered: bool = False
    ) -> None:
        super().__init__(reason)
        self.refused = refused  # no connection, or told to wait: the server has done nothing
        self.wait_s = wait_s
        self.answered = answered  # a server is there


class Transport:
    """The connections to one server. An async context manager.

    Args:
      base_url: http or https, host, port, perhaps a path. All requests go there and nowhere else.
      keep_alive_s: an idle connection is dropped after so long, before the server drops it: a
        request on a connection that is being closed is lost, and an act must not be sent again.
      token: sent as a bearer token.

    Raises:
      VerifierError: base_url is not valid. `send` and `json` raise nothing else, except for
        cancellation.
    """

    def __init__(
        self,
        base_url: str,
        limits: ClientLimits,
        *,
        keep_alive_s: float = 4.0,
        token: str | None = None,
    ) -> None:
        self.base = check_base_url(base_url, "verifier address", VerifierError)
        self.limits = limits
        self._keep_alive_s = keep_alive_s
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = open_session(
            max_connections=self.limits.max_connections,
            keep_alive_s=self._keep_alive_s,
            headers=self.headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def json(self, method: str, path: tuple[str, ...], **request: Any) -> dict[str, Any]:
        """The JSON object that a call answers with; arguments as in `send`."""
        data = await self.send(
            method,
            path,
            content_types=frozenset({JSON_TYPE}),
            max_bytes=self.limits.max_json_bytes,
            **request,
        )
        try:
            return untrusted_json.parse(data)
        except ValueError as error:
            url = self.base.joinpath(*path)
            raise VerifierError(f"{method} {url}: the answer {error}") from error

    async def send(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        again_if: Literal["refused", "failed"],
        extra_s: float = 0.0,
        **request: Any,
    ) -> bytes:
        """One call with its retries.

        Args:
          path: parts below base_url; ("",) is its root.
          again_if: "refused" (no connection, or told to wait), or "failed" (anything that may
            pass).
          extra_s: time that the call itself asks for, on top of an attempt's; may be negative.
          request: content_types, max_bytes, query, body, gone_is_fine, opens_session.

        Raises:
          InvalidRequestError: a 4xx that the same request would get again.
          VerifierFullError: with opens_session, a 429: there are as many sessions as fit.
          RequestRefusedError: the server has not done what was asked: no connection, or a 4xx.
          VerifierError: anything else; whether it did is not known.
        """
        limits = self.limits
        where = f"{method} {self.base.joinpath(*path)}"
        timeout = aiohttp.ClientTimeout(
            total=limits.attempt_timeout_s + extra_s,
            connect=limits.connect_timeout_s,
            sock_connect=limits.connect_timeout_s,
            # A call may be given less than an attempt, so extra_s may be negative.
            sock_read=limits.read_timeout_s + max(0.0, extra_s),
        )
        for attempt in range(1, limits.attempts + 1):
            try:
                return await self._attempt(method, path, where, timeout=timeout, **request)
            except _TryAgain as failure:
                allowed = again_if == "failed" or failure.refused
                if not allowed or attempt == limits.attempts:
                    tries = "" if attempt == 1 else f" ({attempt} attempts)"
                    kind = RequestRefusedError if failure.refused else VerifierError
                    hint = "" if failure.answered else "; is the verifier running there?"
                    raise kind(f"{where}: {failure}{tries}{hint}") from failure
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
        body: dict[str, Any] | None = None,
        gone_is_fine: bool = False,
        opens_session: bool = False,
    ) -> bytes:
        if self._http is None:
            raise VerifierError(f"{where}: the client is not open (use `async with`)")
        url = self.base.joinpath(*path).with_query(query)  # encodes the "+" of ctrl+c
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
                if response.status == 429 and opens_session:
                    answer = await _refusal(response)
                    raise VerifierFullError(
                        f"{where}: HTTP 429{_reason(answer)}",
                        _capacity(answer),
                        min(retry_after_s(response), self.limits.max_retry_after_s),
                    )
                if response.status in _RETRIED_STATUS:
                    wait_s = retry_after_s(response)
                    # Told when to come back: nothing was done, and an act may be sent again.
                    refused = response.status == 429 and wait_s > 0.0
                    reason = f"HTTP {response.status}{_reason(await _refusal(response))}"
                    raise _TryAgain(reason, refused=refused, wait_s=wait_s, answered=True)
                if response.status != 200:
                    kind = InvalidRequestError if 400 <= response.status < 500 else VerifierError
                    if response.status in (404, 405):
                        kind = NotFoundError
                    detail = _reason(await _refusal(response))
                    raise kind(f"{where}: HTTP {response.status}{detail}")
                check_encoding(response, where, VerifierError)
                if response.content_type not in content_types:
                    raise VerifierError(
                        f"{where}: an answer of type "
                        f"{untrusted_json.printable(response.content_type)!r}, "
                        f"expected {' or '.join(sorted(content_types))}"
                    )
                return await read_body(response, max_bytes, where, VerifierError)
        except aiohttp.ClientConnectorError as error:
            raise _TryAgain("cannot connect", refused=True) from error
        except aiohttp.ConnectionTimeoutError as error:  # also while all connections are in use
            raise _TryAgain(f"no connection within {timeout.connect:g} s", refused=True) from error
        except TimeoutError as error:
            raise _TryAgain(f"no complete answer within {timeout.total:g} s") from error
        except aiohttp.ClientResponseError as error:  # its text has the whole URL in it
            reason = untrusted_json.printable(f"{type(error).__name__}: {error.message}", 160)
            raise _TryAgain(reason) from error
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


async def _refusal(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of a refusal; empty if there is no short and clean one."""
    if response.content_type != JSON_TYPE or "Content-Encoding" in response.headers:
        return {}
    body = await response.content.read(4096)
    try:
        return untrusted_json.parse(body)
    except ValueError:
        return {}


def _reason(answer: dict[str, Any]) -> str:
    detail = answer.get("detail")
    return f" ({untrusted_json.printable(detail, 200)})" if isinstance(detail, str) else ""


def _capacity(answer: dict[str, Any]) -> int:
    """Sessions that a full server says it runs at a time; 0: it does not say."""
    capacity = answer.get("capacity")
    if not isinstance(capacity, int) or isinstance(capacity, bool):
        return 0
    return max(capacity, 0)
