"""Starts actor processes on this host, and starts those again that die.

For `main`: `--role=actor --actors=4` runs actors 0 to 3 like this, `--role=all --actors=4` runs
actors 1 to 3 beside its own. Each process prints to logs/actor-<id>.log in the workdir and ends
when this one ends.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from uirl_jax.errors import RestartError, UirlError
from uirl_jax.log_lines import key_values

FIRST_PAUSE_S = 1.0  # before a restart; doubled while the process dies soon after its start
LONGEST_PAUSE_S = 60.0
LONG_LIFE_S = 60.0  # a process that lived so long was healthy: pauses and tries start anew
MAX_TRIES = 5  # without a long life between them; those that ask for a restart do not count
STOP_TIMEOUT_S = 60.0  # an actor first publishes its complete groups


@dataclasses.dataclass(frozen=True)
class ActorProcesses:
    """The running actors; `wait` returns once all of them have ended."""

    threads: Sequence[threading.Thread]
    failures: list[str]

    def wait(self, stop: threading.Event) -> None:
        """Waits until all actors have ended, or until `stop` is set.

        Raises: UirlError: all have ended and at least one was given up.
        """
        while any(thread.is_alive() for thread in self.threads) and not stop.wait(0.1):
            pass
        if self.failures and not stop.is_set():
            raise UirlError("; ".join(self.failures))


@contextlib.contextmanager
def actor_processes(
    command: Sequence[str], numbers: Sequence[int], log_dir: Path
) -> Iterator[ActorProcesses]:
    """Runs one process per actor number until the block ends.

    A process that ends with code 0 is done: the learner has taken its last step. Another one is
    started again after a pause, and given up after MAX_TRIES; the others continue. One that ends
    with RestartError's code is never given up: what it waits for may be away for an hour.

    Args:
      command: of an actor; `--actor=<number>` is added.
      log_dir: of the processes' output; created if needed.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    ending = threading.Event()
    failures: list[str] = []
    watchers = [_Watcher(command, number, log_dir, ending, failures) for number in numbers]
    threads = [
        threading.Thread(target=watcher.run, name=f"actor-{watcher.number}", daemon=True)
        for watcher in watchers
    ]
    for thread in threads:
        thread.start()
    try:
        yield ActorProcesses(threads, failures)
    finally:
        ending.set()
        for watcher in watchers:
            watcher.terminate()
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)
        for watcher in watchers:
            watcher.kill()


class _Watcher:
    """One actor number: its process, and the thread that waits for it."""

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        log_dir: Path,
        ending: threading.Event,
        failures: list[str],
    ) -> None:
        self.number = number
        self._command = [*command, f"--actor={number}"]
        self._log_file = log_dir / f"actor-a{number}.log"
        self._ending, self._failures = ending, failures
        self._lock = threading.Lock()  # nothing is started once `terminate` was called
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        pause_s, tries = FIRST_PAUSE_S, 0
        while True:
            started_s = time.monotonic()
            try:
                process = self._start()
            except OSError as error:  # no memory for another process, a full disk
                tries += 1
                event, fields = "actor_not_started", {"reason": error}
                why = f"cannot be started: {error}"
            else:
                if process is None or (exit_code := process.wait()) == 0 or self._ending.is_set():
                    return
                if time.monotonic() - started_s >= LONG_LIFE_S:
                    pause_s, tries = FIRST_PAUSE_S, 0
                tries += exit_code != RestartError.exit_code
                event, fields = "actor_died", {"exit_code": exit_code, "log": self._log_file}
                why = f"ended {tries} times with code {exit_code}: {self._last_line()} (log: "
                why += f"{self._log_file})"
            if tries == MAX_TRIES:
                reason = f"actor a{self.number} {why}"
                self._failures.append(reason)
                self._say("actor_given_up", reason=reason)
                return
            self._say(event, **fields, restart_in_s=pause_s)
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, event: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # of a full disk; this thread must not end by it
            print(key_values(event, actor=f"a{self.number}", **fields), flush=True)

    def terminate(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock, self._log_file.open("ab") as log:
            if self._ending.is_set():
                return None
            self._process = subprocess.Popen(
                [*self._command, f"--exit_with_parent={os.getpid()}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            pid = self._process.pid
        self._say("actor_started", pid=pid)
        return self._process

    def _last_line(self) -> str:
        try:
            with self._log_file.open("rb") as file:
                file.seek(max(self._log_file.stat().st_size - 4096, 0))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError as error:  # someone has tidied up logs/
            return f"its log cannot be read, {error.strerror}"
        return lines[-1] if lines else "it printed nothing"


def command_of_this_process() -> list[str]:
    """The command that starts this program again with the same arguments."""
    return [sys.executable, "-m", "uirl_jax.main", *sys.argv[1:]]


def stop_with_parent(parent_pid: int, stop: threading.Event) -> None:
    """Sets `stop` once the parent process has ended, from a thread."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            if stop.wait(1.0):
                return
        stop.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
