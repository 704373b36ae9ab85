"""Which episodes a workdir holds, for the viewer's list: found while the run goes on.

Reads the summaries of the records of shards/, kept/ and eval/ (`shards.summary`), each shard once,
and keeps a row for each episode in memory; nothing is written. Rows are only appended, so that
"the first n rows" is a list that stands still while the run grows. An episode whose shard the
learner has deleted keeps its row, and cannot be opened.

One thread calls `refresh`; any thread may read. Of texts it knows names and ids only.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.evaluation import EVAL_DIR
from uirl_jax.shards import framing, reader, record
from uirl_jax.shards.queue import KEPT
from uirl_jax.shards.reader import SHARDS
from uirl_jax.shards.summary import Summary, summaries
from uirl_jax.store import Store, StoreUnavailableError
from uirl_jax.types import Trajectory
from uirl_jax.untrusted.json import printable

TRAINING = "training"
ORDERS = ("newest", "oldest", "reward, high first", "reward, low first", "most turns")
_BATCH = 64  # shards between two looks at whether to stop
_REMEMBERED = 8  # answers to filters


@dataclasses.dataclass(slots=True)
class Shard:
    """A shard that was listed. `problem` says why the rest of it cannot be read."""

    name: str
    place: str
    records: int = 0
    size_bytes: int = 0
    layout: record.TokenLayout | None = None
    problem: str = ""
    is_gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One episode of the list. `place` is "training", or the evaluation that played it."""

    number: int  # in the order of the index
    key: str  # 16 hex digits: its address on the viewer's pages, also after a restart
    place: str
    shard: Shard
    summary: Summary

    @property
    def outcome(self) -> str:
        """success, failed, format_error, ...: what the filter of outcomes compares."""
        return "success" if self.summary.success else self.summary.stop_reason


@dataclasses.dataclass(frozen=True)
class Filter:
    """What a reader asks for; an empty text and None are anything."""

    task: str = ""
    place: str = ""
    outcome: str = ""
    actor: str = ""
    text: str = ""  # in the ids of episode and group, the variant and the seed
    lowest_version: int | None = None
    highest_version: int | None = None
    lowest_reward: float | None = None
    highest_reward: float | None = None
    order: str = ORDERS[0]

    def takes(self, row: Row) -> bool:
        summary = row.summary
        return (
            (not self.task or summary.task == self.task)
            and (not self.place or row.place == self.place)
            and (not self.outcome or row.outcome == self.outcome)
            and (not self.actor or summary.actor_id == self.actor)
            and (self.lowest_version is None or summary.highest_version >= self.lowest_version)
            and (self.highest_version is None or summary.lowest_version <= self.highest_version)
            and (self.lowest_reward is None or summary.reward >= self.lowest_reward)
            and (self.highest_reward is None or summary.reward <= self.highest_reward)
            and (
                not self.text
                or self.text in summary.episode_id
                or self.text == summary.group_id
                or self.text == str(summary.seed)
                or self.text in summary.variant
            )
        )


_SORTED: dict[str, tuple[Callable[[Row], float], bool]] = {
    ORDERS[2]: (lambda row: row.summary.reward, True),
    ORDERS[3]: (lambda row: row.summary.reward, False),
    ORDERS[4]: (lambda row: row.summary.turns, True),
}


