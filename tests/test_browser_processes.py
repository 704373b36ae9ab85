"""Chromium's processes end with the server that started them, however it ends."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from tests.chromium import needs_chromium
from tests.linux_processes import command_of, descendants, runs
from tests.processes import killed

pytestmark = needs_chromium

REPO = Path(__file__).parents[1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_server(tmp_path, signum):
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "uirl_jax.verifiers.server",
        "--port-file",
        str(port_file),
    ]
    server = subprocess.Popen(
        [*command, "--warm-browsers", "1"], cwd=REPO, stderr=subprocess.DEVNULL
    )
    with killed(server):
        _wait_for(port_file.exists)

        async def create():
            url = f"http://127.0.0.1:{int(port_file.read_text())}/session?type=simple_data_entry"
            async with aiohttp.ClientSession() as http, http.post(url) as response:
                assert response.status == 200, await response.text()

        asyncio.run(create())
        pids = descendants(server.pid)
        assert any(b"headless-shell" in command_of(pid) for pid in pids)
        server.send_signal(signum)
        server.wait(20)
    _wait_for(lambda: not any(runs(pid) for pid in pids))


def _wait_for(condition, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.02)
