"""A verifier server that means its client harm: it writes whatever bytes a test gives it."""

import asyncio
import contextlib
import io
import json

from PIL import Image

from uirl_jax.verifiers.client.client import ClientLimits, VerifierClient

# Small caps and short pauses; its time-outs are the patient ones, for a machine that is busy.
SMALL = ClientLimits(
    backoff_s=0.01, max_retry_after_s=0.2, max_image_bytes=1_000_000, max_json_bytes=100_000
)


def encoded(size=(224, 168), image_format="PNG", **options):
    buffer = io.BytesIO()
    Image.new("RGB", size, (9, 99, 199)).save(buffer, image_format, **options)
    return buffer.getvalue()


def http_answer(body, content_type="image/png", status="200 OK", headers=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}Connection: close\r\n\r\n".encode() + body


def json_answer(value, **options):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return http_answer(body, "application/json", **options)


SESSION = {"id": "s1", "instruction": "Click.", "screen_width": 224, "screen_height": 168}
PNG = encoded()


class Hostile:
    """A server that writes raw bytes: a good session, then whatever `answers` says, in turn.

    An answer is bytes, or a coroutine function of the writer. The last one is repeated.
    """

    def __init__(self, *answers, create=None):
        self.answers = list(answers)
        self.create = json_answer({"sessions": [SESSION]}) if create is None else create
        self.requests = []  # (method, path, headers, body) but for the first good POST /session
        self.port = 0
        self._running = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await self._server.wait_closed()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._running.add(asyncio.current_task())
        try:
            await self._respond(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._running.discard(asyncio.current_task())

    async def _respond(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request, *lines = head.strip().split("\r\n")
            method, path, _ = request.split(" ")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if path.startswith("/session?") and self.create is not Ellipsis:
                answer = self.create
            else:
                self.requests.append((method, path, headers, body))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)


async def endless(writer):
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    while True:
        writer.write(chunk)
        await writer.drain()


async def drip(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 9999\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def slow_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-A: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silence(writer):
    await asyncio.sleep(3)


async def reset(writer):
    writer.write(http_answer(PNG)[:-50])
    await writer.drain()
    writer.transport.abort()


def redirect(location):
    return http_answer(b"", status="302 Found", headers=f"Location: {location}\r\n")


def client_of(server, **options):
    return VerifierClient(f"http://127.0.0.1:{server.port}", **{"limits": SMALL, **options})
