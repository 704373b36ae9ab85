"""Where the metrics of a run go besides metrics.jsonl: TensorBoard's files, Weights & Biases.

`metrics.MetricsWriter` calls them. A tracker never ends a run: what it cannot write is said once
and left out, and metrics.jsonl has it.
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from PIL import Image

from uirl_jax.errors import ConfigError
from uirl_jax.log_lines import key_values

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

TENSORBOARD_DIR = "tb"
WANDB_DIR = "wandb"
_LAST_STEP = "last_step"  # below WANDB_DIR
_TEXT_CHARS = 128  # of the names that Weights & Biases takes


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Where metrics are shown, besides metrics.jsonl and the report."""

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
    """TensorBoard's event files, without TensorFlow."""

    def __init__(self, directory: Path) -> None:
        # Only here: it imports torch where there is one (1.7 s), and a reader needs neither.
        import tensorboardX

        self._directory, self._make = directory, tensorboardX.SummaryWriter
        self._writer: SummaryWriter | None = None

    def scalars(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        writer = self._open(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=unix_s)

    def more(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._open(step + 1)  # hides nothing of this step
        self.scalars(step, values, unix_s)

    def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        for name, histogram in values.items():
            counts, edges = histogram.counts, histogram.edges
            middles = (edges[1:] + edges[:-1]) / 2
            self._open(step).add_histogram_raw(
                name,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=int(counts.sum()),
                sum=float(counts @ middles),
                sum_squares=float(counts @ middles**2),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )

    def images(self, step: int, values: Mapping[str, bytes]) -> None:
        for name, data in values.items():
            with Image.open(io.BytesIO(data)) as image:
                pixels_hwc = np.asarray(image.convert("RGB"))
            self._open(step).add_image(name, pixels_hwc, step, dataformats="HWC")

    def restart(self) -> None:
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> "SummaryWriter":
        if self._writer is None:
            # purge_step makes TensorBoard hide values that a killed process wrote for this and
            # later steps. The suffix makes the file name unique within a second; otherwise an
            # older file could be overwritten.
            self._writer = self._make(
                str(self._directory),
                purge_step=step,
                flush_secs=10,
                filename_suffix=f".{os.getpid()}.step{step}",
            )
        return self._writer


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
