"""A Chromium process and its DevTools protocol, over a socket that only the two of them have.

Messages are JSON that ends with a zero byte (`--remote-debugging-pipe`). Calls are answered in any
order; what a page tells by itself goes to the listener of its session. The process ends when the
socket closes: with `close`, and however this process ends. Not here: what the calls mean (`page`).
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.store.temporary import HeldFolder

PROFILES = "uirl-chromium-"  # folders below the temporary one

Listener = Callable[[str, str, dict[str, Any]], None]  # session, method, parameters


class CdpError(Exception):
    """A call was refused, or the browser has ended."""


class Chromium(asyncio.Protocol):
    """A process. `launch` starts it, `close` ends it."""

    def __init__(self) -> None:
        self.version = ""
        self._pid = 0
        self._profile: HeldFolder | None = None
        self._transport: asyncio.Transport
        self._unread = bytearray()  # of a message that has not arrived as a whole
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._listeners: dict[str, Listener] = {}
        self._ended = ""  # why, once it has

    @classmethod
    async def launch(
        cls, executable: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> "Chromium":
        """Raises: OSError or CdpError: it does not start."""
        browser = cls()
        ours, theirs = socket.socketpair()
        with theirs:
            browser._profile = HeldFolder(PROFILES)
            try:
                browser._pid = os.posix_spawn(
                    executable,
                    [
                        str(executable),
                        *arguments,
                        "--remote-debugging-pipe",
                        f"--user-data-dir={browser._profile.path}",
                        "about:blank",
                    ],
                    environment,
                    file_actions=[
                        # It reads from 3 and writes to 4.
                        (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                        (os.POSIX_SPAWN_DUP2, theirs.fileno(), 4),
                        *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)),
                    ],
                    setpgroup=0,  # a Ctrl+C in the terminal is ours to handle
                )
            except BaseException:
                ours.close()
                browser._profile.remove()
                raise
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: browser, sock=ours)
            version = await browser.send("Browser.getVersion")
        except BaseException:
            await browser.close()
            raise
        browser.version = version["product"].partition("/")[2]
        return browser

    def send(
        self, method: str, parameters: Mapping[str, Any] | None = None, session: str = ""
    ) -> asyncio.Future[dict[str, Any]]:
        """Sends a call at once; the answer is awaited. Calls of a session arrive in this order."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._ended:
            future.set_exception(CdpError(self._ended))
            return future
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        self._calls[self._num_calls] = future
        self._transport.write(json.dumps(message).encode() + b"\0")
        return future

    def listen(self, session: str, listener: Listener | None) -> None:
        """Tells what a session ("": the browser's own) says by itself to the listener."""
        if listener is None:
            self._listeners.pop(session, None)
        else:
            self._listeners[session] = listener

    async def close(self) -> None:
        """Ends the process; it has nothing to save."""
        self._lose("the browser was closed")
        with contextlib.suppress(AttributeError):  # it was never connected
            self._transport.abort()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            await asyncio.to_thread(os.waitpid, self._pid, 0)
        if self._profile is not None:
            await asyncio.to_thread(self._profile.remove)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        first, *others = data.split(b"\0")
        self._unread += first
        for part in others:
            message = json.loads(self._unread)
            self._unread = bytearray(part)
            self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("its process has ended")

    def _received(self, message: dict[str, Any]) -> None:
        if "id" not in message:
            session = message.get("sessionId", "")
            if (listener := self._listeners.get(session)) is not None:
                listener(session, message["method"], message["params"])
            return
        future = self._calls.pop(message["id"])
        if future.done():  # whoever called does not wait any more
            return
        if "error" in message:
            future.set_exception(CdpError(message["error"].get("message", "unknown error")))
        else:
            future.set_result(message["result"])

    def _lose(self, reason: str) -> None:
        self._ended = self._ended or reason
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(CdpError(self._ended))
                future.exception()  # told to whoever waits; nobody need
