"""The processes of a run on this machine: started, killed, and started again as a supervisor would.

All processes of the learner are started together, an actor alone. What a process ends with says
what follows: 0 it is done, 75 or a signal it is started again, 1 a mistake that ends everything.
"""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.bench import cluster_world
from uirl_jax.errors import RestartError

PROCESSES, ACTORS = 2, 4
RESTART_S = 1.0  # after the end of a process
END_S = 60.0  # for all other processes of a learner to end, once one has


class GivenUpError(Exception):
    """A process ended in a way that starting it again does not mend."""


@dataclasses.dataclass(frozen=True)
class Command:
    """How the processes of a run are started.

    Attributes:
      flags: of every role: config, workdir, values.
      directory: for the processes' local directories and outputs.
      environment: of every process.
    """

    flags: Sequence[str]
    directory: Path
    environment: Mapping[str, str]

    def local_dir(self, name: str) -> Path:
        return self.directory / name

    def output(self, name: str) -> Path:
        return self.directory / f"{name}.txt"

    def start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        """Starts a process; its output is appended to that of earlier ones of its name."""
        with self.output(name).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "uirl_jax.main", *self.flags),
                    *(f"--local_dir={self.local_dir(name)}", *flags),
                ],
                cwd=cluster_world.ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def last_line(self, name: str) -> str:
        lines = self.output(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


@dataclasses.dataclass
class Member:
    """A process that is started again; `process` is the last one started."""

    name: str
    flags: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    ended_s: float | None = None  # when its end was noticed

    @property
    def is_done(self) -> bool:
        return self.process is not None and self.process.poll() == 0


class Fleet:
    """The learner's processes and the actors.

    Attributes:
      starts: how often a process was started.
      learner_starts: how often the learner was.
      unexplained: a line for every end that no signal of `strike` explains, and for every process
        of the learner that had to be ended because it stayed when another one had ended.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        port = cluster_world.free_port()
        of_learner = ("--role=learner", f"--coordinator=127.0.0.1:{port}")
        self.learner = [
            Member(
                f"learner-{index}",
                (*of_learner, f"--num_processes={PROCESSES}", f"--process_index={index}"),
            )
            for index in range(PROCESSES)
        ]
        self.actors = [
            Member(f"actor-{number}", ("--role=actor", f"--actor={number}"))
            for number in range(ACTORS)
        ]
        self.starts = self.learner_starts = 0
        self.unexplained: list[str] = []
        self._struck: set[str] = set()  # whose next end is explained

    def keep_running(self) -> bool:
        """Starts what has to be started; returns whether the learner is not done yet.

        Raises: GivenUpError: a process ended with a mistake of the user's.
        """
        self._keep_learner()
        for actor in self.actors:
            if self._has_ended(actor) and not actor.is_done and self._is_due(actor):
                self._start(actor)
        return not all(member.is_done for member in self.learner)

    def strike(self, target: str, signum: signal.Signals) -> bool:
        """Sends a signal; returns False if the process is not running.

        Args:
          target: a member's name, or "child of" it: the process of the cluster below it.
        """
        name = target.removeprefix("child of ")
        member = next(m for m in (*self.learner, *self.actors) if m.name == name)
        if member.process is None or member.process.poll() is not None:
            return False
        pid = member.process.pid if name == target else child_of(member.process.pid)
        if pid is None:
            return False
        os.kill(pid, signum)
        # One end of a learner's process ends all of them.
        group = self.learner if member in self.learner else [member]
        self._struck.update(m.name for m in group)
        return True

    def end(self, timeout_s: float) -> None:
        """Waits until all have ended; a SIGTERM, then a SIGKILL, ends those that have not."""
        members = [*self.learner, *self.actors]
        running = [m.process for m in members if m.process is not None]
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + timeout_s
            for process in running:
                if signum is not None and process.poll() is None:
                    _send(process, signum)
            while any(p.poll() is None for p in running) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        for process in running:
            process.wait()

    def _keep_learner(self) -> None:
        ended = [member for member in self.learner if self._has_ended(member)]
        if not ended:
            return
        if len(ended) == len(self.learner):
            if all(m.is_done for m in ended):
                return
            if all(map(self._is_due, ended)):
                self.learner_starts += 1
                for member in self.learner:
                    self._start(member)
                self._struck.difference_update(m.name for m in self.learner)
            return
        first_s = min(member.ended_s for member in ended if member.ended_s is not None)
        if time.monotonic() - first_s > END_S:
            for member in self.learner:
                if member not in ended and member.process is not None:
                    last = self._command.last_line(member.name)
                    self.unexplained.append(
                        f"{member.name}: still there {END_S:.0f} s after another's end: {last}"
                    )
                    self._struck.add(member.name)
                    _send(member.process, signal.SIGKILL)

    def _has_ended(self, member: Member) -> bool:
        """Also notes an end that is new. Raises: GivenUpError."""
        if member.process is None:
            return True
        code = member.process.poll()
        if code is None:
            return False
        if member.ended_s is None:
            member.ended_s = time.monotonic()
            line = f"{member.name}: exit code {code}: {self._command.last_line(member.name)}"
            if code not in (0, RestartError.exit_code) and code > 0:
                raise GivenUpError(line)
            if code != 0 and member.name not in self._struck:
                self.unexplained.append(line)
        return True

    def _is_due(self, member: Member) -> bool:
        return member.ended_s is None or time.monotonic() - member.ended_s >= RESTART_S

    def _start(self, member: Member) -> None:
        member.process = self._command.start(member.name, *member.flags)
        member.ended_s = None
        self.starts += 1
        if member not in self.learner:
            self._struck.discard(member.name)


def _send(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Sends a signal; a SIGKILL also to the child, to which a parent cannot pass it on."""
    child = child_of(process.pid)
    process.send_signal(signum)
    if signum == signal.SIGKILL and child is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)


def child_of(pid: int) -> int | None:
    """The first child of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def targets(seed: int) -> Iterator[str]:
    """Whom each SIGKILL hits: in random order, each process once before any twice."""
    names = [f"actor-{number}" for number in range(ACTORS)]
    for index in range(PROCESSES):
        names += [f"learner-{index}", f"child of learner-{index}"]
    rng = random.Random(seed)
    while True:
        yield from rng.sample(names, len(names))
