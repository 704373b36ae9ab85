"""The processes of one learner on several hosts: how they find, compare, tell and end each other.

Used by `main` before anything touches a device, and by `learner.hosts`. The machinery is JAX's:
`jax.distributed` connects the processes through a coordination service in process 0, whose
key-value store carries the few short messages of this module. No array passes here.

What ends a process, and how the others learn of it:

    an error           the process tells its reason; the others print it and end with its code
    SIGTERM            the process asks process 0 to stop; all end after the same step
    SIGKILL, a lost    JAX aborts the others after cluster.heartbeat_s (they cannot catch it), or
    host, SIGSTOP      their collective fails at once

Since an abort cannot be caught, each process of a cluster runs as the child of a small process
(`run_in_child`), which says in one line what happened and ends with the code for "start again".
"""

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

# jax 0.10 has no public access to the coordination service's key-value store, nor a way to ask
# whether a cluster is detected without joining it. requirements.txt keeps jax below 0.11.
from jax._src import clusters, distributed

from uirl_jax.errors import ConfigError, RestartError

_POLL_S = 0.2  # between two looks at the messages of other processes: 0.5 ms each
_LAST_WORDS_S = 5.0  # process 0 holds the messages: it waits so long until the others read its own
_KEY = "uirl"
_ADVICE = "start all processes again with the same command"
# Parts of the messages of a collective whose other end is gone: on a CPU, a GPU, a TPU.
_LOST = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Connection reset by peer")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Time-outs of a learner on several hosts."""

    # A host that is silent for so long is lost, and the others end. Sent by a thread of its own,
    # so that long compilations do not count.
    heartbeat_s: int = dataclasses.field(default=10, metadata={"min": 2, "max": 3600})
    # All processes must have come by then; also the limit on waiting for each other before step 1.
    start_timeout_s: int = dataclasses.field(default=300, metadata={"min": 5, "max": 86_400})
    # After SIGTERM the step in progress may take so long; then all end without it. Google Cloud
    # gives a preempted machine 30 s.
    stop_timeout_s: float = dataclasses.field(default=25.0, metadata={"min": 0.0, "max": 86_400.0})
    # A record that process 0 has seen may reach another host's file system so much later.
    records_timeout_s: float = dataclasses.field(default=60.0, metadata={"min": 0.0, "max": 3600.0})
    # Exit code after SIGTERM. Kubernetes takes 0 as done: set 75, "start again", there.
    preempted_exit_code: int = dataclasses.field(default=0, metadata={"min": 0, "max": 125})


