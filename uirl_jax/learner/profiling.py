"""A trace of some steps by jax.profiler, on request; see docs/tracking.md."""

from collections.abc import Sequence
from pathlib import Path

import jax

from uirl_jax.log_lines import key_values

PROFILE_DIR = "profile"


class Profiler:
    """Traces the steps from the first to the last number of `steps`; none if it is empty."""

    def __init__(self, workdir: Path, steps: Sequence[int]) -> None:
        self._directory = workdir / PROFILE_DIR
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._running = False

    def begin(self, step: int) -> None:
        """Called before the step of this number, from 1."""
        if step in self._steps and not self._running:
            self._directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._running = True
        elif step not in self._steps:
            self.close()

    def close(self) -> None:
        """Ends a trace and writes it."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(key_values("profile_written", directory=self._directory), flush=True)
