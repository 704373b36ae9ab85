"""A verifier that misbehaves on order: the bundled server behind a proxy that injects faults.

    python -m tools.bench.faults.proxy        # prints its port, ends when its standard input closes

For `plays`, in a process of its own, so that the actor's memory is the actor's alone. The
client's base URL says what goes wrong: http://127.0.0.1:PORT/PLAN/LANE, where PLAN is one of FAULTS
(a session's seed says at which call, and whether once or always), one of `inputs.INPUTS`,
`mixed-10` (10 % of all calls, one fault or another) or `none`; LANE chooses the server behind it.
Below it are the calls of g1+ and g3, those of g1 (a session's type is the field's), and at
/g2a/SESSION those of g2a.
GET /report/PLAN says what was done, and which rewards and counts the servers really gave.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from tools.bench.faults import inputs
from uirl_jax.verifiers import dialects
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.sessions import ServerLimits

SERVERS = 4
CALLS = ("session", "screenshot", "act", "progress", "delete")
_SCREENS = ("screenshot", "act")
_IN_PLAY = ("screenshot", "act", "progress")
# Where each fault may strike. What a call is answered with instead is in Faulty.inject.
FAULTS: dict[str, tuple[str, ...]] = {
    "http_500": CALLS,
    "http_404": CALLS,
    "http_502": CALLS,
    "hang": CALLS,
    "drip": CALLS,
    "cut": CALLS,
    "wrong_type": CALLS,
    "truncated_png": _SCREENS,
    "png_of_a_gigabyte": _SCREENS,  # by its header: 20000x17900
    "png_hides_a_gigabyte": _SCREENS,  # behind the pixels that it announces
    "body_of_4_gb": CALLS,
    "redirect_to_another_host": CALLS,
    "redirect_loop": CALLS,
    "applied_but_failed": ("act",),
    "screen_of_another_size": _SCREENS,
    "clock_jumps": CALLS,
    "session_gone": _IN_PLAY,
    "server_restarted": _IN_PLAY,
}
RETRIED = frozenset({"http_500", "http_502", "hang", "drip", "cut"})  # on calls but `session`
HANGING = frozenset({"hang", "drip"})  # until nobody waits any longer
HARMLESS = frozenset({"png_hides_a_gigabyte", "applied_but_failed", "clock_jumps"})  # once
RARE = frozenset({"server_restarted"})  # in a mixture: it takes everybody's sessions
SHEET_VARIANT = "rows=2,columns=1"  # what the dialects of the field fill in
LIE_REWARD = 777.0  # what every faulty answer claims
_HANG_S = 30.0  # nobody waits that long


def strike(fault: str, seed: int) -> tuple[str, bool]:
    """(call, whether always) of the session with this seed, where one fault is played alone."""
    calls = FAULTS[fault]
    always = (seed // len(calls)) % 2 == 1 and fault not in ("server_restarted", "clock_jumps")
    return calls[seed % len(calls)], always


def survives(fault: str, seed: int) -> bool:
    """Whether an episode with this fault alone is played to its end all the same."""
    call, always = strike(fault, seed)
    if call == "delete" or fault in ("clock_jumps", "png_hides_a_gigabyte"):
        return True
    return not always and call != "session" and fault in RETRIED | HARMLESS


def hangs(plan: str) -> bool:
    """Whether a plan has answers that end only because nobody waits any longer."""
    if plan in inputs.INPUTS:
        return inputs.INPUTS[plan].hangs
    return plan in HANGING or plan.startswith("mixed-")


@dataclasses.dataclass
class _Session:
    seed: int
    plan: str
    struck: int = 0  # how often a fault that is played alone has struck it
    last: tuple[str, str] = ("", "")  # its last call


@dataclasses.dataclass
class _Report:
    requests: int = 0
    retries: int = 0
    injected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rewards: dict[int, set[float]] = dataclasses.field(default_factory=dict)  # by seed
    counts: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)  # by session


class _Server:
    """One bundled server, which can be restarted in place: its port stays, its sessions do not."""

    def __init__(self) -> None:
        self.port = 0
        self._stack = contextlib.AsyncExitStack()
        self._restarting = asyncio.Lock()

    async def start(self) -> None:
        limits = ServerLimits(max_sessions=100_000, idle_time_s=20.0)  # faults leave some open
        self.port = await self._stack.enter_async_context(serve(port=self.port, limits=limits))

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self) -> None:
        async with self._restarting:
            await self.stop()
            await self.start()


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a client asked for, and of which server."""

    name: str  # one of CALLS
    request: web.Request
    path: str
    body: bytes
    session: _Session
    server: _Server


