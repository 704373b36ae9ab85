"""The bundled server as a process of its own, in a folder of its own, for tests that try to break
it: what it says, what it logs, and what it leaves in its folder."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import requests

REPO = Path(__file__).parents[1]
BOUND_S = (
    10.0  # of any call: the delays are cut to some milliseconds, and a browser to its own 10 s
)
_PROGRAM = """
import logging, os, pathlib
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.server import server
from uirl_jax.verifiers.server.open_session import ServerLimits
logging.basicConfig(level=logging.INFO)
server.run_server(
    port_file=pathlib.Path("port"), parent_pid=os.getppid(),
    limits=ServerLimits(
        max_sessions=8, max_browsers=4, max_delay_s=0.01, max_actions_per_s=1e6, warm_browsers=1),
    single={single},
)
"""


@dataclasses.dataclass(frozen=True)
class RunningServer:
    """Where it listens, and the folder that is its own."""

    base: str
    folder: Path
    log: Path
    pid: int
    http: requests.Session

    def call(self, method: str, path: str, **options) -> requests.Response:
        return self.http.request(method, f"{self.base}{path}", timeout=BOUND_S, **options)

    def create(self, name: str, **query) -> str:
        """The id of a new session."""
        answer = self.call("POST", "/session", params={"type": name, "seed": 1, **query})
        assert answer.status_code == 200, answer.text
        return answer.json()["session_ids"][0]

    def delete_all_but(self, kept: str) -> None:
        for session_id, info in self.call("GET", "/status").json().items():
            if info["stop_time"] is None and session_id != kept:
                assert self.call("DELETE", f"/session/{session_id}").status_code == 200

    def seen_of(self, session_id: str) -> tuple[bytes, dict, dict]:
        """What may change in a session only by calls that name it."""
        path = f"/session/{session_id}"
        info = self.call("GET", path).json()
        progress = self.call("GET", f"{path}/progress").json()
        return self.call("GET", f"{path}/screenshot").content, info, progress

    def check_whole(self) -> None:
        """It answers, no handler has failed in a way that nobody thought of, and no file is new."""
        assert self.call("GET", "/").status_code == 200
        assert "event=error" not in self.log.read_text(errors="replace")
        assert [path.name for path in self.folder.rglob("*")] == ["port"]


@contextlib.contextmanager
def running_server(folder: Path, single: str = "None") -> Iterator[RunningServer]:
    """A server in a new folder below `folder`; `single` is an expression for its one task."""
    home, log = folder / "home", folder / "log"
    home.mkdir()
    environment = os.environ | {"PYTHONPATH": str(REPO), "HOME": str(home)}
    program = _PROGRAM.format(single=single)
    with (
        log.open("w") as errors,
        requests.Session() as http,
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=home, env=environment, stderr=errors
        ) as process,
    ):
        try:
            end_s = time.monotonic() + 20.0
            while not (home / "port").exists():
                assert process.poll() is None and time.monotonic() < end_s, log.read_text()
                time.sleep(0.02)
            http.trust_env = False  # no proxy of the machine's stands before loopback
            port = int((home / "port").read_text())
            yield RunningServer(f"http://127.0.0.1:{port}", home, log, process.pid, http)
        finally:
            process.kill()
