"""One container per session: started for an episode, and deleted however the episode ends.

Takes the place of a `VerifierClient`: `actor.fleet` sees one server with sessions, each of which is
a container with a client of its own (dialects g2a and g2b, or g3 behind a proxy). A `Runtime`
starts containers and finds their address: `docker_runtime`, `kubernetes_runtime`. Containers that
others started are listed in `verifier.urls` and do not need this module.

How no container is left behind:
- A container is named before it is created, so that one whose creation was cancelled, or whose
  answer was lost, can be deleted.
- Deletion is a task that a cancelled episode does not interrupt; it is repeated until it succeeds.
- Containers that an API created later than it answered are found by their label, every SWEEP_S and
  at the end; those of an earlier process (SIGKILL, power failure) by the owner's label, at the
  start.
- A container whose lifetime, also a label, has passed is deleted by whichever process starts next.
"""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.log_lines import key_values
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import dialects
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.openenv import OpenEnvClient
from uirl_jax.verifiers.client.rules import FindOwnRule, no_own_rule
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.containers.runtime import (
    CLIENT,
    OWNER,
    THREADS,
    UNTIL,
    ContainerConfig,
    Runtime,
)
from uirl_jax.verifiers.recorded.in_process import RecordedClient

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
SWEEP_S = 60.0
CLOCKS_DIFFER_S = 3600.0  # a pod ends by itself before that (activeDeadlineSeconds)
_POLL_S = 0.25
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0  # before a container is deleted again


def open_runtime(cfg: ContainerConfig) -> Runtime:
    """Blocking. Raises ConfigError without the extra, VerifierError where the API is no use."""
    try:
        if cfg.runtime == "docker":
            from uirl_jax.verifiers.containers import docker_runtime

            return docker_runtime.DockerRuntime(cfg)
        from uirl_jax.verifiers.containers import kubernetes_runtime

        return kubernetes_runtime.KubernetesRuntime(cfg)
    except ImportError as error:
        raise ConfigError(
            f"verifier.containers.runtime={cfg.runtime!r}: {error}; pip install -e '.[containers]'"
        ) from error


@dataclasses.dataclass
class _Container:
    creation: asyncio.Future[None]
    stack: contextlib.AsyncExitStack
    client: VerifierClient = dataclasses.field(init=False)  # once it answers
    session_id: str = ""  # the client's own word for it


