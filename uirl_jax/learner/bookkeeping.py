"""What a learner step writes to the workdir: metrics, checkpoint, policy; and what it deletes.

`loop` calls this module. A step ends with these calls, in this order:

    write_metrics   writes the metrics line. If the process is killed before `save`, the step is
                    repeated and `restore` drops the line; in the other order a saved step could
                    lack its line.
    save            commits the checkpoint, including the data cursor.
    publish         publishes the policy. Actors may sample with it only once its checkpoint is
                    committed.
    delete_used     deletes the shards and stored successes that no kept checkpoint needs.

A SIGKILL at any point is therefore harmless: after a restart either the step is complete or its
records are unread. This module computes nothing and does not depend on the algorithm.
"""

import collections
import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from uirl_jax import policy_sync
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import CheckpointError, RecordError, UirlError
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import state as learner_state
from uirl_jax.learner.algorithm import Group
from uirl_jax.learner.curriculum import Curriculum
from uirl_jax.learner.replay import Replay, is_replayed
from uirl_jax.learner.state import TrainState
from uirl_jax.log_lines import key_values
from uirl_jax.metrics import METRICS_FILE, MetricsWriter, last_object
from uirl_jax.models import sharding, weights
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.queue import QUARANTINE, ShardQueue
from uirl_jax.shards.reader import RecordRef
from uirl_jax.shards.writer import put_shard
from uirl_jax.store import open_store
from uirl_jax.store.bucket import is_address
from uirl_jax.store.lease import learner_fence
from uirl_jax.store.mirror import copy_now
from uirl_jax.trackers import Histogram, Tracker
from uirl_jax.untrusted.json import printable

CHECKPOINTS = "checkpoints"  # below the workdir
_GROUP_ID = re.compile("[0-9]{1,18}")
# The data cursor: the JSON part of a checkpoint.
_EMPTY_META: Mapping[str, Any] = {
    "shards": None,
    "groups": [],
    "extra": 0,
    "train_seconds": 0.0,
    "tallies": {},
    "replay": {},
    "ended": None,
}


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of a run's files, and the run id that they carry."""

    workdir: Path
    run_id: str
    # Where a run without checkpoints of its own starts: the workdir of another run.
    resume_from: Path | None = None
    resume_step: int | None = None  # None: its newest checkpoint
    # Where metrics go besides metrics.jsonl; None: TensorBoard's files.
    open_trackers: Callable[[], Sequence[Tracker]] | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """What is not deleted; see the learner's config."""

    checkpoints: int = 3
    every: int = 0
    records_mib: int = 0


