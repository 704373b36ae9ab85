"""Writes the metrics of a run to metrics.jsonl and to trackers, and reads them back.

The learner has the only `MetricsWriter` of a workdir and writes one line per step. A cold start has
its own steps and its own writer, in `cold_start/` of the workdir. The caller chooses the metrics;
names are `group/name`, such as `actor/policy_loss`, `actor/kl_loss`, `reward/mean`,
`agent_loop/generate_sequences/mean`. `report` plots them.
"""

import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from uirl_jax.errors import TrainingError, UirlError
from uirl_jax.store.files import write_atomically
from uirl_jax.trackers import (
    TENSORBOARD_DIR,
    Histogram,
    TensorBoard,
    Tracker,
    tracker_failed,
)
from uirl_jax.types import IN_A_METRIC_NAME, METRIC_NAME

METRICS_FILE = "metrics.jsonl"
COLD_START_DIR = "cold_start"

_NOT_IN_A_NAME = re.compile(f"[^{IN_A_METRIC_NAME}]+")


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
