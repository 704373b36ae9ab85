"""Runs the bundled verifier server as a child process, and finds its port.

Used by `main`. A server that dies is started again; one whose parent dies ends.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from uirl_jax.errors import VerifierError
from uirl_jax.log_lines import key_values

START_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 0.2  # doubled while there is no memory for its process, or no room for its log
LONGEST_PAUSE_S = 30.0


def read_urls(port_file: Path) -> list[str]:
    """Base URL of the server that wrote `port_file`; none while it starts."""
    try:
        return [f"http://127.0.0.1:{int(port_file.read_text())}"]
    except (OSError, ValueError):
        return []


@contextlib.contextmanager
def bundled_server(
    port_file: Path,
    log_file: Path,
    *,
    port: int = 0,
    task_dirs: Sequence[str] = (),
    recorded: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Runs `python -m uirl_jax.verifiers.server` until the block ends, restarting it when it dies.

    Args:
      recorded: files of recorded sets by name.

    Raises:
      VerifierError: it does not come up at all; the end of its log says why.
    """
    port_file.unlink(missing_ok=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "uirl_jax.verifiers.server"),
        *("--port", str(port), "--port-file", str(port_file)),
        *("--exit-with-parent", str(os.getpid())),
        *(f"--task-dir={folder}" for folder in task_dirs),
        *(f"--recorded-set={name}={path}" for name, path in (recorded or {}).items()),
    ]
    ending, up = threading.Event(), threading.Event()
    starting = threading.Lock()  # nothing is started once the block has ended
    process: subprocess.Popen[bytes] | None = None
    not_started = ""

    def keep_running() -> None:
        nonlocal process, not_started
        pause_s = RESTART_PAUSE_S
        while not ending.is_set():
            try:
                with log_file.open("ab") as log, starting:
                    if ending.is_set():
                        return
                    # A session of its own: Ctrl-C in the terminal is for this process, which ends
                    # it.
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                process.wait()
                port_file.unlink(missing_ok=True)
                pause_s = RESTART_PAUSE_S
            except OSError as error:
                not_started = str(error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if up.is_set():
                    line = key_values("verifier_not_started", reason=error, again_in_s=pause_s)
                    with contextlib.suppress(OSError):  # the output may be on the same full disk
                        print(line, flush=True)
            if not up.is_set():
                return  # it never listened: to start it again would not help
            ending.wait(pause_s)

    thread = threading.Thread(target=keep_running, name="verifier-supervisor", daemon=True)
    thread.start()
    try:
        waited_s = 0.0
        while not read_urls(port_file):
            if not thread.is_alive() or waited_s > START_TIMEOUT_S:
                reason = not_started or _last_line(log_file) or "no word from it"
                raise VerifierError(
                    f"the bundled verifier did not start: {reason} (log: {log_file})"
                )
            ending.wait(0.05)
            waited_s += 0.05
        up.set()
        yield
    finally:
        with starting:
            ending.set()
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        thread.join(10)
        port_file.unlink(missing_ok=True)


def _last_line(log_file: Path) -> str:
    return "".join(log_file.read_text(errors="replace").strip().splitlines()[-1:])
