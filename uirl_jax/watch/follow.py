"""Follows a running job for the viewer: its small files, its actors' reports, its shards.

A thread looks every few seconds at a directory, less often at a bucket, whose small files it copies
to a temporary directory: `gather` reads paths. Nothing is written into the workdir. What was found
is one immutable `Snapshot`; `EpisodeIndex` grows beside it.
"""

import collections
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uirl_jax import policy_sync
from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.metrics import last_object
from uirl_jax.shards.queue import QUARANTINE
from uirl_jax.shards.reader import SHARDS
from uirl_jax.store import Store, open_store
from uirl_jax.store.bucket import BucketStore, is_address
from uirl_jax.store.local import LocalStore
from uirl_jax.store.mirror import interval_s
from uirl_jax.watch import gather
from uirl_jax.watch.episode_index import TRAINING, EpisodeIndex
from uirl_jax.watch.frames import visible
from uirl_jax.watch.suites import scores_files

logger = logging.getLogger(__name__)

LOCAL_EVERY_S, BUCKET_EVERY_S = 2.0, 15.0
SILENT_S = 60.0  # an actor reports every 10 s
MAX_REASONS = 50  # of quarantined shards, on the page
_MAX_FILE_BYTES = 256 * 2**20
_FILES = (
    *("metrics.jsonl", "cold_start/metrics.jsonl", "summary.json", "config.json", "findings.json"),
    *(policy_sync.MANIFEST, "eval/*.json", "logs/actor-*.jsonl"),
)
_FOLDERS = ("", "cold_start", "policy", "eval", "logs")