class EpisodeIndex:
    """The episodes of a workdir.

    Attributes:
      rows: one for each episode, in the order in which they were found.
      shards: by name, also those that are gone.
      listed, read: how many shards the last look found, and how many of them are read by now.
      is_complete: whether all shards of the last look are read.
      trouble: why the last look failed; empty: it did not.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows: list[Row] = []
        self.shards: dict[str, Shard] = {}
        self.facets: dict[str, collections.Counter[str]] = {
            name: collections.Counter() for name in ("task", "place", "outcome", "actor")
        }
        self.listed = self.read = 0
        self.is_complete = False
        self.trouble = ""
        self._known: dict[str, int] = {}  # key -> number
        self._groups: dict[tuple[str, str], list[int]] = {}
        self._instances: dict[tuple[str, str, int], list[int]] = {}
        self._by_task: dict[str, dict[int, int]] = {}  # task -> version -> its newest row
        self._answers: collections.OrderedDict[tuple[Filter, int], Sequence[int]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()  # of _answers

    # ------------------------------------------------------------------------ looking

    def refresh(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Lists the shards and reads those that are new; ends early once is_over."""
        try:
            names = self._names()
        except OSError as error:
            self.trouble = f"the workdir cannot be listed: {error.strerror or error}"
            return
        self.trouble = ""
        self._note_gone(names)
        new = [name for name in names if self._is_new(name)]
        self.listed, self.read = len(names), len(names) - len(new)
        self.is_complete = not new
        step = _BATCH if self._store.reads_at_once == 1 else self._store.reads_at_once
        for first in range(0, len(new), step):
            if is_over():
                return
            batch = new[first : first + step]
            for name, found in zip(
                batch, reader.read_each(self._store, self._summaries, batch), strict=True
            ):
                self._add(name, *found)
            self.read += len(batch)
        self.is_complete = True

    def _names(self) -> list[str]:
        found: dict[str, None] = {}
        # kept/ after shards/: a shard that is moved meanwhile is seen in one of them.
        for prefix in (SHARDS, KEPT, EVAL_DIR):
            for name in self._store.names(prefix):
                if name.endswith(".tfrecord"):
                    found[name] = None
        return list(found)

    def _note_gone(self, names: Sequence[str]) -> None:
        """Follows shards that the learner moved to kept/, and marks those that it deleted."""
        there = set(names)
        kept = {name.rpartition("/")[2]: name for name in names if name.startswith(f"{KEPT}/")}
        for name, shard in list(self.shards.items()):
            if name in there:
                shard.is_gone = False
                continue
            target = kept.get(name.rpartition("/")[2])
            if target is None or target in self.shards:
                shard.is_gone = True
                continue
            del self.shards[name]
            shard.name, shard.is_gone = target, False
            self.shards[target] = shard

    def _is_new(self, name: str) -> bool:
        """Whether a shard was never read, or was damaged and has another size now."""
        shard = self.shards.get(name)
        if shard is None or not shard.problem:
            return shard is None
        try:
            with self._store.open(name) as file:
                return file.seek(0, 2) != shard.size_bytes
        except OSError:
            return False

    def _summaries(self, name: str) -> tuple[Shard | None, list[Summary]]:
        """What a shard holds; None if it is gone already or the storage does not answer."""
        shard, found = Shard(name, _place(name)), list[Summary]()
        try:
            with self._store.open(name) as file:
                shard.size_bytes = file.seek(0, 2)
                for item in summaries(file):
                    if isinstance(item, record.Header):
                        shard.layout = item.layout
                    else:
                        found.append(item)
        except (FileNotFoundError, StoreUnavailableError):
            return None, []
        except (ShardError, RecordError) as error:
            shard.problem = printable(str(error), 300)
        except OSError as error:
            shard.problem = f"cannot be read: {error.strerror}"
        shard.records = len(found)
        return shard, found

    def _add(self, name: str, shard: Shard | None, found: Sequence[Summary]) -> None:
        if shard is None:
            return
        known = self.shards.get(name)
        if known is not None:  # it was damaged: its rows refer to it
            known.records, known.size_bytes = shard.records, shard.size_bytes
            known.problem, known.layout = shard.problem, shard.layout
            shard = known
        self.shards[name] = shard
        for summary in found:
            key = reader.episode_digest(f"{shard.place}/{summary.episode_id}").hex()
            if key in self._known:
                continue
            row = Row(len(self.rows), key, shard.place, shard, summary)
            # Other threads look up: the row comes before the numbers that lead to it, and its key,
            # with which they begin, last.
            self.rows.append(row)
            self._groups.setdefault((row.place, summary.group_id), []).append(row.number)
            instance = (summary.task, summary.variant, summary.seed)
            self._instances.setdefault(instance, []).append(row.number)
            self._by_task.setdefault(summary.task, {})[summary.lowest_version] = row.number
            for facet, value in (
                *(("task", summary.task), ("place", row.place)),
                *(("outcome", row.outcome), ("actor", summary.actor_id)),
            ):
                self.facets[facet][value] += 1
            self._known[key] = row.number

    # ------------------------------------------------------------------------ asking

    def select(self, wanted: Filter, first_rows: int) -> Sequence[int]:
        """Numbers of the rows that a filter takes, among the first rows, in its order."""
        key = (wanted, first_rows)
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        rows = [row for row in self.rows[:first_rows] if wanted.takes(row)]
        if wanted.order in _SORTED:
            by, descending = _SORTED[wanted.order]
            rows.sort(key=by, reverse=descending)
        elif wanted.order == ORDERS[0]:
            rows.reverse()
        numbers = [row.number for row in rows]
        with self._lock:
            self._answers[key] = numbers
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        return numbers

    def find(self, key: str) -> Row | None:
        number = self._known.get(key)
        return None if number is None else self.rows[number]

    def group_of(self, row: Row) -> list[Row]:
        """The episodes of its group that were found, itself among them, in order."""
        return [self.rows[n] for n in self._groups[row.place, row.summary.group_id]]

    def instance_of(self, row: Row) -> list[Row]:
        """All episodes of the same task instance, at any version and place."""
        summary = row.summary
        key = (summary.task, summary.variant, summary.seed)
        return [self.rows[n] for n in self._instances[key]]

    def versions_of(self, row: Row) -> list[Row]:
        """The newest episode of the same task at each other version, newest version first."""
        found = sorted(self._by_task[row.summary.task].items(), reverse=True)
        return [self.rows[n] for version, n in found if version != row.summary.lowest_version]

    def read_episode(self, row: Row) -> Trajectory:
        """The whole record, checked.

        Raises: ShardError: its shard is gone or damaged. RecordError: the record is damaged.
        """
        shard, summary = row.shard, row.summary
        for name in (shard.name, f"{KEPT}/{shard.name.rpartition('/')[2]}"):
            try:
                with self._store.open(name) as file:
                    file.seek(summary.offset)
                    payload, _ = framing.read_frame(file, summary.size_bytes)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ShardError(f"{name}: cannot be read ({error.strerror or error})") from None
            trajectory = record.decode(payload, shard.layout)
            if trajectory.episode_id[:200] != summary.episode_id:
                raise ShardError(f"{name}: another shard stands there now")
            return trajectory
        shard.is_gone = True
        raise ShardError(
            f"{shard.name} is gone: the learner deletes shards that it has used. "
            "learner.keep_records_mib keeps them in kept/"
        )


def _place(name: str) -> str:
    """training; "eval before" of eval/before/...; "suite S: C" of eval/suites/S/C/..."""
    parts = name.split("/")
    if parts[0] != EVAL_DIR:
        return TRAINING
    if parts[1:2] == ["suites"] and len(parts) > 4:
        return f"suite {parts[2]}: {parts[3]}"
    return f"eval {parts[1]}"
