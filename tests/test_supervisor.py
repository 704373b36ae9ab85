"""The bundled verifier's process is started again, whatever kept it from starting."""

import errno
import os
import signal
import subprocess
import threading
import time

import pytest

from uirl_jax.errors import VerifierError
from uirl_jax.verifiers.server import supervisor


class FailingPopen:
    """subprocess.Popen that fails so many times, and keeps the processes of the other times."""

    def __init__(self, monkeypatch) -> None:
        self.failures, self.processes, self._popen = 0, [], subprocess.Popen
        monkeypatch.setattr(supervisor.subprocess, "Popen", self)

    def __call__(self, *args, **kwargs):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.processes.append(self._popen(*args, **kwargs))
        return self.processes[-1]


def test_server_that_cannot_be_started_again_at_first_is_tried_again(tmp_path, monkeypatch, capfd):
    popen, port_file = FailingPopen(monkeypatch), tmp_path / "port"
    with supervisor.bundled_server(port_file, tmp_path / "log"):
        popen.failures = 3
        os.kill(popen.processes[0].pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while len(popen.processes) < 2 or not supervisor.read_urls(port_file):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    said = [line for line in capfd.readouterr().out.splitlines() if "verifier_not_started" in line]
    assert len(said) == 3 and "Cannot allocate memory" in said[0], said
    assert said[-1].endswith("again_in_s=1.6")
    assert popen.processes[1].poll() is not None


def test_server_that_cannot_be_started_at_all_is_said_at_once(tmp_path, monkeypatch):
    popen = FailingPopen(monkeypatch)
    popen.failures = 1
    with (
        pytest.raises(VerifierError, match=r"did not start: .*Cannot allocate memory"),
        supervisor.bundled_server(tmp_path / "port", tmp_path / "log"),
    ):
        pass
    assert not popen.processes


def test_server_that_is_being_started_as_the_block_ends_is_ended_too(tmp_path, monkeypatch):
    popen = FailingPopen(monkeypatch)
    starting, go_on = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        if popen.processes:
            starting.set()
            go_on.wait(30)
        return popen(*args, **kwargs)

    monkeypatch.setattr(supervisor.subprocess, "Popen", slow)
    with supervisor.bundled_server(tmp_path / "port", tmp_path / "log"):
        popen.processes[0].kill()
        assert starting.wait(30)
        threading.Timer(0.2, go_on.set).start()
    assert len(popen.processes) == 2
    assert all(process.poll() is not None for process in popen.processes)