class Membership(NamedTuple):
    """This process's place among the processes of a learner."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int  # number of this one
    local_device_ids: Sequence[int] | None = None  # None: all devices of the host


# -------------------------------------------------------------------------- finding each other


def find(
    method: str, coordinator: str, num_processes: int | None, process_index: int | None
) -> Membership | None:
    """This process's membership, from flags or from the cluster that it was started by.

    Args:
      method: "auto", "none", or JAX's name of a cluster: slurm, ompi, mpi4py, gcetpu, gketpu, k8s.
      coordinator, num_processes, process_index: all three, or none of them.
    Returns: None for a process alone.
    Raises: ConfigError: flags that contradict each other, or a cluster that is not there.
    """
    given = {
        "--coordinator": coordinator or None,
        "--num_processes": num_processes,
        "--process_index": process_index,
    }
    missing = [name for name, value in given.items() if value is None]
    if not missing:
        assert num_processes is not None and process_index is not None
        if ":" not in coordinator or not coordinator.rpartition(":")[2].isdecimal():
            raise ConfigError(f"--coordinator={coordinator}: expected HOST:PORT of process 0")
        if not 0 <= process_index < num_processes:
            raise ConfigError(
                f"--process_index={process_index}: expected 0 to {num_processes - 1}, because "
                f"--num_processes={num_processes}"
            )
        return Membership(coordinator, num_processes, process_index)
    if len(missing) < len(given):
        raise ConfigError(
            f"{' and '.join(missing)} missing: --coordinator, --num_processes and --process_index "
            "go together"
        )
    return None if method == "none" else _detected(method)


def methods() -> list[str]:
    """The clusters that JAX detects, by name."""
    return sorted(kind.name for kind in clusters.ClusterEnv._cluster_types)


def _detected(method: str) -> Membership | None:
    name = None if method == "auto" else method
    if name is not None:
        kinds = {kind.name: kind for kind in clusters.ClusterEnv._cluster_types}
        if name not in kinds:
            known = ", ".join(methods())
            raise ConfigError(f"--cluster={name}: expected auto, none or one of {known}")
        if not kinds[name].is_env_present():
            raise ConfigError(f"--cluster={name}: this process was not started by {name}")
    address, count, index, device_ids = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, name, initialization_timeout=60
    )
    if address is None or count is None or index is None:
        return None
    return Membership(address, count, index, device_ids) if count > 1 else None


def join(membership: Membership, cfg: ClusterConfig) -> "Cluster":
    """Connects this process to the others. Call it before JAX's first use of a device.

    Raises: RestartError: the coordinator cannot be reached. If another process does not come, JAX
      aborts this one after start_timeout_s.
    """
    # SIGTERM is handled by `main`. JAX's own service would swallow it until every process asks.
    jax.config.update("jax_enable_preemption_service", False)
    # On a CPU: programs that run at once share gloo's connections, and nothing orders them.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # When another host is lost, JAX aborts: a Python traceback of every thread explains nothing.
    faulthandler.disable()
    bind = _bind_address(membership.coordinator) if membership.process == 0 else None
    try:
        jax.distributed.initialize(
            membership.coordinator,
            membership.processes,
            membership.process,
            membership.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=cfg.start_timeout_s,
            heartbeat_timeout_seconds=cfg.heartbeat_s,
            shutdown_timeout_seconds=cfg.heartbeat_s,
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:  # jaxlib's own errors are RuntimeErrors
        raise RestartError(
            f"process {membership.process} of {membership.processes} cannot join the learner at "
            f"{membership.coordinator}: {_first_line(error)}"
        ) from error
    if jax.default_backend() == "cpu":
        # jaxlib 0.10.2: programs from the cache order their collectives otherwise than in the
        # process that compiled them: four processes on (data 2, fsdp 2) ended in gloo at once.
        jax.config.update("jax_enable_compilation_cache", False)
    return Cluster(membership.process, membership.processes, distributed.global_state.client)


def _bind_address(coordinator: str) -> str | None:
    """Where process 0 listens: its address in the cluster, not all of the host's.

    None, JAX's default of all addresses, where the host knows its own name as a loopback address
    only, as Debian does: other hosts could not connect to that one.
    """
    host, _, port = coordinator.rpartition(":")
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host.strip("[]"))
        loopback = ipaddress.ip_address(address).is_loopback
        if not loopback or host in ("localhost", address):
            return f"{address}:{port}"
    return None


# ------------------------------------------------------------------------- once they are joined


class Cluster:
    """The connection to the other processes; with one process every method does nothing.

    Attributes:
      index, count: of the processes. Process 0 decides, the others follow.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None) -> None:
        self.index, self.count = index, count
        self._client = client
        self._ending = threading.Lock()

    @property
    def leads(self) -> bool:
        return self.index == 0

    def tell(self, key: str, text: str) -> None:
        """Leaves a message for the other processes; a second one under the same key is dropped."""
        if self._client is not None:
            with contextlib.suppress(RuntimeError):  # ALREADY_EXISTS
                self._client.key_value_set(f"{_KEY}/{key}", text)

    def ask(self, key: str) -> str | None:
        """The message under a key, if there is one yet."""
        if self._client is None:
            return None
        try:
            return self._client.key_value_try_get(f"{_KEY}/{key}")
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def wait_for(self, key: str) -> str:
        """Waits for a message. What else may happen, `watched` notices."""
        while (text := self.ask(key)) is None:
            time.sleep(_POLL_S / 10)
        return text

    # ------------------------------------------------------------------ comparing

    def compare(self, facts: Mapping[str, Any], timeout_s: float) -> None:
        """Compares what must be equal in all processes, such as code and config.

        Args:
          facts: JSON; "host" may differ.
        Raises: ConfigError, the same in every process: it names the first process that differs
          from process 0, and in what.
        """
        if self._client is None:
            return
        self.tell(f"facts/{self.index}", json.dumps(facts))
        deadline_s = time.monotonic() + timeout_s
        everyone = []
        for index in range(self.count):
            while (text := self.ask(f"facts/{index}")) is None:
                if time.monotonic() > deadline_s:
                    raise RestartError(f"process {index} of {self.count} did not say its version")
                time.sleep(_POLL_S / 10)
            everyone.append(json.loads(text))
        for index, theirs in enumerate(everyone):
            differences = sorted(_differences(everyone[0], theirs, ""))
            if differences:
                shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
                raise ConfigError(
                    f"process {index} on {theirs['host']} differs from process 0 on "
                    f"{everyone[0]['host']}: {shown}; install the same release on all hosts and "
                    "give them the same config"
                )

    # ------------------------------------------------------------------ stopping and failing

    @contextlib.contextmanager
    def watched(
        self, stop: threading.Event, orphaned: threading.Event, cfg: ClusterConfig
    ) -> Iterator[None]:
        """Looks after the other processes from a thread until the block ends.

        In every process: `stop` asks process 0 to stop, an error of another process ends this one.
        In process 0: `stop` is set when another process asks, and all end after cfg.stop_timeout_s.

        Args:
          orphaned: set when this process's parent has ended; then all end, to be started again.
        """
        ended = threading.Event()

        def watch() -> None:
            stopping_s: float | None = None
            while not ended.wait(_POLL_S):
                if orphaned.is_set():
                    reason = f"error: the parent of process {self.index} is lost; {_ADVICE}"
                    self.end(reason, RestartError.exit_code)
                if stop.is_set() and stopping_s is None:
                    stopping_s = time.monotonic()
                    self.tell("stop", f"process {self.index}")
                if self.leads and not stop.is_set() and self.ask("stop") is not None:
                    stop.set()
                if self.leads and stopping_s is not None:
                    late_s = time.monotonic() - stopping_s - cfg.stop_timeout_s
                    if late_s > 0 and not ended.is_set():
                        reason = "preempted in a step that was not finished in time; it is repeated"
                        self.end(reason, cfg.preempted_exit_code)
                if (failure := self._failure()) is not None:
                    self._end_with(failure)

        thread = threading.Thread(target=watch, name="cluster", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def end(self, reason: str, exit_code: int) -> NoReturn:
        """Ends all processes with this reason: tells it, prints it, and does not return.

        A process that fails cannot leave in the ordinary way: JAX would wait for the others, which
        wait in a collective.
        """
        self.tell("failed", json.dumps([self.index, socket.gethostname(), reason, exit_code]))
        self._end_with(self._failure() or [self.index, "", reason, exit_code])

    def end_after(self, error: Exception, line: str = "", exit_code: int = 1) -> NoReturn:
        """`end` for an exception of this process, or for the failure of another that caused it.

        Args:
          line, exit_code: of an error that is told to the user; without a line it is a bug, whose
            traceback is printed.
        """
        lost = _is_lost_connection(error)
        # A process that ends breaks the collectives of the others: its reason is the better one.
        deadline_s = time.monotonic() + (_LAST_WORDS_S if lost else 0.0)
        while (failure := self._failure()) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if failure is not None:
            self._end_with(failure)
        if lost:
            reason = f"another process is lost ({_first_line(error)}); {_ADVICE}"
            self.end(f"error: {reason}", RestartError.exit_code)
        if line:
            self.end(line, exit_code)
        sys.excepthook(type(error), error, error.__traceback__)
        self.end(f"error: {type(error).__name__}: {_first_line(error)}", 1)

    def leave(self) -> None:
        """Ends the connection, after a wait for the others."""
        if self._client is not None:
            self._client = None
            jax.distributed.shutdown()

    def _failure(self) -> list[Any] | None:
        if self._client is None:
            return None
        text = self.ask("failed")
        return None if text is None else json.loads(text)

    def _end_with(self, failure: list[Any]) -> NoReturn:
        self._ending.acquire()  # by the first thread; another one waits here for the end
        index, host, reason, exit_code = failure
        where = "" if index == self.index else f" (process {index} on {host})"
        print(f"{reason}{where}", file=sys.stderr if exit_code else sys.stdout, flush=True)
        sys.stdout.flush()
        self.tell(f"seen/{self.index}", "")
        if self.leads:  # JAX aborts a process that is alive when this one has ended
            deadline_s = time.monotonic() + _LAST_WORDS_S
            others = range(1, self.count)
            while time.monotonic() < deadline_s and any(
                self.ask(f"seen/{other}") is None for other in others
            ):
                time.sleep(_POLL_S / 4)
            time.sleep(_POLL_S)  # for the last of them, from its message to its end
        os._exit(exit_code)


ALONE = Cluster()


def _is_lost_connection(error: Exception) -> bool:
    """Whether an exception is what a collective raises when another process is gone."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:  # Orbax's error in one of ours
        causes.append(cause)
    return any(part in str(cause) for cause in causes for part in _LOST)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _differences(first: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(other, dict):
        for key in first.keys() | other.keys():
            if path or key != "host":
                below = f"{path}.{key}" if path else str(key)
                yield from _differences(first.get(key), other.get(key), below)
    elif first != other:
        yield f"{path} is {other!r} there and {first!r} in process 0"


@functools.cache
def code_facts() -> dict[str, str]:
    """What must be equal on all hosts: the release, a hash of its sources, and what computes."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    facts = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "uirl_jax": f"sources {digest.hexdigest()}",
    }
    for name in ("jax", "jaxlib", "libtpu", "orbax-checkpoint"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def end_with_the_others(stop: threading.Event) -> None:
    """From now on SIGTERM sets `stop`, also one that has been blocked since this process started.

    A process that died of it before it had joined would let the others wait for start_timeout_s.
    This one joins them first, and then all leave together.
    """
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# ------------------------------------------------------------------------------------ the parent


def run_in_child(command: Sequence[str], membership: Membership) -> int:
    """Runs the process of a cluster as a child; returns its exit code, 75 if a signal ended it.

    Args:
      command: of the child; --exit_with_parent is added. It gets this process's SIGTERM and SIGINT,
        also a SIGTERM that has been blocked since this process started.
    """
    child = subprocess.Popen([*command, f"--exit_with_parent={os.getpid()}"])

    def forward(signum: int, frame: Any) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = child.wait()
    if code >= 0:
        return code
    causes = {
        signal.SIGABRT: "JAX ended it: another process is lost or stopped, or did not come",
        signal.SIGKILL: "by hand, or by the system for lack of memory",
    }
    name = signal.Signals(-code).name
    cause = causes.get(signal.Signals(-code), "see above")
    print(
        f"error: process {membership.process} of {membership.processes} ended by {name} "
        f"({cause}); {_ADVICE}",
        file=sys.stderr,
        flush=True,
    )
    return RestartError.exit_code