class Bookkeeping:
    """Queue, replay store, tallies, checkpoints and metrics of one learner; made by `restore`.

    Attributes:
      is_fresh: whether the run started without a checkpoint.
    """

    def __init__(
        self,
        run: RunDirectory,
        model: PolicyModel,
        curriculum: Curriculum,
        checkpointer: Checkpointer,
        metrics_writer: MetricsWriter,
        meta: Mapping[str, Any] | None,
        keep: Keep,
        *,
        is_fresh: bool,
    ) -> None:
        """Args: meta: JSON of the restored checkpoint; None if there is none."""
        self.is_fresh = is_fresh
        meta = {**_EMPTY_META, **(meta or {})}
        self._run, self._model, self._curriculum = run, model, curriculum
        self._checkpointer, self._metrics_writer = checkpointer, metrics_writer
        self._layout = layout_of(model.cfg)
        self._store = open_store(run.workdir)
        self._actor_reports = ActorReports(run.workdir)
        self._queue = ShardQueue(
            self._store,
            run.run_id,
            model.base_hash,
            meta["shards"],
            keep_bytes=keep.records_mib << 20,
        )
        self._trained = GroupRanges(meta["groups"])
        self._saved_groups = self._trained.pairs
        self._extra = int(meta["extra"])  # groups beyond groups_per_step, over all steps
        # Of a run that this one resumed, perhaps with other tasks.
        is_same_pool = meta.get("pool", curriculum.pool) == curriculum.pool
        self._tallies = curriculum.tallies(meta["tallies"] if is_same_pool else {})
        self._ended: dict[str, Any] | None = meta["ended"]
        self._replay = Replay(self._store, model.base_hash, self._layout, meta["replay"])
        self._earlier_s, self._started_s = float(meta["train_seconds"]), time.monotonic()
        self._saved: collections.deque[dict[str, Any]] = collections.deque(maxlen=keep.checkpoints)

    # ------------------------------------------------------------------------------ records in

    def take(self, count: int, version: int, max_staleness: int) -> list[Group] | None:
        """Takes the next `count` whole groups, which are trained from now on; None: too few yet.

        Args:
          version: the policy version that the learner holds.
        """
        self._queue.poll()
        groups = self._queue.take_groups(
            count, version, max_staleness, lambda group_id: _index_of(group_id) in self._trained
        )
        for group in groups or ():
            self._trained.add(_index_of(group[0].group_id))
        return groups

    def count(self, groups: Sequence[Group]) -> None:
        """Counts the successes and whole rewards of groups that were taken, by task."""
        for group in groups:
            self._curriculum.count(self._tallies, group)

    def begin_at(self, regular: int) -> None:
        """Counts another run's groups, with which this one began, as if they were its own.

        That run may have taken fewer a step, and actors would start the difference at once.

        Args: regular: groups that the steps so far need.
        """
        missing = regular - (self._trained.count - self._extra)
        if missing > 0:
            *earlier, (start, stop) = self._trained.pairs or [[0, 0]]
            self._trained = GroupRanges([*earlier, [start, stop + missing]])

    @property
    def refs(self) -> dict[str, RecordRef]:
        """Where the records taken since the last `save` are, by episode."""
        return self._queue.taken_from | self._replay.taken_from

    @property
    def poll_s(self) -> float:
        """Least seconds between two calls of `take` that find nothing."""
        return self._store.poll_s

    def allow_extra(self, more: int, regular: int) -> bool:
        """Allows actors to start `more` groups beyond those trained so far.

        Args:
          regular: groups that the steps so far need if every group is useful. Actors start at most
            these and the extra groups in the policy's manifest.
        Returns: whether the limit was raised; actors see it when the policy is published again.
        """
        extra = self._trained.count + more - regular
        if extra <= self._extra:
            return False
        self._extra = extra
        return True

    def replay(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Adds a stored success to each group that has none, and stores the groups' successes."""
        completed = [self._replay.complete(group) for group in groups]
        self._replay.remember(completed, step)
        return completed

    def set_aside(self, step: int, groups: Sequence[Group]) -> str:
        """Writes the records of a failed step below quarantine/, one shard per group.

        Returns: where they are, or why they could not be written. It does not raise, so that the
          step's own error is reported.
        """
        prefix = f"{QUARANTINE}/step-{step}"
        try:
            for group in groups:
                name = f"{prefix}/group-{group[0].group_id}.tfrecord"
                fresh = [record for record in group if not is_replayed(record, group)]
                put_shard(
                    self._store, name, fresh, base_hash=self._model.base_hash, layout=self._layout
                )
        except (UirlError, OSError) as error:
            return f"no shard, or not all of them ({error})"
        return self._store.location(prefix)

    def end(self, steps: int, reason: str) -> None:
        """A run of so many steps ends with the next `save`, for this reason."""
        self._ended = {"steps": steps, "reason": reason}

    def ended(self, steps: int) -> str:
        """Why the run has ended before its last step; empty if it goes on, or was extended."""
        if self._ended is not None and self._ended["steps"] != steps:
            self._ended = None
        return str(self._ended["reason"]) if self._ended else ""

    # --------------------------------------------------------------- after a step, in this order

    def describe(self) -> dict[str, float]:
        """Metrics of the queue, the curriculum and the actors' last reports."""
        accounts = {f"records/{name}": n for name, n in self._queue.accounting().items()}
        curriculum = self._curriculum.describe(self._tallies)
        return {**self._actor_reports.metrics(), **curriculum, **accounts}

    def write_metrics(
        self,
        step: int,
        metrics: Mapping[str, float],
        histograms: Mapping[str, Histogram],
        images: Mapping[str, bytes],
    ) -> None:
        """Writes the step's metrics line; trackers get histograms and images too."""
        self._metrics_writer.write(step, metrics, histograms, images)
        # Before the checkpoint: a saved step must not lack its line.
        copy_now(self._run.workdir, open_store, METRICS_FILE)

    def amend_metrics(
        self, step: int, metrics: Mapping[str, float], images: Mapping[str, bytes]
    ) -> None:
        """Adds to the line of the last step, or writes one for the step that the run starts at."""
        self._metrics_writer.amend(step, metrics, images)
        copy_now(self._run.workdir, open_store, METRICS_FILE)

    def save(self, step: int, state: TrainState) -> None:
        """Commits a checkpoint: the train state and the data cursor."""
        meta = {
            "shards": self._queue.state(),
            "groups": self._trained.pairs,
            "extra": self._extra,
            "train_seconds": self.train_seconds,
            "tallies": self._tallies.to_json(),
            "pool": self._curriculum.pool,
            "replay": dict(self._replay.files),
            "ended": self._ended,
            "base_hash": self._model.base_hash,
            "lease_generation": learner_fence(self._store),
        }
        self._checkpointer.save(step, state, meta)
        self._saved_groups = self._trained.pairs
        self._saved.append(meta)
        self._queue.taken_from.clear()
        self._replay.taken_from.clear()

    def publish(self, step: int, policy: Mapping[str, np.ndarray]) -> None:
        """Publishes the policy that actors sample with.

        Args:
          policy: of `policy_of`.
        """
        policy_sync.publish(
            self._store,
            version=step,
            step=step,
            arrays=dict(policy),
            kind="adapters" if self._model.trains == "adapters" else "weights",
            base_hash=self._model.base_hash,
            run_id=self._run.run_id,
            extra={
                # Within a step not those that it has taken: a killed learner forgets them, and
                # their owners would have released the claims.
                "groups_trained": self._saved_groups,
                "groups_extra": self._extra,
                "tallies": self._tallies.to_json(),
                "ended": self._ended and self._ended["steps"],
            },
        )

    def delete_used(self) -> None:
        """Deletes the shards and stored successes that no kept checkpoint refers to."""
        if len(self._saved) == self._saved.maxlen:
            self._queue.committed(self._saved[0]["shards"])
            self._replay.prune(meta["replay"] for meta in self._saved)

    # ------------------------------------------------------------------------------ totals

    @property
    def train_seconds(self) -> float:
        """Over this and all earlier processes of the run."""
        return self._earlier_s + time.monotonic() - self._started_s

    def final_accounting(self) -> dict[str, int]:
        """Records by outcome, including those that arrived since the last step."""
        self._queue.poll()
        return self._queue.accounting()


def policy_of(state: TrainState, model: PolicyModel) -> dict[str, np.ndarray]:
    """What is trained, by leaf, in the dtypes that actors hold it in: the learner's are float32.

    All processes of the learner call it together: each may hold a part.
    """
    trained = jax.tree.map(
        lambda leaf, held: leaf.astype(held.dtype), state.trainable, model.trainable
    )
    return weights.adapters_to_numpy(sharding.to_host(trained))


@contextlib.contextmanager
def restore(
    run: RunDirectory,
    model: PolicyModel,
    curriculum: Curriculum,
    state: TrainState,
    keep: Keep,
) -> Iterator[tuple[Bookkeeping, TrainState]]:
    """Opens a run; yields its bookkeeping and the state of the newest undamaged checkpoint.

    Args:
      state: a fresh state; yielded if there is no checkpoint.
    Raises:
      CheckpointError: there are checkpoints and all are damaged; or the one to resume from cannot
        be read, or belongs to another base model.
    """
    policy_sync.seal(open_store(run.workdir))
    with (
        restored_state(run, model, state, keep) as (checkpointer, state, meta, is_fresh),
        MetricsWriter(
            run.workdir, trackers=None if run.open_trackers is None else run.open_trackers()
        ) as metrics_writer,
    ):
        metrics_writer.truncate_from(int(state.step) + 1)
        books = Bookkeeping(
            run,
            model,
            curriculum,
            checkpointer,
            metrics_writer,
            meta,
            keep,
            is_fresh=is_fresh,
        )
        yield books, state


def checkpoints_of(workdir: Path) -> str:
    """The path or gs:// address of a run's checkpoints."""
    return open_store(workdir).location(CHECKPOINTS)


@contextlib.contextmanager
def restored_state(
    run: RunDirectory, model: PolicyModel, state: TrainState, keep: Keep
) -> Iterator[tuple[Checkpointer, TrainState, dict[str, Any] | None, bool]]:
    """Opens the checkpoints; yields them, the state, its data cursor and whether there was none.

    All processes of the learner call it together. Args and Raises: as `restore`.
    """
    with Checkpointer(
        checkpoints_of(run.workdir), keep=keep.checkpoints, keep_every=keep.every
    ) as checkpointer:
        restored = checkpointer.restore_latest(learner_state.abstract(state))
        meta = None
        if restored:
            state, meta = restored.arrays, restored.meta
            for line in restored.skipped:
                print(key_values("checkpoint_skipped", reason=line), flush=True)
        elif run.resume_from is not None:
            state, meta = _resume(run.resume_from, run.resume_step, model, state)
        yield checkpointer, state, meta, restored is None


# Totals of single actors; of everything else the mean is taken, over those that still report.
_TOTALS = frozenset({"started", "published", "env_error", "lost"})
_ADDED = _TOTALS | {"running"}
_SILENT_S = 60.0  # they report every 10 s


class ActorReports:
    """The actors' last reports, and when this process saw each of them change.

    The reports' own times are of the clocks of several hosts: of an actor whose clock is ahead all
    others would seem to be gone. They are compared only at the first look, when nothing else is
    known, so that actors that were gone before this process started do not count.
    """

    def __init__(self, workdir: Path) -> None:
        self._logs = workdir / "logs"
        # By name: the time in the report, and by this process's clock when it was seen first.
        self._seen: dict[str, tuple[float, float]] = {}

    def metrics(self) -> dict[str, float]:
        """engine/..., agent_loop/... and actor/... of the last reports, about 10 s old.

        Of an actor that is gone only what it has done counts.
        """
        reports = {path.name: last_object(path) for path in self._logs.glob("actor-*.jsonl")}
        now_s, is_first = time.monotonic(), not self._seen
        newest_s = max(map(_unix_s, reports.values()), default=0.0)
        for name, report in reports.items():
            unix_s = _unix_s(report)
            if name not in self._seen or self._seen[name][0] != unix_s:
                self._seen[name] = unix_s, now_s - (newest_s - unix_s if is_first else 0.0)
        last_s = max((self._seen[name][1] for name in reports), default=0.0)
        values: dict[str, list[float]] = {}
        for source, report in reports.items():
            is_gone = self._seen[source][1] < last_s - _SILENT_S
            for name, value in report.items():
                if "/" not in name or not isinstance(value, int | float):
                    continue
                if not math.isfinite(value):
                    continue
                if not is_gone or name.partition("/")[2] in _TOTALS:
                    values.setdefault(name, []).append(value)
        return {
            name: sum(given) if name.partition("/")[2] in _ADDED else sum(given) / len(given)
            for name, given in values.items()
        }


def _unix_s(report: Mapping[str, Any]) -> float:
    value = report.get("unix_s")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def read_adapters(workdir: Path, step: int | None) -> tuple[int, dict[str, np.ndarray], list[str]]:
    """(step, adapters by leaf, skipped checkpoints) of a run's checkpoint; None: the newest.

    Raises: CheckpointError: there is none, or it is damaged.
    """
    directory = checkpoints_of(workdir)
    if not is_address(directory) and not Path(directory).is_dir():
        raise CheckpointError(f"{directory}: no checkpoint yet; the learner saves one at its start")
    with Checkpointer(directory, read_only=True) as checkpointer:
        found = checkpointer.read_part("trainable/", step)
    adapters = {name.removesuffix("/value"): array for name, array in found.arrays.items()}
    return found.step, adapters, found.skipped


def _resume(
    workdir: Path, step: int | None, model: PolicyModel, state: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """The state and the data cursor of another run's checkpoint, without that run's files."""
    with Checkpointer(checkpoints_of(workdir), read_only=True) as checkpointer:
        restored = checkpointer.restore(learner_state.abstract(state), step)
    base_hash = restored.meta.get("base_hash", model.base_hash)
    if base_hash != model.base_hash:
        raise CheckpointError(
            f"{checkpoints_of(workdir)}/{restored.step}: its adapters belong to the base model "
            f"{base_hash[:8]}, this run's is {model.base_hash[:8]} ({model.path}); set model.path "
            "to that run's base (its cold_start/model, if it has one)"
        )
    for line in restored.skipped:
        print(key_values("checkpoint_skipped", reason=line), flush=True)
    print(key_values("resumed", workdir=workdir, step=restored.step), flush=True)
    # A checkpoint of an earlier release does not say whose tallies it has.
    meta = {"pool": "", **restored.meta, "shards": None, "replay": {}, "ended": None}
    return restored.arrays, meta


def _index_of(group_id: str) -> int:
    """The index of a group. Raises: RecordError: it is not the id of one."""
    if not _GROUP_ID.fullmatch(group_id):
        raise RecordError(f"group_id={printable(group_id, 40)!r}, expected the number of a group")
    return int(group_id)


class GroupRanges:
    """Indices of the trained groups, as ascending [start, stop) pairs. Actors skip these groups."""

    def __init__(self, pairs: list[list[int]]) -> None:
        self.pairs = [list(pair) for pair in pairs]

    def add(self, index: int) -> None:
        merged: list[list[int]] = []
        for start, stop in sorted([*self.pairs, [index, index + 1]]):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
            else:
                merged.append([start, stop])
        self.pairs = merged

    def __contains__(self, index: int) -> bool:
        return any(start <= index < stop for start, stop in self.pairs)

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.pairs)
