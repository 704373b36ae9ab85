"""APIs of Docker and Kubernetes as far as the runtimes ask for them, with a real g2 server behind
every container, and with faults.

Routes, status codes and bodies are those of Docker's Engine API (v1.47) and of Kubernetes' core/v1.
"""

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

import yarl
from aiohttp import web

from tests import field_servers

IMAGE = "ui-verifiers/simple-data-entry"
# Of a call ("create", "start", "find", "delete", "list", ...) and how many there were of its kind:
# None, a status, "hang", "cut" (no answer, nothing done), "lost" (no answer, though done) or "late"
# (no answer, and done a second later).
Fault = Callable[[str, int], int | str | None]
LATE_S = 1.0


class Api:
    """What both have: containers by name, and faults."""

    def __init__(self, fault: Fault = lambda call, number: None, *, start_s: float = 0.0) -> None:
        self.fault, self.start_s = fault, start_s
        self.found: dict[str, dict] = {}  # by name
        self.inside: dict[str, field_servers.Container] = {}
        self.made: list[str] = []  # names of all that there ever were
        self.calls: list[str] = []
        self._serving: dict[str, contextlib.AsyncExitStack] = {}
        self._later: set[asyncio.Task] = set()

    def error(self, status: int, message: str) -> web.Response:
        raise NotImplementedError

    def on(self, call: str, handle: Callable) -> Callable:
        """The route's handler, with its faults."""

        async def handler(request: web.Request) -> web.StreamResponse:
            fault = self.fault(call, self.calls.count(call))
            self.calls.append(call)
            await request.read()
            if isinstance(fault, int):
                return self.error(fault, "an injected fault")
            if fault == "late":
                self._keep(self._handle_later(handle, request))
            if fault in ("hang", "late"):
                await asyncio.sleep(60)
            if fault == "cut":
                request.transport.abort()
            answer = await handle(request)
            if fault == "lost":
                request.transport.abort()
            return answer

        return handler

    async def run_inside(self, name: str, host: str = "127.0.0.1", port: int = 0) -> int:
        """Starts the container's own server; the port it has."""
        container = self.inside[name] = field_servers.Container("g2b")
        stack = self._serving[name] = contextlib.AsyncExitStack()
        url = await stack.enter_async_context(field_servers.serving(container, host, port))
        return yarl.URL(url).port

    async def end(self, name: str) -> None:
        self.found.pop(name, None)
        stack = self._serving.pop(name, None)
        if stack is not None:
            await stack.aclose()

    def _keep(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _handle_later(self, handle: Callable, request: web.Request) -> None:
        await asyncio.sleep(LATE_S)
        await handle(request)

    @contextlib.asynccontextmanager
    async def serve(self, routes: Sequence[web.RouteDef]) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            for task in list(self._later):
                task.cancel()
            await runner.cleanup()
            for name in list(self._serving):
                await self.end(name)


class FakeDocker(Api):
    """`async with FakeDocker().up() as address`, for DOCKER_HOST=tcp://{address}."""

    def up(self):
        version = r"/v{version:[0-9.]+}"
        one = version + "/containers/{name}"
        return self.serve(
            [
                web.get("/version", self.on("version", self.version)),
                web.get(version + "/images/{image:.+}/json", self.on("image", self.image)),
                web.post(version + "/containers/create", self.on("create", self.create)),
                web.get(version + "/containers/json", self.on("list", self.list)),
                web.post(one + "/start", self.on("start", self.start)),
                web.get(one + "/json", self.on("find", self.find)),
                web.delete(one, self.on("delete", self.delete)),
            ]
        )

    def error(self, status: int, message: str) -> web.Response:
        return web.json_response({"message": message}, status=status)

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"Version": "28.0.1", "ApiVersion": "1.47"})

    async def image(self, request: web.Request) -> web.Response:
        if request.match_info["image"] != IMAGE:
            return self.error(404, f"No such image: {request.match_info['image']}:latest")
        return web.json_response({"Id": "sha256:" + "0" * 64})

    async def create(self, request: web.Request) -> web.Response:
        name, body = request.query["name"], await request.json()
        if name in self.found:
            return self.error(409, f'Conflict. The container name "/{name}" is already in use')
        self.made.append(name)
        state = {"Status": "created", "Running": False, "OOMKilled": False, "ExitCode": 0}
        self.found[name] = {
            "Id": uuid.uuid4().hex * 2,
            "Name": f"/{name}",
            "State": state,
            "Config": body,
            "NetworkSettings": {"Ports": {}},
        }
        return web.json_response({"Id": self.found[name]["Id"], "Warnings": []}, status=201)

    async def start(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.found:
            return self._gone(name)
        self._keep(self._boot(name))
        self.found[name]["State"] |= {"Status": "running", "Running": True}
        return web.Response(status=204)

    async def _boot(self, name: str) -> None:
        """The port is published at once, as Docker does it; who listens there comes later."""
        config = self.found[name]["Config"]
        ((inner, (outer,)),) = config["HostConfig"]["PortBindings"].items()
        assert outer["HostPort"] == "" and inner in config["ExposedPorts"]
        await asyncio.sleep(self.start_s)
        if name in self.found:
            port = await self.run_inside(name)
            published = [{"HostIp": outer["HostIp"], "HostPort": str(port)}]
            self.found[name]["NetworkSettings"]["Ports"] = {inner: published}

    async def find(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(self.found[name]) if name in self.found else self._gone(name)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.found:
            return self._gone(name)
        if self.found[name]["State"]["Running"] and request.query.get("force") != "True":
            return self.error(409, f"cannot remove container {name}: container is running")
        await self.end(name)
        return web.Response(status=204)

    async def list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query["filters"])["label"]
        found = [
            {"Id": each["Id"], "Names": [each["Name"]], "Labels": each["Config"]["Labels"]}
            for each in self.found.values()
            if set(wanted) <= set(each["Config"]["Labels"])
            and (each["State"]["Running"] or request.query.get("all") == "1")
        ]
        return web.json_response(found)

    def stop(self, name: str, exit_code: int) -> None:
        """The container's program ends by itself."""
        self.found[name]["State"] |= {"Status": "exited", "Running": False, "ExitCode": exit_code}

    def _gone(self, name: str) -> web.Response:
        return self.error(404, f"No such container: {name}")


class FakeKubernetes(Api):
    """Pods of the namespace `verifiers`; each has an address of its own, and all listen on `port`.

    `status`: instead of starting, pods have this status for ever.
    """

    def __init__(self, fault: Fault = lambda call, number: None, **options) -> None:
        self.status: dict | None = options.pop("status", None)
        super().__init__(fault, **options)
        self.port = 0  # the first pod's, then everybody's
        self._addresses = (f"127.0.77.{number}" for number in itertools.count(2))

    def up(self):
        pods = "/api/v1/namespaces/{namespace}/pods"
        return self.serve(
            [
                web.post(pods, self.on("create", self.create)),
                web.get(pods, self.on("list", self.list)),
                web.get(pods + "/{name}", self.on("find", self.find)),
                web.delete(pods + "/{name}", self.on("delete", self.delete)),
            ]
        )

    def error(self, status: int, message: str) -> web.Response:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
        return web.json_response({**body, "code": status}, status=status)

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        if request.match_info["namespace"] != "verifiers":
            return self.error(403, 'pods is forbidden: User "actor" cannot create resource "pods"')
        if name in self.found:
            return self.error(409, f'pods "{name}" already exists')
        self.made.append(name)
        self.found[name] = {**pod, "status": self.status or {"phase": "Pending"}}
        if self.status is None:
            self._keep(self._boot(name))
        return web.json_response(self.found[name], status=201)

    async def _boot(self, name: str) -> None:
        await asyncio.sleep(self.start_s)
        if name in self.found:
            host = next(self._addresses)
            await self.run_inside(name, host, self.port)
            status = {"phase": "Running", "podIP": host}
            status["containerStatuses"] = [
                {
                    **{"name": "session", "image": IMAGE, "imageID": "", "ready": True},
                    **{"restartCount": 0, "state": {"running": {}}},
                }
            ]
            self.found[name]["status"] = status

    async def find(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(self.found[name]) if name in self.found else self._gone(name)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.found:
            return self._gone(name)
        pod = self.found[name]
        await self.end(name)
        return web.json_response(pod)

    async def list(self, request: web.Request) -> web.Response:
        if request.match_info["namespace"] != "verifiers":
            return self.error(403, 'pods is forbidden: User "actor" cannot list resource "pods"')
        label = request.query["labelSelector"]
        items = [pod for pod in self.found.values() if label in pod["metadata"]["labels"]]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": items})

    def _gone(self, name: str) -> web.Response:
        return self.error(404, f'pods "{name}" not found')


def kubeconfig(address: str) -> str:
    """The text of a kubeconfig for an API server."""
    return json.dumps(  # which is YAML too
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://{address}"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "actor"}}],
            "users": [{"name": "actor", "user": {"token": "secret"}}],
        }
    )
