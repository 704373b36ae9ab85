"""HTTP calls to a sampling server: bounded in time, memory and number, and tried again where safe.

Below `openai`, which knows what the calls mean. Tried again are a connection that failed, 429 and
503; sampling has no side effect, so that a lost answer is nothing but lost work. A time-out is not
tried again: the server is slow, and would sample the same twice.
"""

import asyncio
import os
import random
from types import TracebackType
from typing import Any, Self

import aiohttp

from uirl_jax.engine.requests import OpenAIConfig
from uirl_jax.errors import ConfigError, EngineError
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted.http import (
    check_base_url,
    check_encoding,
    open_session,
    read_body,
    retry_after_s,
)

_RETRIED_STATUS = frozenset({429, 503})
_MAX_RETRY_AFTER_S = 30.0
_HINTS = {
    401: "; the key is wrong, or engine.openai.api_key_env names none",
    403: "; the key is wrong, or engine.openai.api_key_env names none",
    404: "; is engine.openai.url the server's, with its /v1?",
}


class _TryAgain(Exception):
    """An attempt that failed in a way that may pass."""

    def __init__(self, reason: str, *, seen: bool, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.seen = seen  # the server may have done what it was asked
        self.wait_s = wait_s


class ServerCalls:
    """The connections to one server; an async context manager.

    Attributes:
      retries: how many attempts had to be made again so far.

    Raises:
      ConfigError: the environment has no such key, or it is none. Calls raise EngineError and, but
        for cancellation, which closes the connection, nothing else.
    """

    def __init__(self, cfg: OpenAIConfig) -> None:
        self._cfg = cfg
        self._base = check_base_url(cfg.url, "engine.openai.url", ConfigError)
        self._headers: dict[str, str] = {}
        if cfg.api_key_env:
            key = os.environ.get(cfg.api_key_env, "")
            if not key or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"engine.openai.api_key_env={cfg.api_key_env!r}: the environment has no such "
                    "variable, or no key in it"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: aiohttp.ClientSession | None = None
        self.retries = 0

    async def __aenter__(self) -> Self:
        # No limit: the engine bounds its requests, and a policy must not wait for them. uvicorn
        # drops an idle connection after 5 s.
        self._http = open_session(max_connections=0, keep_alive_s=4.0, headers=self._headers)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def where(self, method: str, path: str) -> str:
        """How errors name a call."""
        return f"{method} {self._base.joinpath(*path.split('/'))}"

    async def json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object that a call is answered with."""
        data = await self.send(method, path, body, once=False)
        try:
            return untrusted_json.parse(data)
        except ValueError as error:
            raise EngineError(f"{self.where(method, path)}: the answer {error}") from error

    async def send(self, method: str, path: str, body: Any = None, *, once: bool) -> bytes:
        """One call with its retries; the answer's body.

        Args:
          once: the server must not do it twice: tried again only where it has not begun.
        """
        where = self.where(method, path)
        for attempt in range(1, self._cfg.attempts + 1):
            try:
                return await self._attempt(method, path, where, body)
            except _TryAgain as failure:
                if attempt == self._cfg.attempts or (once and failure.seen):
                    tries = "" if attempt == 1 else f" ({attempt} attempts)"
                    raise EngineError(
                        f"{where}: {failure}{tries}; is the server running there?"
                    ) from failure
                self.retries += 1
                backoff_s = self._cfg.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff_s, min(failure.wait_s, _MAX_RETRY_AFTER_S)))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, method: str, path: str, where: str, body: Any) -> bytes:
        if self._http is None:
            raise RuntimeError("a call outside of `async with engine`")
        cfg = self._cfg
        timeout = aiohttp.ClientTimeout(
            total=cfg.request_timeout_s, sock_connect=cfg.connect_timeout_s
        )
        try:
            async with self._http.request(
                method,
                self._base.joinpath(*path.split("/")),
                json=body,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                status = response.status
                if status in _RETRIED_STATUS:
                    raise _TryAgain(f"HTTP {status}", seen=False, wait_s=retry_after_s(response))
                if 300 <= status < 400:
                    raise EngineError(f"{where}: HTTP {status}, and redirects are not followed")
                if status != 200:
                    detail = await _detail(response)
                    raise EngineError(f"{where}: HTTP {status}{detail}{_HINTS.get(status, '')}")
                check_encoding(response, where, EngineError)
                return await read_body(response, cfg.max_answer_bytes, where, EngineError)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise _TryAgain("cannot connect", seen=False) from error
        except TimeoutError as error:
            raise EngineError(
                f"{where}: no complete answer within {cfg.request_timeout_s:g} s "
                "(engine.openai.request_timeout_s)"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: aiohttp lets some malformed headers and URLs through as one.
            reason = untrusted_json.printable(f"{type(error).__name__}: {error}", 160)
            raise _TryAgain(reason, seen=True) from error


async def _detail(response: aiohttp.ClientResponse) -> str:
    """The server's own reason: {"error": {"message": ...}}, as far as it is short and clean."""
    if "Content-Encoding" in response.headers:
        return ""
    try:
        answer = untrusted_json.parse(await response.content.read(4096))
    except ValueError:
        return ""
    error = answer.get("error")
    message = (error if isinstance(error, dict) else answer).get("message", answer.get("detail"))
    return f" ({untrusted_json.printable(message, 300)})" if isinstance(message, str) else ""
