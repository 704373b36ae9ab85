"""Processes in which contenders are measured, each alone in its memory.

A command's module is what such a process runs: `python -m tools.bench.train ours DIRECTORY`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


def answer_of(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object on the last line that `python -m module arguments` prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that answers questions, one at a time (see `answer_questions`)."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
          environment: the process's whole environment; None for that of this process.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def ask(self, question: Any) -> dict[str, Any]:
        """Raises: SystemExit if the process ends instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"error: {self._process.args}: ended with exit code {code}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def answer_questions(answer: Callable[[Any], dict[str, Any]]) -> None:
    """The other end of a `Worker`: a line of JSON in, a line of JSON out, until stdin closes."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
