"""Writes the metrics of a run to metrics.jsonl, to trackers and to a progress line on the console.

The learner has the only `MetricsWriter` of a workdir and writes one line per step. A cold start has
its own steps and its own writer, in `cold_start/` of the workdir. The caller chooses the metrics;
names are `group/name`, such as `actor/policy_loss`, `actor/kl_loss`, `reward/mean`,
`agent_loop/generate_sequences/mean`. `report` plots them.
"""

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat, TextIO

from uirl_jax.errors import TrainingError, UirlError
from uirl_jax.store.files import write_atomically
from uirl_jax.trackers import TENSORBOARD_DIR, Histogram, TensorBoard, Tracker
from uirl_jax.types import IN_A_METRIC_NAME, METRIC_NAME

METRICS_FILE = "metrics.jsonl"
COLD_START_DIR = "cold_start"

_NOT_IN_A_NAME = re.compile(f"[^{IN_A_METRIC_NAME}]+")
_PLAIN = re.compile(r"[^\s\"=]+")


def metric_name(*parts: str) -> str:
    """Any text as a metric's name: "desktop/enter_text_words_2" of "desktop/enter_text (words=2)".

    "/" separates, as between `parts`; other characters that a name may not have become "_".
    """
    pieces = (_NOT_IN_A_NAME.sub("_", piece).strip("_") for piece in "/".join(parts).split("/"))
    return "/".join(piece or "_" for piece in pieces)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if it is torn or invalid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, sorted by step; [] if there is no file yet.

    Torn lines are left out: a running process may be writing one.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _parse_line(line))]
    return sorted(rows, key=lambda row: row["step"])