@dataclasses.dataclass(frozen=True)
class Actor:
    """An actor's last report, and what it says of its health."""

    name: str
    health: str  # playing, waiting, failing, silent, ended
    text: str  # the same in words
    seen: str  # "18:05:10 UTC": an age would be wrong a second later
    numbers: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ShardCounts:
    """What lies in the shards, by place, and how old it is.

    Attributes:
      waiting: (versions behind the current policy, episodes) of shards/ that are not trained on.
      damaged: (name, problem) of shards that cannot be read to their end.
      quarantined: (name, reason).
      version: of the current policy; None: none is published.
      max_staleness: of the config; None: unknown.
    """

    places: Sequence[tuple[str, int, int, int]]  # (place, shards, episodes, of which gone)
    waiting: Sequence[tuple[int, int]]
    damaged: Sequence[tuple[str, str]]
    quarantined: Sequence[tuple[str, str]]
    version: int | None
    max_staleness: int | None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Its texts are untrusted."""

    run: gather.RunFiles
    name: str
    actors: Sequence[Actor]
    shards: ShardCounts
    version: int | None  # of the policy
    signature: str  # another one: something to show has changed


class Follower:
    """Looks at a workdir in a thread of its own, from `start` to `close`.

    Attributes:
      index: of its episodes.
      snapshot: of the last look; None before the first.
    """

    def __init__(self, workdir: str, *, every_s: float | None = None) -> None:
        """Raises: ConfigError: there is no such workdir."""
        try:
            self._store: Store = open_store(workdir)
        except OSError as error:
            raise ConfigError(f"--workdir={workdir}: {error.strerror or error}") from None
        self._is_local = isinstance(self._store, LocalStore)
        self._bucket = self._store if isinstance(self._store, BucketStore) else None
        if not is_address(workdir) and not Path(workdir).is_dir():
            raise ConfigError(f"--workdir={workdir}: no such directory; give the workdir of a run")
        self._name = workdir.rstrip("/") if is_address(workdir) else Path(workdir).resolve().name
        self._copies = None if self._is_local else tempfile.TemporaryDirectory(prefix="viewer-")
        self.directory = Path(workdir if self._copies is None else self._copies.name)
        self._every_s = every_s or (LOCAL_EVERY_S if self._is_local else BUCKET_EVERY_S)
        self.index = EpisodeIndex(self._store)
        self.snapshot: Snapshot | None = None
        self._reasons: dict[str, str] = {}  # of quarantined shards: read once
        self._versions: dict[str, str] = {}  # of the copies from a bucket
        self._run: tuple[str, gather.RunFiles] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._copies is not None:
            self._copies.cleanup()

    def _follow(self) -> None:
        while not self._over.is_set():
            started_s = time.monotonic()
            try:
                self.look()
            except Exception:  # the pages go on with what was found before
                logger.exception("event=look_failed")
                self.index.trouble = "The viewer has made an error; its log has the details."
            # A slow look is not followed by the next at once: the run needs the machine.
            took_s = time.monotonic() - started_s
            self._over.wait(max(self._every_s - took_s, self._every_s / 4, 0.01))

    def look(self) -> None:
        """One look at the small files and at the shards."""
        before = len(self.index.rows)
        trouble = ""
        try:
            self._take_snapshot()
        except (OSError, UirlError) as error:
            trouble = f"the workdir cannot be read: {error}"
        finally:  # one small file may be all that is broken
            self.index.refresh(self._over.is_set)
        if trouble:
            self.index.trouble = trouble
            return
        if len(self.index.rows) != before:
            self._take_snapshot()

    # ------------------------------------------------------------------------ small files

    def _take_snapshot(self) -> None:
        if self._bucket is not None:
            self._copy(self._bucket)
        signature = _signature(self.directory)
        if self._run is None or self._run[0] != signature:
            self._run = signature, gather.read_run(self.directory, with_episodes=False)
        run = self._run[1]
        are_copies = self._copies is not None
        logs = self.directory / "logs"
        actors = read_actors(logs, is_ended=bool(run.summary), are_copies=are_copies)
        manifest = _object(self.directory / policy_sync.MANIFEST)
        version = manifest.get("version")
        version = version if isinstance(version, int) else None
        shards = self._count(run, version, trained_groups(manifest))
        shown = (signature, [(actor.name, actor.health) for actor in actors], shards)
        self.snapshot = Snapshot(
            run=run,
            name=self._name,
            actors=actors,
            shards=shards,
            version=version,
            signature=hashlib.sha256(repr(shown).encode("utf-8", "replace")).hexdigest()[:16],
        )

    def _copy(self, bucket: BucketStore) -> None:
        """Fetches the small files of a bucket whose version changed."""
        found: dict[str, str] = {}
        for folder in _FOLDERS[1:]:
            found |= bucket.versions(folder)
        listed = [name for name in found if any(fnmatch.fnmatch(name, one) for one in _FILES)]
        for name in (*(one for one in _FILES if "/" not in one), *listed):
            version = found.get(name)
            if version is not None and self._versions.get(name) == version:
                continue
            try:
                with bucket.open(name) as file:
                    content = file.read(_MAX_FILE_BYTES)
            except FileNotFoundError:
                continue
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
            if version is not None:
                self._versions[name] = version

    # ------------------------------------------------------------------------ shards

    def _count(
        self, run: gather.RunFiles, version: int | None, trained: Sequence[tuple[int, int]]
    ) -> ShardCounts:
        shards: collections.Counter[str] = collections.Counter()
        episodes: collections.Counter[str] = collections.Counter()
        gone: collections.Counter[str] = collections.Counter()
        waiting: collections.Counter[int] = collections.Counter()
        for row in list(self.index.rows):
            episodes[row.place] += 1
            gone[row.place] += row.shard.is_gone
            is_waiting = row.place == TRAINING and row.shard.name.startswith(f"{SHARDS}/")
            if version is None or not is_waiting or row.shard.is_gone:
                continue
            group = row.summary.group_id
            number = int(group) if group.isdecimal() and len(group) < 19 else -1
            if not any(first <= number < stop for first, stop in trained):
                waiting[max(0, version - row.summary.lowest_version)] += 1
        for shard in self.index.shards.values():
            shards[shard.place] += not shard.is_gone
        learner = run.config.get("config", {})
        learner = learner.get("learner", {}) if isinstance(learner, dict) else {}
        most = learner.get("max_staleness") if isinstance(learner, dict) else None
        return ShardCounts(
            places=[(name, shards[name], episodes[name], gone[name]) for name in sorted(shards)],
            waiting=sorted(waiting.items()),
            damaged=[
                (shard.name, shard.problem)
                for shard in self.index.shards.values()
                if shard.problem and not shard.is_gone
            ],
            quarantined=self._quarantined(),
            version=version,
            max_staleness=most if isinstance(most, int) else None,
        )

    def _quarantined(self) -> list[tuple[str, str]]:
        try:
            names = self._store.names(QUARANTINE)
        except OSError:
            return []
        shards = [name for name in names if name.endswith(".tfrecord")]
        for name in shards[:MAX_REASONS]:
            reason = f"{name}.reason"
            if name in self._reasons or reason not in names:
                continue
            try:
                self._reasons[name] = visible(self._store.read(reason).decode("utf-8", "replace"))
            except OSError:
                continue
        return [(name, self._reasons.get(name, "no reason was written")) for name in shards]


def read_actors(logs: Path, *, is_ended: bool, are_copies: bool = False) -> list[Actor]:
    """The actors' last reports, by name.

    Args:
      is_ended: whether the run has.
      are_copies: of a bucket, which lag behind: by the time between two copies, and two looks.
    """
    now_s = time.time()
    actors = []
    for path in sorted(logs.glob("actor-*.jsonl")):
        report = last_object(path)
        numbers = {
            name: float(value)
            for name, value in report.items()
            if isinstance(value, int | float) and abs(value) < 1e15  # also no NaN
        }
        age_s = max(0.0, now_s - numbers.get("unix_s", 0.0)) if "unix_s" in numbers else None
        seen = "never" if age_s is None else _clock(now_s - age_s, now_s)
        lag_s = BUCKET_EVERY_S + interval_s(path.stat().st_size) if are_copies else 0.0
        health, text = _health(numbers, report, age_s, SILENT_S + lag_s, seen, is_ended)
        actors.append(
            Actor(
                name=visible(path.stem.removeprefix("actor-"), 80),
                health=health,
                text=visible(text, 300),
                seen=seen,
                numbers=collections.defaultdict(float, numbers),
            )
        )
    return actors


def _clock(unix_s: float, now_s: float) -> str:
    """A time of today, with the date for another day."""
    form = "%H:%M:%S UTC" if now_s - unix_s < 12 * 3600 else "%Y-%m-%d %H:%M UTC"
    return time.strftime(form, time.gmtime(unix_s))


def _health(
    numbers: Mapping[str, float],
    report: Mapping[str, Any],
    age_s: float | None,
    silent_s: float,
    seen: str,
    is_ended: bool,
) -> tuple[str, str]:
    """One word, and a sentence that says why."""
    if age_s is None:
        return "silent", "it has written no report that can be read"
    if is_ended:
        return "ended", "the run has ended"
    if age_s > silent_s:
        return "silent", f"no report since {seen}: it was killed, or hangs"
    broken, played = numbers.get("actor/env_error", 0.0), numbers.get("actor/published", 0.0)
    if broken >= 10 and broken >= played:
        reasons = report.get("env_error_reasons")
        first = next(iter(reasons), "") if isinstance(reasons, dict) else ""
        return "failing", f"{broken:.0f} env_errors for {played:.0f} episodes: {first or '?'}"
    if not numbers.get("actor/running"):
        return "waiting", "no episode is running: it waits for a newer policy"
    return "playing", f"{numbers['actor/running']:.0f} episodes are running"


def trained_groups(manifest: Mapping[str, Any]) -> list[tuple[int, int]]:
    """[first, stop) of the groups that the learner has used, as a manifest says; untrusted."""
    extra = manifest.get("extra")
    found = extra.get("groups_trained") if isinstance(extra, dict) else None
    return [
        (one[0], one[1])
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, list) and len(one) == 2 and all(type(n) is int for n in one)
    ]


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(directory: Path) -> str:
    """Another text whenever one of the small files has changed."""
    lines = []
    for folder in _FOLDERS:
        try:
            with os.scandir(directory / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if any(fnmatch.fnmatch(name, one) for one in _FILES):
                        stat = entry.stat()
                        lines.append(f"{name} {stat.st_mtime_ns} {stat.st_size}")
        except OSError:
            continue
    for path in scores_files(directory):
        with contextlib.suppress(OSError):
            stat = path.stat()
            lines.append(f"{path} {stat.st_mtime_ns} {stat.st_size}")
    return "\n".join(sorted(lines))
