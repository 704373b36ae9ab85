"""Starts the emulator: in a thread for a test, or in the foreground for the command."""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from tools.bucket_emulator.faults import Faults
from tools.bucket_emulator.objects import Buckets, Condition
from tools.bucket_emulator.server import Server

START_S = 10.0
NO_FAULTS = Faults()


class Service:
    """A running emulator, in whatever process."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def environment(self) -> dict[str, str]:
        """With these variables all clients of a process use the emulator, without credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            # Orbax writes arrays through tensorstore, which has variables of its own.
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def counters(self) -> dict[str, Any]:
        return self._call("counters", None)

    def reset(self) -> None:
        self._call("reset", b"")

    def set_faults(self, **faults: float) -> None:
        self._call("faults", json.dumps(faults).encode())

    def _call(self, what: str, body: bytes | None) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/_emulator/{what}", data=body) as answer:
            return json.load(answer)


class Emulator(Service):
    """An emulator in this process. Its methods may be called from any thread."""

    def __init__(self, server: Server, address: str) -> None:
        super().__init__(address)
        self.server = server

    def objects(self, bucket: str) -> dict[str, bytes]:
        objects = dict(self.server.buckets.contents(bucket))
        return {name: found.content for name, found in objects.items()}

    def damage(self, bucket: str, name: str, content: bytes) -> None:
        """Replaces the content of an object, as a fault of the storage would."""
        objects = self.server.buckets.contents(bucket)
        objects[name] = dataclasses.replace(objects[name], content=content)

    def drop(self, bucket: str, name: str) -> None:
        """Deletes an object, as a fault of the storage would."""
        self.server.buckets.delete(bucket, name, Condition())


@contextlib.contextmanager
def emulator(
    bucket: str = "runs",
    *,
    faults: Faults = NO_FAULTS,
    refuse_fast_writes: bool = False,
) -> Iterator[Emulator]:
    """An emulator in a thread of this process, on a free port of the loopback.

    It answers 403 for the bucket "denied".
    """
    server = Server(Buckets([bucket], ["denied"], refuse_fast_writes), faults)
    listening = socket.create_server(("127.0.0.1", 0))
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ended = asyncio.Event()

    async def run() -> None:
        async with _serving(server, listening):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    if not ready.wait(START_S):
        raise RuntimeError("the bucket emulator did not start")
    try:
        yield Emulator(server, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(START_S)
        loop.close()


async def serve(server: Server, host: str, port: int, port_file: Path | None) -> None:
    """Serves until cancelled; writes the port into a file once it listens."""
    listening = socket.create_server((host, port))
    async with _serving(server, listening):
        number = listening.getsockname()[1]
        if port_file:
            temporary = port_file.with_name(f".{port_file.name}.{os.getpid()}")
            temporary.write_text(f"{number}\n")
            temporary.replace(port_file)
        print(f"STORAGE_EMULATOR_HOST=http://{host}:{number}", flush=True)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _serving(server: Server, listening: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield
    finally:
        await runner.cleanup()
