"""Serves the emulated buckets over HTTP: routing, faults, counters by price class.

Counters (`GET /_emulator/counters`) hold every request by operation and price class, and what was
billed: the service does not charge for answers of 4xx and 5xx. `POST /_emulator/faults` replaces
the faults by a JSON object with fields of `faults.Faults`, `POST /_emulator/reset` zeroes counters.
"""

import asyncio
import collections
import dataclasses
import json
import time
import urllib.parse
from typing import Any

from aiohttp import web

from tools.bucket_emulator import json_api, xml_api
from tools.bucket_emulator.answers import Answer, Call, Operation
from tools.bucket_emulator.faults import Draws, Faults, Kind
from tools.bucket_emulator.objects import Buckets, Refused

MAX_BODY_BYTES = 2 << 30
USD_PER_1000 = {"A": 0.005, "B": 0.0004, "free": 0.0}
_ERRORS: dict[Kind, Refused] = {
    "429": Refused(429, "rateLimitExceeded", "injected"),
    "500": Refused(500, "InternalError", "injected"),
    "503": Refused(503, "ServiceUnavailable", "injected"),
    "412": Refused(412, "PreconditionFailed", "injected"),
}


class Server:
    """Args:
    latency_s: waited before every answer.
    """

    def __init__(self, buckets: Buckets, faults: Faults, latency_s: float = 0.0) -> None:
        self.buckets, self.draws = buckets, Draws(faults)
        self._latency_s = latency_s
        self.reset()

    def reset(self) -> None:
        self._requests: collections.Counter[str] = collections.Counter()
        self._classes: collections.Counter[str] = collections.Counter()
        self._billed: collections.Counter[str] = collections.Counter()
        self._statuses: collections.Counter[str] = collections.Counter()
        self._since_s = time.monotonic()
        self.buckets.overwritten_too_fast = 0
        self.buckets.fastest_names.clear()
        self.draws.injected.clear()

    def counters(self) -> dict[str, Any]:
        dollars = sum(USD_PER_1000[price] * n / 1000 for price, n in self._billed.items())
        fastest = sorted(self.buckets.fastest_names.items(), key=lambda item: -item[1])[:100]
        return {
            "requests": dict(self._requests),
            "classes": dict(self._classes),
            "billed": dict(self._billed),
            "billed_usd": dollars,
            "statuses": dict(self._statuses),
            "injected": dict(self.draws.injected),
            "overwritten_too_fast": self.buckets.overwritten_too_fast,
            "overwritten_too_fast_names": dict(fastest),
            "seconds": time.monotonic() - self._since_s,
        }

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        call = Call(
            request.method,
            request.host,
            path,
            dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
            request.headers,
            await request.read(),
        )
        if path.startswith("/_emulator/"):
            return self._manage(call)
        api = json_api if path.startswith(json_api.PREFIXES) else xml_api
        try:
            operation = api.operation(call)
        except Refused as error:
            return _respond(api.refusal(error))
        fault = self.draws.draw(
            writes=operation.writes, conditional=operation.conditional, reads=operation.reads
        )
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        if fault == "hang":
            await asyncio.sleep(self.draws.faults.hang_s)
            return _cut(request)
        try:
            if fault in _ERRORS:
                raise _ERRORS[fault]
            answer = api.answer(self.buckets, call)
        except Refused as error:
            answer = api.refusal(error)
        except (ValueError, KeyError) as error:  # a body or parameter that cannot be parsed
            answer = api.refusal(Refused(400, "invalid", f"{type(error).__name__}: {error}"))
        self._count(operation, answer)
        if fault == "lost" and answer.status < 300:
            if self.draws.coin():
                return _respond(api.refusal(_ERRORS["503"]))
            return _cut(request)
        if fault == "slow" and answer.body:
            return await self._slowly(request, answer)
        return _respond(answer, head=call.method == "HEAD")

    def _count(self, operation: Operation, answer: Answer) -> None:
        self._requests[operation.name] += 1
        self._classes[operation.price] += 1
        self._statuses[str(answer.status)] += 1
        if answer.status < 400:
            self._billed[operation.price] += 1

    def _manage(self, call: Call) -> web.Response:
        if call.path == "/_emulator/counters":
            return web.json_response(self.counters())
        if call.path == "/_emulator/reset" and call.method == "POST":
            self.reset()
            return web.json_response({})
        if call.path == "/_emulator/faults" and call.method == "POST":
            self.draws = Draws(Faults(**json.loads(call.body)))
            return web.json_response(dataclasses.asdict(self.draws.faults))
        raise web.HTTPNotFound

    async def _slowly(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.content_length = len(answer.body)
        await response.prepare(request)
        half = len(answer.body) // 2
        cut = self.draws.coin()
        try:
            await response.write(answer.body[:half])
            await asyncio.sleep(self.draws.faults.slow_s)
            if cut:
                return _cut(request, response)
            await response.write(answer.body[half:])
        except ConnectionError:  # the client has given up
            pass
        return response


def _respond(answer: Answer, head: bool = False) -> web.StreamResponse:
    headers = dict(answer.headers)
    if head:
        headers["Content-Length"] = str(len(answer.body))
        return web.Response(status=answer.status, headers=headers)
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def _cut(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Breaks the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=500)
