"""One WebSocket to an OpenEnv server: a question and its answer at a time, within limits.

`openenv` knows what is asked and `openenv_answers` what an answer must be. A socket is a session:
when it closes, the environment behind it is gone, so nothing is ever sent again.

Messages are received all the time, not only while an answer is awaited. A server pings every 20 s
and drops who does not answer within 20 s more (uvicorn's defaults), and aiohttp answers a ping only
while somebody receives; a turn of a policy may take minutes.
"""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import yarl

from uirl_jax.errors import InvalidRequestError, RequestRefusedError, VerifierError
from uirl_jax.untrusted.json import printable

_CLOSE_S = 4.0  # for saying goodbye
_ENDED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)


class _RedirectedError(aiohttp.ClientError):
    """A server that sends its clients elsewhere. Caught within this file."""


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """The middleware of a client session for `Socket.connect`.

    aiohttp's `ws_connect` follows redirects, to wherever an untrusted server points, and has no
    option against it.
    """
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise _RedirectedError(f"HTTP {response.status}, redirects are not followed")
    return response


class Socket:
    """An open WebSocket. `connect` makes it, `close` ends it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, where: str) -> None:
        self._socket = socket
        self._where = where
        self._broken = ""  # why nothing more can be asked
        self._waiting: asyncio.Future[bytes] | None = None
        # A server that is full says so before it is asked.
        self._unasked: bytes | None = None
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(
        cls,
        http: aiohttp.ClientSession,
        url: yarl.URL,
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> "Socket":
        """
        Args: http: with `refuse_redirects`.
        Raises:
          InvalidRequestError: the server refuses the connection, and would again.
          RequestRefusedError: no connection came about.
        """
        where = f"WebSocket {url}"
        try:
            async with asyncio.timeout(timeout_s):
                # Not compressed: a message is bounded as it comes, and not when it is unpacked.
                socket = await http.ws_connect(url, max_msg_size=max_bytes, compress=0)
        except _RedirectedError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        except aiohttp.WSServerHandshakeError as error:
            final = 400 <= error.status < 500 and error.status not in (408, 425, 429)
            kind = InvalidRequestError if final else RequestRefusedError
            reason = f"HTTP {error.status}, expected a WebSocket; is this an OpenEnv server?"
            raise kind(f"{where}: {reason}") from error
        except TimeoutError as error:
            raise RequestRefusedError(f"{where}: no connection in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = printable(f"{type(error).__name__}: {error}", 160)
            raise RequestRefusedError(
                f"{where}: {reason}; is the environment running there?"
            ) from error
        return cls(socket, where)

    async def ask(self, message: dict[str, Any], timeout_s: float) -> bytes:
        """Sends a message and returns the text that answers it.

        Raises:
          VerifierError: no answer came, and none is taken any more. Whether the server did what
            was asked is not known.
        """
        if self._unasked is not None:  # why the server closes
            return self._take_unasked()
        self._check()
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._socket.send_str(json.dumps(message))
                except (ConnectionError, aiohttp.ClientError) as error:
                    if not self._waiting.done():  # what the server said before it closed
                        self._break(f"the connection was lost: {type(error).__name__}")
                return await self._waiting
        except TimeoutError as error:
            # What comes from now on would answer the next question.
            self._break(f"no answer within {timeout_s:g} s")
            raise VerifierError(f"{self._where}: {self._broken}") from error
        except asyncio.CancelledError:
            self._break("a question was given up before its answer came")
            raise
        finally:
            self._waiting = None

    async def close(self) -> None:
        """Ends the session on the server. Raises nothing."""
        with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError):
            async with asyncio.timeout(_CLOSE_S):
                if not self._broken:
                    await self._socket.send_str(json.dumps({"type": "close"}))
                await self._socket.close()
        self._break("the session was closed")
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver

    def _check(self) -> None:
        if self._broken:
            raise VerifierError(f"{self._where}: {self._broken}")

    def _take_unasked(self) -> bytes:
        """Raises VerifierError for anything but an error message: the answers are out of step."""
        assert self._unasked is not None
        data, self._unasked = self._unasked, None
        if b'"error"' not in data[:64]:
            self._break("it sent a message that nobody asked for")
            self._check()
        return data

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(VerifierError(f"{self._where}: {self._broken}"))

    async def _receive(self) -> None:
        while not self._broken:
            try:
                message = await self._socket.receive()
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                self._break(printable(f"{type(error).__name__}: {error}", 160))
                return
            if message.type is aiohttp.WSMsgType.TEXT:
                self._take(message.data.encode("utf-8", "surrogatepass"))
            elif message.type is aiohttp.WSMsgType.BINARY:
                self._break("it sent bytes, expected text")
            elif message.type in _ENDED:
                code = self._socket.close_code
                self._break(f"the server closed the connection (code {code})")
            elif message.type is aiohttp.WSMsgType.ERROR:
                error = message.data
                if getattr(error, "code", None) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                    reason = "a message is too long (verifier.limits.max_image_bytes)"
                else:
                    reason = printable(f"{type(error).__name__}: {error}", 160)
                self._break(reason)

    def _take(self, data: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(data)
        elif self._unasked is None:
            self._unasked = data
        else:
            self._break("it sent messages that nobody asked for")