def last_object(path: Path) -> dict[str, Any]:
    """The last whole line of a JSONL file as an object; {} if there is none."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - 65_536))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _checked(step: int, scalars: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """The scalars as floats.

    Raises:
        TrainingError: a value is NaN or infinite.
        ValueError: a name that is not `group/name`.
    """
    values = {name: float(value) for name, value in scalars.items()}
    broken = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    if broken:
        raise TrainingError(
            f"step {step}: {', '.join(broken)}; the run stops here and keeps its last good "
            "checkpoint: lower the learning rate, or inspect the step's batches"
        )
    bad_names = [name for name in values if not METRIC_NAME.fullmatch(name)]
    if bad_names:
        raise ValueError(f"metric names must be group/name, got {bad_names}")
    return values


def _line(step: int, values: Mapping[str, float], unix_s: float) -> bytes:
    """A line of metrics.jsonl."""
    row = {"step": int(step), "time_unix_s": round(unix_s, 3), **values}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


class MetricsWriter:
    """Appends one line per step to metrics.jsonl, and tells trackers the same.

    A restart from the checkpoint of step s calls `truncate_from(s + 1)` before the first `write`,
    which removes the lines of repeated steps, so that no step appears twice. A SIGKILL during a
    write leaves a torn last line, which the next start removes.

    Args: trackers: closed here; None: TensorBoard's files in the workdir.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, trackers: Sequence[Tracker] | None = None
    ) -> None:
        """Raises: UirlError: the workdir cannot be written."""
        self._path = Path(workdir) / METRICS_FILE
        self._trackers: list[Tracker] = (
            [TensorBoard(Path(workdir) / TENSORBOARD_DIR)] if trackers is None else list(trackers)
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UirlError(
                f"{self._path}: cannot be opened ({error.strerror}); choose another workdir"
            ) from error
        self.last_step = self._repair()

    def _repair(self) -> int | None:
        """Removes a torn end; returns the step of the last valid line."""
        content = self._path.read_bytes()
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            row = _parse_line(content[start:end])
            if row is not None and content[end - 1 : end] == b"\n":
                os.ftruncate(self._fd, end)
                return row["step"]
            end = start
        os.ftruncate(self._fd, 0)
        return None

    def truncate_from(self, step: int) -> int:
        """Drops the lines of this step and later ones, atomically.

        Args:
            step: the first step that will be repeated.
        Returns: the number of dropped lines.
        """
        dropped = self._replace_from(step)
        self._tell(lambda tracker: tracker.restart())
        return dropped

    def _replace_from(self, step: int) -> int:
        rows = [(line, _parse_line(line)) for line in self._path.read_bytes().splitlines(True)]
        kept = [(line, row) for line, row in rows if row is not None and row["step"] < step]
        if len(kept) < len(rows):
            self._replace(b"".join(line for line, _ in kept))
        self.last_step = max((row["step"] for _, row in kept), default=None)
        return len(rows) - len(kept)

    def _replace(self, content: bytes) -> None:
        """Replaces the whole file atomically. Raises: UirlError: it is unchanged."""
        write_atomically(self._path, content)
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND)

    def write(
        self,
        step: int,
        scalars: Mapping[str, SupportsFloat],
        histograms: Mapping[str, Histogram] | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> None:
        """Writes the scalars of one step; if it raises, none of them.

        Args:
            step: greater than every step written so far.
            scalars: `group/name` -> a number or a 0-d array.
            histograms, images: for the trackers alone; images are encoded files.
        Raises:
            TrainingError: a value is NaN or infinite; such a step stops the run.
            UirlError: the disk is full.
            ValueError: a name that is not `group/name`, or a step that is not a later one.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"{self._path}: step {step} after step {self.last_step}; call truncate_from first"
            )
        values = _checked(step, scalars)
        unix_s = time.time()
        self._append(_line(step, values, unix_s))
        self.last_step = int(step)
        self._tell(lambda tracker: tracker.scalars(step, values, unix_s))
        if histograms:
            self._tell(lambda tracker: tracker.histograms(step, histograms))
        if images:
            self._tell(lambda tracker: tracker.images(step, images))

    def amend(
        self,
        step: int,
        scalars: Mapping[str, SupportsFloat],
        images: Mapping[str, bytes] | None = None,
    ) -> None:
        """Adds scalars to the line of the last step, or writes a later step.

        For an evaluation, which ends after the step that it belongs to. Raises: as `write`.
        """
        if step != self.last_step:
            self.write(step, scalars, images=images)
            return
        # Both before the file changes, and then in one replacement: whatever fails, or kills the
        # process, the line of the step stays.
        added = _checked(step, scalars)
        *before, last = self._path.read_bytes().splitlines(True)
        row = _parse_line(last) or {}
        kept = {name: value for name, value in row.items() if "/" in name}
        unix_s = time.time()
        self._replace(b"".join([*before, _line(step, {**kept, **added}, unix_s)]))
        self._tell(lambda tracker: tracker.more(step, added, unix_s))
        if images:
            self._tell(lambda tracker: tracker.images(step, images))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """A tracker that fails is left out from then on: metrics.jsonl has everything."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # of other people's packages, disks and networks
                self._trackers.remove(tracker)
                print(tracker_failed(type(tracker).__name__, error), flush=True)

    def _append(self, line: bytes) -> None:
        size_bytes = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._fd, size_bytes)
            raise UirlError(
                f"{self._path}: cannot be written ({error.strerror}); free disk space and run the "
                "same command again"
            ) from error

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())
        self._trackers.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


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


def key_values(event: str, **fields: object) -> str:
    """A log line: `event=shard_quarantined path=shards/a3.tfrecord reason="no footer"`.

    Values with blanks, quotes or control characters are quoted and escaped, so that text from a
    model or verifier cannot start a new line or send terminal control codes.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in {"event": event, **fields}.items())


def tracker_failed(name: str, error: Exception) -> str:
    """A log line."""
    reason = f"{type(error).__name__}: {error}"[:300]
    return key_values("tracker_failed", tracker=name, reason=reason)


def _value(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)


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


def peak_rss_gib() -> float:
    """Sum of the peak resident memory of this process and its living children.

    An upper bound, because the peaks may be at different times. Children count on Linux only.
    """
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return peak / unit + sum(_high_water_kib(pid) for pid in _children()) / 2**20


def _children(tasks: Path = Path("/proc/self/task")) -> list[str]:
    """Ids of the processes that this one's threads have started; a thread may end meanwhile."""
    children = []
    for path in tasks.glob("*/children"):
        with contextlib.suppress(OSError):
            children += path.read_text().split()
    return children


def _high_water_kib(pid: str) -> int:
    """VmHWM of a process in KiB; 0 if it has ended or is a zombie.

    Not RUSAGE_CHILDREN, which includes the parent's memory at the time of the fork.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