class ContainerClient:
    """Sessions that are containers, with the methods of a `VerifierClient`. An async context
    manager; leaving it deletes what is still there.

    Args:
      owner: who starts again after a crash and removes what was left: letters, digits, "-" and "_",
        at most 63. No two processes at a time may have the same.
      dialect, limits, delay_s, find_own_rule: of each container's `VerifierClient`.
      make_runtime: called in a thread when the context is entered.

    Raises:
      ConfigError: on entering, without the Python client of the runtime.
      VerifierError: on entering, where the API cannot be used or the image is missing.
    """

    def __init__(
        self,
        cfg: ContainerConfig,
        owner: str,
        *,
        dialect: str = "g2b",
        limits: ClientLimits | None = None,
        delay_s: float = 0.0,
        find_own_rule: FindOwnRule = no_own_rule,
        make_runtime: Callable[[ContainerConfig], Runtime] = open_runtime,
    ) -> None:
        # A container takes one session, and there is a container for each.
        self.dialect = dataclasses.replace(dialects.find_dialect(dialect), has_sessions=True)
        self._cfg, self._owner, self._make_runtime = cfg, owner, make_runtime
        self._limits, self._delay_s = limits or ClientLimits(), delay_s
        self._find_own_rule = find_own_rule
        self._id = uuid.uuid4().hex  # tells this client's containers from an earlier process's
        self._open: dict[str, _Container] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="containers")
        self._runtime: Runtime  # from entering on, as the sweeper
        self._sweeper: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        try:
            self._runtime = await self._in_thread(self._make_runtime, self._cfg)
            left = await self._sweep(by_label=OWNER, value=self._owner)
        except BaseException:
            self._threads.shutdown(wait=False)
            raise
        if left:
            print(key_values("containers_of_earlier_run", removed=left), flush=True)
        self._sweeper = asyncio.create_task(self._keep_sweeping())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sweeper.cancel()
        for name in list(self._open):
            self._remove(name)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._removals or await self._sweep(by_label=CLIENT, value=self._id):
                    await asyncio.gather(*self._removals.values())
        except (TimeoutError, VerifierError) as closing_error:
            line = key_values(
                "containers_left",
                names=" ".join(self._removals),
                reason=str(closing_error) or f"not deleted within {CLOSE_TIMEOUT_S:g} s",
                label=f"{OWNER}={self._owner}",
            )
            print(line, flush=True)
        finally:
            for task in self._removals.values():
                task.cancel()
            self._threads.shutdown(wait=False)

    def check_action(self, action: Action) -> None:
        """Raises ActionError for an action that the containers have no call for."""
        dialects.check_action(self.dialect, action)

    async def create(self, task: TaskSpec) -> Session:
        """A container that answers, and its session. Cancelled or failed, it is deleted."""
        name = f"uirl-{uuid.uuid4().hex[:16]}"
        until_unix_s = int(time.time() + self._cfg.lifetime_s)
        labels = {OWNER: self._owner, CLIENT: self._id, UNTIL: str(until_unix_s)}
        creation = asyncio.ensure_future(self._in_thread(self._runtime.create, name, labels))
        container = self._open[name] = _Container(creation, contextlib.AsyncExitStack())
        try:
            await asyncio.shield(creation)  # a thread cannot be cancelled: _removed waits for it
            container.client = await self._start(name, container.stack)
            session = await container.client.create(task)
        except BaseException:
            self._remove(name)
            raise
        container.session_id = session.id
        return dataclasses.replace(session, id=name)

    async def screenshot(self, session_id: str) -> bytes:
        container = self._find(session_id)
        return await container.client.screenshot(container.session_id)

    async def act(self, session_id: str, action: Action, request_id: str | None = None) -> bytes:
        container = self._find(session_id)
        return await container.client.act(container.session_id, action, request_id)

    async def progress(self, session_id: str) -> dict[str, Any]:
        container = self._find(session_id)
        return await container.client.progress(container.session_id)

    async def delete(self, session_id: str) -> None:
        """Returns when the container is gone. A caller that waits no longer leaves the deletion
        itself running."""
        if session_id in self._open or session_id in self._removals:
            await asyncio.shield(self._remove(session_id))

    def _find(self, session_id: str) -> _Container:
        container = self._open.get(session_id)
        if container is None or not container.session_id:
            raise VerifierError(f"container {session_id!r} was not started here, or is deleted")
        return container

    async def _start(self, name: str, stack: contextlib.AsyncExitStack) -> VerifierClient:
        """Waits until the container answers GET /. Raises VerifierError: too late, or never."""
        client: VerifierClient | None = None
        last = ""
        try:
            async with asyncio.timeout(self._cfg.start_timeout_s):
                while True:
                    try:
                        state = await self._in_thread(self._runtime.find, name)
                        last = state.waiting_for or last
                        if state.ended:
                            break
                        if client is None and state.host:
                            place = dataclasses.asdict(state) | {"name": name}
                            if ":" in state.host and "[" not in self._cfg.address:  # IPv6
                                place["host"] = f"[{state.host}]"
                            client = await stack.enter_async_context(
                                VerifierClient(
                                    self._cfg.address.format(**place),
                                    dialect=self.dialect.name,
                                    limits=self._limits,
                                    delay_s=self._delay_s,
                                    find_own_rule=self._find_own_rule,
                                )
                            )
                        if client is not None:
                            await client.root()
                            return client
                    except VerifierError as error:  # it starts, or the API has a bad moment
                        last = str(error)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise VerifierError(
                f"container {name} of {self._cfg.image}: no answer within "
                f"{self._cfg.start_timeout_s:g} s (verifier.containers.start_timeout_s); {last}"
            ) from None
        raise VerifierError(f"container {name} of {self._cfg.image} {state.ended}")

    def _remove(self, name: str) -> asyncio.Task[None]:
        if name not in self._removals:
            self._removals[name] = asyncio.create_task(self._removed(name))
        return self._removals[name]

    async def _removed(self, name: str) -> None:
        """Deletes a container, however often that takes."""
        container = self._open.pop(name, None)
        if container is not None:
            await container.stack.aclose()
            await asyncio.wait([container.creation])  # what comes after its deletion would stay
            container.creation.exception()  # told to whoever asked for it, or nobody asks any more
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._in_thread(self._runtime.delete, name)
                break
            except VerifierError as error:
                line = key_values(
                    "container_not_deleted", name=name, reason=error, again_in_s=pause_s
                )
                print(line, flush=True)
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
        del self._removals[name]

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep(by_label=CLIENT, value=self._id)
            except VerifierError as error:
                print(key_values("containers_not_listed", reason=error), flush=True)

    async def _sweep(self, *, by_label: str, value: str) -> int:
        """Begins to delete those with the label that nobody here knows, and all whose lifetime is
        over; how many that are."""
        found = await self._in_thread(self._runtime.labels)
        ours = self._open.keys() | self._removals.keys()
        left = [
            name
            for name, labels in found.items()
            if name not in ours and (labels.get(by_label) == value or _is_over(labels))
        ]
        for name in left:
            self._remove(name)
        return len(left)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


# A server's sessions, in one of two protocols, a container for each, or recorded ones in this
# process.
Client = VerifierClient | OpenEnvClient | ContainerClient | RecordedClient


def _is_over(labels: dict[str, str]) -> bool:
    """By the clock of the host that made it, which may be behind this one's."""
    until = labels.get(UNTIL, "")
    return until.isdecimal() and int(until) + CLOCKS_DIFFER_S < time.time()
