"""Processes that tests start, none of which outlives its test."""

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def killed(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process, which is killed where the block ends: leaving a Popen's own waits for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()
