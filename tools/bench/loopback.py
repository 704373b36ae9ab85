"""Servers in processes of their own, so that what is measured is this process's alone."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from aiohttp import web


@contextlib.contextmanager
def serving(module: str, *arguments: str) -> Iterator[int]:
    """Runs `python -m module arguments` while the block runs; yields the port that it prints.

    Raises: SystemExit if the process ends before it has printed a port.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"error: {command}: ended with exit code {process.wait()}")
            yield int(line)
        finally:
            process.kill()


def serve(app: web.Application) -> None:
    """The server's process: prints its port and answers until its standard input closes."""

    async def run() -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()

    asyncio.run(run())
