"""Where the metrics of a run go besides metrics.jsonl: TensorBoard's files, Weights & Biases.

`metrics.MetricsWriter` calls them. A tracker never ends a run: what it cannot write is said once
and left out, and metrics.jsonl has it.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import io
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image

from uirl_jax.errors import ConfigError
from uirl_jax.log_lines import key_values
from uirl_jax.shards.framing import frame

TENSORBOARD_DIR = "tb"
WANDB_DIR = "wandb"
_LAST_STEP = "last_step"  # below WANDB_DIR
_TEXT_CHARS = 128  # of the names that Weights & Biases takes


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Where metrics are shown, besides metrics.jsonl and the report.

    Not those of a cold start, which are in cold_start/metrics.jsonl and cold_start/tb/.
    """

    tensorboard: bool = True  # below tb/ of the workdir
    # Weights & Biases (pip install wandb). offline: below wandb/ of the workdir, for `wandb sync`.
    # online: needs WANDB_API_KEY or `wandb login`.
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "uirl_jax"  # of Weights & Biases
    entity: str = ""  # the team there; empty: your own
    name: str = ""  # of the run there; empty: the workdir's
    # (first, last) step that jax.profiler traces, below profile/ of the workdir; empty: none.
    profile_steps: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"min": 1, "max": 10_000_000}
    )

    def __post_init__(self) -> None:
        if self.wandb != "off" and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                f"tracking.wandb={self.wandb!r}: the package wandb is not installed; run "
                "pip install wandb"
            )
        for field in ("project", "entity", "name"):
            text = getattr(self, field)
            if len(text) > _TEXT_CHARS or not text.isprintable() or "/" in text:
                raise ConfigError(
                    f"tracking.{field}={text[:80]!r}: expected at most {_TEXT_CHARS} printable "
                    "characters without /"
                )
        steps = self.profile_steps
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            raise ConfigError(
                f"tracking.profile_steps={steps}: expected the first and the last step, such as "
                "(10, 12)"
            )
        if not self.project:
            raise ConfigError("tracking.project is empty; give the project a name")


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How often values lie between two edges.

    Attributes: counts: [N]. edges: [N+1], ascending.
    """

    counts: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray, bins: int = 30) -> "Histogram":
        """Of finite values; equal ones are one bin, also those that differ by rounding alone."""
        given = np.asarray(values, np.float64)
        if given.size:
            low, high = given.min(), given.max()
            # NumPy refuses bins that are narrower than what its numbers can tell apart.
            if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
                given = np.full_like(given, low)
        counts, edges = np.histogram(given, bins)
        return cls(counts, edges)


class Tracker(Protocol):
    """Of one process; steps ascend, but for those that are repeated after a restart."""

    def scalars(self, step: int, values: Mapping[str, float], unix_s: float) -> None: ...

    def more(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        """Scalars that belong to a step that was written before."""
        ...

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None: ...

    def images(self, step: int, values: Mapping[str, bytes]) -> None:
        """Args: values: encoded image files."""
        ...

    def restart(self) -> None:
        """Steps that were written are repeated from now on."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard's event files, without TensorFlow.

    Each call writes its events at once. The writer of tensorboardX has a thread for that: an error
    of the disk ends the thread without a word, and then its queue of ten blocks the learner.
    """

    def __init__(self, directory: Path) -> None:
        # Only here: it imports torch where there is one (1.7 s), and a reader needs neither.
        from tensorboardX import summary
        from tensorboardX.proto import event_pb2

        self._directory, self._summary, self._protocol = directory, summary, event_pb2
        self._file: io.FileIO | None = None

    def scalars(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        summaries = [self._summary.scalar(name, value) for name, value in values.items()]
        self._write(step, summaries, unix_s)

    def more(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._open(step + 1)  # hides nothing of this step
        self.scalars(step, values, unix_s)

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        summaries = []
        for name, histogram in values.items():
            counts, edges = histogram.counts, histogram.edges
            middles = (edges[1:] + edges[:-1]) / 2
            summaries.append(
                self._summary.histogram_raw(
                    name,
                    min=float(edges[0]),
                    max=float(edges[-1]),
                    num=int(counts.sum()),
                    sum=float(counts @ middles),
                    sum_squares=float(counts @ middles**2),
                    bucket_limits=edges[1:].tolist(),
                    bucket_counts=counts.tolist(),
                )
            )
        self._write(step, summaries, time.time())

    def images(self, step: int, values: Mapping[str, bytes]) -> None:
        summaries = []
        for name, data in values.items():
            with Image.open(io.BytesIO(data)) as image:
                pixels_hwc = np.asarray(image.convert("RGB"))
            summaries.append(self._summary.image(name, pixels_hwc, dataformats="HWC"))
        self._write(step, summaries, time.time())

    def restart(self) -> None:
        self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, step: int, summaries: Iterable[Any], unix_s: float) -> None:
        event = self._protocol.Event
        events = [event(step=int(step), wall_time=unix_s, summary=each) for each in summaries]
        if events:
            self._append(self._open(step), events)

    def _open(self, step: int) -> io.FileIO:
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Another file for every start: TensorBoard reads no further in a file that is cut off.
            now_s, host = time.time(), socket.gethostname()
            name = f"events.out.tfevents.{int(now_s)}.{host}.{os.getpid()}.step{step}"
            self._file = io.FileIO(self._directory / name, "a")
            # The session's start makes TensorBoard hide values that a killed process wrote for
            # this and later steps.
            protocol, version = self._protocol, "brain.Event:2"
            start = protocol.SessionLog(status=protocol.SessionLog.START)
            events = [
                protocol.Event(wall_time=now_s, file_version=version),
                protocol.Event(wall_time=now_s, step=int(step), session_log=start),
            ]
            self._append(self._file, events)
        return self._file

    def _append(self, file: io.FileIO, events: Iterable[Any]) -> None:
        """Writes all of them; if it raises, none, and the file is closed."""
        data = b"".join(frame(event.SerializeToString()) for event in events)
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size_bytes)
            with contextlib.suppress(OSError):
                self.close()
            raise


class WeightsAndBiases:
    """One run there for one workdir, however often its processes start.

    A step that is repeated after a kill keeps its first values: a curve there cannot be shortened.
    """

    def __init__(
        self, cfg: TrackingConfig, workdir: Path, run_id: str, config: Mapping[str, Any]
    ) -> None:
        """Raises: Exception: whatever the package raises."""
        import wandb

        self._wandb = wandb
        (workdir / WANDB_DIR).mkdir(parents=True, exist_ok=True)
        self._last_file = workdir / WANDB_DIR / _LAST_STEP
        self._last = self._read_last()
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            mode="online" if cfg.wandb == "online" else "offline",
            project=cfg.project,
            entity=cfg.entity or None,
            name=cfg.name or workdir.resolve().name[:_TEXT_CHARS],
            dir=workdir,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        if step > self._last:
            self._run.log({"step": step, **values})
            self._last = step
            self._last_file.write_text(f"{step}\n", encoding="utf-8")

    def more(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._run.log({"step": step, **values})

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        self._run.log(
            {"step": step}
            | {
                name: self._wandb.Histogram(np_histogram=(each.counts, each.edges))
                for name, each in values.items()
            }
        )

    def images(self, step: int, values: Mapping[str, bytes]) -> None:
        opened = {name: Image.open(io.BytesIO(data)) for name, data in values.items()}
        self._run.log(
            {"step": step} | {name: self._wandb.Image(image) for name, image in opened.items()}
        )

    def restart(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its process would live as long as this one

    def _read_last(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._last_file.read_text(encoding="utf-8"))
        return -1


def tracker_failed(name: str, error: Exception) -> str:
    """A log line."""
    reason = f"{type(error).__name__}: {error}"[:300]
    return key_values("tracker_failed", tracker=name, reason=reason)
