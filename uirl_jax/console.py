"""What a run shows on the console: a progress line, and a copy of the output in a file."""

import contextlib
import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from uirl_jax.log_lines import key_values

# Python's `print` writes to sys.stdout without holding a reference to it: freed while an actor's
# thread prints, the stream would end the process with a segmentation fault (CPython issue 130163).
_NEVER_FREED: list[io.TextIOBase] = []


@contextlib.contextmanager
def output_kept(path: Path) -> Iterator[None]:
    """Appends what this process prints in the block to a file too, each line with its time (UTC).

    A progress line that is redrawn on a terminal is kept as it was when it ended. Without a place
    to write the output is only printed, and so is what another thread prints as the block ends.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        print(key_values("no_log", path=path, reason=error.strerror), flush=True)
        yield
        return
    out, err = _Kept(sys.stdout, file), _Kept(sys.stderr, file)
    _NEVER_FREED.extend((out, err))
    with (
        file,
        out.keeping(),
        err.keeping(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield


class _Kept(io.TextIOBase):
    """A stream that also writes whole lines to a file."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream, self._file, self._line = stream, file, ""
        self._keeps = True
        self._lock = threading.Lock()  # actors print from threads of their own

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Writes to the file until the block ends, and never while that is being closed."""
        try:
            yield
        finally:
            with self._lock:
                self._keeps = False

    def write(self, text: str) -> int:
        self._stream.write(text)
        with self._lock:
            if self._keeps:
                self._keep(text)
        return len(text)

    def _keep(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            shown = line.rpartition("\r")[2].removeprefix("\x1b[K")
            if shown:
                with contextlib.suppress(OSError):  # a full disk: it is printed all the same
                    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    self._file.write(f"{now} {shown}\n")
        self._line = self._line.rpartition("\r")[2]

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def format_duration(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`: a short form for progress lines."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """A progress line for one phase of a run.

    On a terminal it is redrawn in place. Otherwise (a file, a CI log) it is a key=value line,
    printed for the first and the last step, and at most once per `interval_s` in between.
    """

    BAR_CELLS = 16
    REDRAW_S = 0.1

    def __init__(
        self,
        phase: str,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        phase: "training", "cold start": the start of the line.
        total_steps: of the whole phase, including steps before a restart.
        first_step: steps done before this process started; excluded from the speed.
        """
        self._phase = phase
        self._total = total_steps
        self._first = first_step
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._interval_s = self.REDRAW_S if self._terminal else interval_s
        self._clock = clock
        self._first_seen: tuple[int, float] | None = None  # step and time of the first update
        self._printed_s: float | None = None
        self._drawn = ""

    def update(
        self,
        step: int,
        *,
        reward: float | None = None,
        success: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Args: step: number of steps done; success: in [0, 1]; None values are left out."""
        now_s = self._clock()
        if self._first_seen is None:
            self._first_seen = step, now_s
        done = step >= self._total
        recent = self._printed_s is not None and now_s - self._printed_s < self._interval_s
        if recent and not done:
            return
        self._printed_s = now_s
        # From the first update on: what comes before it (compiling, the first episodes of many in
        # parallel) says nothing about the speed. And not from one step in a thousand.
        first, first_s = self._first_seen
        taken = step - first
        known = done or taken >= max(1, (self._total - self._first) // 20)
        left_s = (now_s - first_s) / taken * (self._total - step) if known and taken else None
        left_s = 0.0 if done else left_s
        if self._terminal:
            self._draw(self._pretty(step, reward, success, tokens_per_s, left_s))
        else:
            fields = {
                "step": f"{step}/{self._total}",
                "reward": None if reward is None else f"{reward:.3f}",
                "success": None if success is None else f"{success:.3f}",
                "tokens_per_s": None if tokens_per_s is None else f"{tokens_per_s:.0f}",
                "left": None if left_s is None else format_duration(left_s),
            }
            shown = {key: value for key, value in fields.items() if value is not None}
            print(key_values("progress", phase=self._phase, **shown), file=self._stream, flush=True)

    def _pretty(
        self,
        step: int,
        reward: float | None,
        success: float | None,
        tokens_per_s: float | None,
        left_s: float | None,
    ) -> str:
        filled = round(self.BAR_CELLS * min(step, self._total) / max(self._total, 1))
        parts = [
            f"{self._phase} {'█' * filled}{'░' * (self.BAR_CELLS - filled)} {step}/{self._total}"
        ]
        if reward is not None:
            parts.append(f"reward {reward:.2f}")
        if success is not None:
            parts.append(f"success {success:.0%}")
        if tokens_per_s is not None:
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        if left_s is not None:
            parts.append(f"{format_duration(left_s)} left")
        return "  ".join(parts)

    def _draw(self, line: str) -> None:
        # One column stays free: a full line would wrap, and a redraw replaces only the last row.
        columns = shutil.get_terminal_size().columns
        self._drawn = line[: max(columns - 1, 1)]
        self._stream.write(f"\r\x1b[K{self._drawn}")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Prints a line above the progress line."""
        if self._terminal and self._drawn:
            self._stream.write(f"\r\x1b[K{text}\n{self._drawn}")
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Keeps the last state on the screen and ends its line."""
        if self._terminal and self._drawn:
            self._stream.write("\n")
            self._stream.flush()
        self._drawn = ""