class Faulty:
    """The proxy's one handler and what it knows."""

    def __init__(self, servers: list[_Server]) -> None:
        self._servers = servers
        self.other_host = ""  # where redirects lead
        self._rng = random.Random(0)
        self._sessions: dict[str, _Session] = {}
        self._reports: collections.defaultdict[str, _Report] = collections.defaultdict(_Report)
        self._http: aiohttp.ClientSession | None = None
        self.strays = 0  # requests that followed a redirect

    async def stray(self, request: web.Request) -> web.Response:
        self.strays += 1
        return web.json_response({"done": True, "reward": LIE_REWARD})

    async def report(self, request: web.Request) -> web.Response:
        report = self._reports[request.match_info["plan"]]
        rewards = {str(seed): sorted(given) for seed, given in report.rewards.items()}
        told = {"requests": report.requests, "retries": report.retries, "rewards": rewards}
        told |= {"counts": report.counts, "injected": report.injected, "strays": self.strays}
        return web.json_response(told)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        plan, path = request.match_info["plan"], request.match_info["path"]
        server = self._servers[int(request.match_info["lane"]) % SERVERS]
        if plan == "server_restarted":  # takes nobody else's sessions
            server = self._servers[SERVERS]
        body = await request.read()
        name = "delete" if request.method == "DELETE" else path.rsplit("/", 1)[-1]
        if name == "session":
            session = _Session(int(request.query.get("seed", "0")), plan)
        else:
            session = self._sessions.get(path.split("/")[1]) or _Session(0, plan)
        name = name or "session"  # what opens a container is a look at it
        report = self._reports[plan]
        report.requests += 1
        # Nothing asks twice for the same thing but to repeat itself: only an act comes between.
        this = (name, request.query_string + body.decode("utf-8", "replace"))
        report.retries += name != "session" and this == session.last
        session.last = this
        call = _Call(name, request, path, body, session, server)
        fault = self._choose(plan, name, session)
        if fault is None:
            return await self._forward(call)
        report.injected[fault] += 1
        session.struck += 1
        if fault in inputs.INPUTS:
            return await _write_raw(request, inputs.INPUTS[fault])
        return await self.inject(fault, call)

    def _choose(self, plan: str, call: str, session: _Session) -> str | None:
        if plan.startswith("mixed-"):
            if self._rng.random() >= int(plan.split("-")[1]) / 100:
                return None
            here = [fault for fault, calls in FAULTS.items() if call in calls]
            return self._rng.choices(here, [0.1 if f in RARE else 1.0 for f in here])[0]
        if plan in inputs.INPUTS:
            return plan if call == inputs.INPUTS[plan].call else None
        if plan == "none":
            return None
        struck_call, always = strike(plan, session.seed)
        return plan if call == struck_call and (always or not session.struck) else None

    async def inject(self, fault: str, call: _Call) -> web.StreamResponse:
        """The faulty answer to a call."""
        lie = json.dumps(_lie()).encode()
        good_type = "image/png" if call.name in _SCREENS else "application/json"
        if fault.startswith("http_"):
            status = int(fault.removeprefix("http_"))
            return web.Response(status=status, body=lie, content_type="application/json")
        if fault == "hang":
            await _until_gone(call.request)
            return web.Response()
        if fault in ("drip", "cut", "body_of_4_gb"):
            return await _stream(call.request, fault, good_type, lie)
        if fault == "wrong_type":
            return web.Response(body=lie, content_type="text/html")
        if fault.startswith("redirect"):
            here = str(call.request.url) if fault == "redirect_loop" else self.other_host
            headers = {"Location": here, "Content-Type": "application/json"}
            return web.Response(status=302, body=lie, headers=headers)
        if fault == "session_gone":
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # being restarted
                path = f"session/{call.path.split('/')[1]}"
                await self._ask(call.request, call.server, path, b"", "DELETE")
        elif fault == "server_restarted":
            await call.server.restart()
        answer = await self._forward(call)
        if fault == "applied_but_failed":
            return web.Response(status=500, body=lie, content_type="application/json")
        if fault == "clock_jumps":
            year = self._rng.choice((1970, 1999, 2038, 2199))
            answer.headers["Date"] = f"Thu, 01 Jan {year} 00:00:00 GMT"
        elif fault in inputs.SCREENS:
            answer.body = inputs.SCREENS[fault](answer.body)
        return answer

    async def _forward(self, call: _Call) -> web.Response:
        request, path, session = call.request, call.path, call.session
        try:
            status, answer, content_type = await self._ask(
                request, call.server, path, call.body, request.method
            )
        except (aiohttp.ClientError, TimeoutError):  # it is just being restarted
            return web.Response(status=502)
        if status == 200 and call.name == "session" and request.method == "POST":
            self._sessions[json.loads(answer)["sessions"][0]["id"]] = session
        elif status == 200 and call.name == "progress":
            progress = json.loads(answer)
            reward = progress.get("reward")
            self._reports[session.plan].rewards.setdefault(session.seed, set()).add(reward or 0.0)
            if path.startswith("g2a/"):
                right = len(progress.pop(dialects.ROWS))
                progress = {dialects.CORRECT: right, **progress}
                answer = json.dumps(progress).encode()
            if not path.startswith("session/"):  # a container's, which does not judge
                report = self._reports[request.match_info["plan"]]
                report.counts[path.split("/")[1]] = progress
        elif status == 200 and call.name == "delete":
            self._sessions.pop(path.split("/")[1], None)
        return web.Response(status=status, body=answer, content_type=content_type)

    async def _ask(
        self, request: web.Request, server: _Server, path: str, body: bytes, method: str
    ) -> tuple[int, bytes, str]:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=5.0)
            self._http = aiohttp.ClientSession(
                auto_decompress=False,
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0),
            )
        if path.startswith("g2a/"):
            path = f"proxy/{path.removeprefix('g2a/')}"
        url = f"http://127.0.0.1:{server.port}/{path}"
        headers = {"Content-Type": request.content_type}
        query = dict(request.query) if method == request.method else {}
        if query.get("type") == "simple_data_entry":  # g1 knows no other type
            query |= {"type": "desktop/data_entry", "variant": SHEET_VARIANT}
        async with self._http.request(
            method, url, params=query, data=body, headers=headers
        ) as response:
            return response.status, await response.read(), response.content_type

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _lie() -> dict[str, object]:
    """An answer to any call that would do, if somebody believed it."""
    screen = {"screen_width": inputs.WIDTH_PX, "screen_height": inputs.HEIGHT_PX}
    session = {"id": "lie", "instruction": "Lie.", **screen}
    counts = {dialects.ROWS: [0], dialects.CORRECT: 1, dialects.WRONG: 0}
    judged = {"done": True, "reward": LIE_REWARD}
    return judged | counts | {"session_ids": ["lie"], "sessions": [session]}


async def _until_gone(request: web.Request) -> None:
    """Until the caller has closed the connection."""
    for _ in range(int(_HANG_S / 0.05)):
        if request.transport is None or request.transport.is_closing():
            return
        await asyncio.sleep(0.05)


async def _stream(
    request: web.Request, fault: str, content_type: str, lie: bytes
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = 4 * 2**30 if fault == "body_of_4_gb" else len(lie)
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        if fault == "cut":
            await response.write(lie[: len(lie) // 2])
            if request.transport is not None:
                request.transport.close()
        elif fault == "drip":
            for place in range(len(lie)):
                await response.write(lie[place : place + 1])
                await asyncio.sleep(0.1)
        else:
            while True:
                await response.write(bytes(65536))
    return response


async def _write_raw(request: web.Request, given: inputs.Input) -> web.StreamResponse:
    """Bytes that no server library would write, and the end of the connection."""
    transport = request.transport
    if transport is not None:
        for piece, pause_s in itertools.islice(given.pieces(), 100_000):
            if transport.is_closing():
                break
            transport.write(piece)
            await asyncio.sleep(pause_s)
        if given.then_silence:
            await _until_gone(request)
        transport.close()
    return web.Response()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[int]:
    """The proxy with its servers; yields its port."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [_Server() for _ in range(SERVERS + 1)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        proxy = Faulty(servers)
        stack.push_async_callback(proxy.close)
        other, app = web.Application(), web.Application(client_max_size=2**26)
        other.router.add_route("*", "/{path:.*}", proxy.stray)
        app.router.add_get("/report/{plan}", proxy.report)
        app.router.add_route("*", r"/{plan}/{lane:\d+}/{path:.*}", proxy.handle)
        ports = []
        for application, host in ((other, "127.0.0.2"), (app, "127.0.0.1")):
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.2)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, 0).start()
            ports.append(runner.addresses[0][1])
        proxy.other_host = f"http://127.0.0.2:{ports[0]}/"
        yield ports[1]


def main() -> None:
    async def run() -> None:
        async with running() as port:
            print(port, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


if __name__ == "__main__":
    main()
