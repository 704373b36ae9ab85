"""The learner's queue of groups: every record is used exactly once, in a fixed order.

Actor's `writer` -> shards/<actor>/ in the store -> here -> learner. Shards that are damaged or of
another run are moved to quarantine/ with a reason, and every dropped record is counted. The queue
keeps an index in memory, not the records. `reader` checks and reads the files.
"""

import base64
import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.log_lines import key_values
from uirl_jax.shards import reader, record
from uirl_jax.shards.journal import JOURNAL, Journal, Line
from uirl_jax.shards.reader import SHARDS, Entry, RecordRef
from uirl_jax.store import Store, StoreUnavailableError, is_temporary, restart_error
from uirl_jax.types import Trajectory

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine"
KEPT = "kept"
_NAME = re.compile(
    r"(?P<actor>.+)-(?P<boot>[0-9a-f]{32})-(?P<seq>\d{8,12})-v(?P<version>\d{1,18})\.tfrecord"
)
STATE_SCHEMA = 1


@dataclasses.dataclass
class _Shard:
    """An existing shard. done: indices of its records that are no longer pending."""

    line: int  # in the journal
    layout: record.TokenLayout | None = None  # None if all its records were consumed
    records: int = 0
    size_bytes: int | None = None  # None if it was not read
    done: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The pending records of one group_id in one shard."""

    shard: str
    entries: tuple[tuple[int, Entry], ...]  # (index in the shard, entry)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version, ignoring members without turns; (-1, -1) without any turn."""
        with_turns = [entry for _, entry in self.entries if entry.oldest_version >= 0]
        return (
            min((entry.oldest_version for entry in with_turns), default=-1),
            max((entry.newest_version for entry in with_turns), default=-1),
        )


class ShardQueue:
    """The pending groups, and the number of records by outcome. One per workdir.

    `poll` notices new shards; they are used in that order (within one poll: by policy version,
    actor, boot and sequence number), which the `journal` stores. The result of `take_groups`
    depends only on this order and the arguments, not on timing.

    Records are counted as published = trained + stale + quarantined + duplicate + pending. A shard
    that is quarantined when noticed counts as its header's number of records, or 1 if that cannot
    be read. If a shard is damaged or missing later, its pending records count as quarantined.

    Args:
        state: the result of `state()` in the restored checkpoint; None without a checkpoint.
        keep_bytes: used shards are moved to kept/, up to this size; 0: they are deleted.

    Raises: ShardError: a state of another run, or one that is ahead of the journal.
      StoreUnavailableError: the storage does not answer.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        base_hash: str,
        state: dict[str, Any] | None = None,
        *,
        keep_bytes: int = 0,
    ) -> None:
        self._store = store
        self._keep_bytes = keep_bytes
        self._kept = store.sizes(KEPT) if keep_bytes else {}
        self._run_id, self._base_hash = run_id, base_hash
        self._journal = Journal(store)
        state = state or self._empty_state()
        self._check(state)
        self._counts = {name: int(state[name]) for name in ("trained", "stale", "duplicate")}
        self._lost: dict[str, int] = dict(state["lost"])
        self._consumed = _split_digests(state["consumed"])  # trained or stale
        self._waiting: set[bytes] = set()  # digests of pending records
        self._groups: list[_Group] = []
        # Where the records of the groups taken last are, by episode; the caller may clear it.
        self.taken_from: dict[str, RecordRef] = {}
        self._shards: dict[str, _Shard] = {}
        self._noticed = {line.shard for line in self._journal.lines}
        self._last_warning = ""
        self._resume(state)

    # ------------------------------------------------------------ called by the learner

    def poll(self) -> None:
        """Notice new shards. Costs one listing, and one scan of each new shard.

        Other files, and shards that are deleted meanwhile, are ignored; while the storage does not
        answer, nothing is noticed. Raises: ShardError: the journal or the quarantine cannot be
        written. RestartError: the storage did not answer while the journal was written.
        """
        try:
            names = sorted(self._new_names(), key=_arrival)
        except StoreUnavailableError as error:
            self._warn_once(error)
            return
        accepted: list[tuple[str, record.Header, list[Entry]]] = []
        refused: dict[str, str] = {}
        lines: list[Line] = []
        for name, scanned in zip(
            names, reader.read_each(self._store, self._scan, names), strict=True
        ):
            if isinstance(scanned, FileNotFoundError):
                continue
            if isinstance(scanned, OSError) and is_temporary(scanned):  # says nothing of the shard
                self._warn_once(scanned)
            elif isinstance(scanned, Exception):
                refused[name] = str(scanned)
                count = reader.records_by_header(self._store, _stored(name))
                lines.append(Line(name, count, quarantined=True))
            else:
                header, entries = scanned
                accepted.append((name, header, entries))
                lines.append(Line(name, header.records, quarantined=False))
        if not lines:
            return
        first = len(self._journal.lines)
        self._journal.append(lines)
        self._noticed.update(line.shard for line in lines)
        line_of = {line.shard: first + number for number, line in enumerate(lines)}
        for name, reason in refused.items():
            self._quarantine(name, reason)
        for name, header, entries in accepted:
            self._admit(name, line_of[name], header, entries, done=set())

    def take_groups(
        self,
        n_groups: int,
        current_version: int,
        max_staleness: int,
        is_trained: Callable[[str], bool] | None = None,
    ) -> list[list[Trajectory]] | None:
        """The next n_groups groups, counted as trained; None if there are fewer at present.

        First drops groups as stale: those with a turn older than current_version - max_staleness,
        and those without turns. A shard with a turn newer than current_version is from a policy
        that was lost with a damaged checkpoint; it is quarantined, because actors would count it as
        fresh when that version is reached again.

        Args:
            current_version: the version that the learner holds. Publish a version only after its
                checkpoint is committed; otherwise a restart quarantines its shards as too new.
            is_trained: whether a group was taken before, by its id; another one is dropped as a
                duplicate. A RecordError says that it is no id, and quarantines the shard. None: no
                group is played twice.
        """
        while True:
            self._drop_stale(current_version, max_staleness)
            if is_trained is not None:
                self._drop_trained(is_trained)
            if len(self._groups) < n_groups:
                return None
            chosen = self._groups[:n_groups]
            try:
                groups = reader.read_each(self._store, self._read_group, chosen)
            except _LostShardError as error:
                self._lose(error.shard, error.reason)
                continue
            except OSError as error:  # says nothing of the shards
                self._warn_once(error)
                return None
            del self._groups[:n_groups]
            for group in chosen:
                self._finish(group, "trained")
            return groups

    def state(self) -> dict[str, Any]:
        """The data cursor for a checkpoint: JSON, about 11 bytes per episode so far.

        Call it when all groups taken so far are trained on.
        """
        return {
            "schema": STATE_SCHEMA,
            "run_id": self._run_id,
            "noticed": len(self._journal.lines),
            "open": {
                name: sorted(shard.done)
                for name, shard in self._shards.items()
                if len(shard.done) < shard.records
            },
            "lost": dict(self._lost),
            "consumed": base64.b64encode(b"".join(sorted(self._consumed))).decode(),
            **self._counts,
        }

    def committed(self, state: dict[str, Any]) -> None:
        """Delete the shards whose records are all consumed in `state`.

        Call it with the state of the oldest kept checkpoint, not the newest: a restart may fall
        back to it if newer ones are damaged.
        """
        self._check(state)
        done = [
            name
            for name, shard in self._shards.items()
            if shard.line < state["noticed"]
            and name not in state["open"]
            and len(shard.done) == shard.records
        ]
        try:
            if self._keep_bytes:
                for name in done:
                    self._keep(name)
                self._delete_surplus()
            else:
                self._store.delete(*map(_stored, done))
        except StoreUnavailableError as error:  # the others follow after a later commit
            self._warn_once(error)
            return
        except OSError as error:
            raise ShardError(
                f"{self._store.location(SHARDS)}: {error.strerror}: cannot delete used shards"
            ) from None
        for name in done:
            self._shards.pop(name, None)

    def _keep(self, name: str) -> None:
        """Moves a used shard to kept/."""
        kept = f"{KEPT}/{name.rpartition('/')[2]}"
        with contextlib.suppress(FileNotFoundError):  # moved before, and the answer was lost
            self._store.move(_stored(name), kept)
        size_bytes = self._shards[name].size_bytes
        self._kept[kept] = self._store.sizes(KEPT)[kept] if size_bytes is None else size_bytes
        del self._shards[name]  # now: the storage may fail at the next one

    def _delete_surplus(self) -> None:
        """Deletes the oldest shards in kept/ above the limit."""
        surplus_bytes = sum(self._kept.values()) - self._keep_bytes
        for kept in sorted(self._kept, key=_arrival):
            if surplus_bytes <= 0:
                return
            self._store.delete(kept)
            surplus_bytes -= self._kept.pop(kept)

    def accounting(self) -> dict[str, int]:
        """Records by outcome. Each is counted independently, so the identity is a real check."""
        lines = self._journal.lines
        return {
            "published": sum(line.records for line in lines),
            "trained": self._counts["trained"],
            "stale": self._counts["stale"],
            "quarantined": sum(line.records for line in lines if line.quarantined)
            + sum(self._lost.values()),
            "duplicate": self._counts["duplicate"],
            "pending": sum(len(group.entries) for group in self._groups),
        }

    # ------------------------------------------------------------ noticing

    def _new_names(self) -> Iterator[str]:
        for stored in reader.shard_names(self._store):
            name = stored.removeprefix(f"{SHARDS}/")
            if name not in self._noticed:
                yield name

    def _scan(
        self, name: str
    ) -> tuple[record.Header, list[Entry]] | OSError | ShardError | RecordError:
        """Header and entries of a shard of this run, or what is wrong with it."""
        try:
            header, entries = reader.scan_shard(self._store, _stored(name))
            self._check_ours(name, header)
        except (OSError, ShardError, RecordError) as error:
            return error
        return header, entries

    def _check_ours(self, name: str, header: record.Header) -> None:
        directory, _, file_name = name.partition("/")
        match = _NAME.fullmatch(file_name)
        if not match or match["actor"] != directory:
            raise ShardError("its name is not <actor>-<boot uuid>-<seq>-v<version>.tfrecord")
        for field, got, expected in (
            ("run", header.run_id, self._run_id),
            ("actor", header.actor_id, directory),
            ("base model", header.base_hash, self._base_hash),
        ):
            if got != expected:
                raise ShardError(f"{field} {got[:64]!r}, expected {expected[:64]!r}")

    def _admit(
        self, name: str, line: int, header: record.Header, entries: list[Entry], done: set[int]
    ) -> None:
        size_bytes = max((entry.offset + entry.size_bytes for entry in entries), default=0)
        self._shards[name] = _Shard(line, header.layout, header.records, size_bytes, done)
        groups: dict[str, list[tuple[int, Entry]]] = {}
        for idx, entry in enumerate(entries):
            if idx in done:
                continue
            if entry.episode_digest in self._consumed or entry.episode_digest in self._waiting:
                done.add(idx)
                self._counts["duplicate"] += 1
                continue
            self._waiting.add(entry.episode_digest)
            groups.setdefault(entry.group_id, []).append((idx, entry))
        self._groups += [_Group(name, tuple(members)) for members in groups.values()]

    # ------------------------------------------------------------ using

    def _drop_stale(self, current_version: int, max_staleness: int) -> None:
        future = {group.shard for group in self._groups if group.versions[1] > current_version}
        for name in sorted(future):
            reason = f"sampled with a policy after version {current_version} that was lost since"
            self._lose(name, reason)
        fresh = []
        for group in self._groups:
            if 0 <= group.versions[0] >= current_version - max_staleness:
                fresh.append(group)
            else:
                self._finish(group, "stale")
        self._groups = fresh

    def _drop_trained(self, is_trained: Callable[[str], bool]) -> None:
        """Drops groups that were played twice.

        A learner that is killed forgets what it had taken since its checkpoint, and actors may have
        released their claims by then.
        """
        fresh: dict[str, _Group] = {}
        invalid: dict[str, str] = {}
        for group in self._groups:
            group_id = group.entries[0][1].group_id
            try:
                is_known = group_id in fresh or is_trained(group_id)
            except RecordError as error:
                invalid[group.shard] = str(error)
                continue
            if is_known:
                self._finish(group, "duplicate")
            else:
                fresh[group_id] = group
        for name, reason in invalid.items():
            self._lose(name, reason)
        self._groups = [group for group in fresh.values() if group.shard not in invalid]

    def _finish(self, group: _Group, outcome: str) -> None:
        for idx, entry in group.entries:
            self._shards[group.shard].done.add(idx)
            self._waiting.discard(entry.episode_digest)
            self._consumed.add(entry.episode_digest)
            self._counts[outcome] += 1

    def _read_group(self, group: _Group) -> list[Trajectory]:
        shard, name = self._shards[group.shard], _stored(group.shard)
        assert shard.layout is not None  # a shard with groups was admitted
        try:
            entries = [entry for _, entry in group.entries]
            records = reader.read_entries(self._store, name, entries, shard.layout)
            for trajectory, entry in zip(records, entries, strict=True):
                self.taken_from[trajectory.episode_id] = RecordRef(
                    name, entry.offset, entry.size_bytes, trajectory.episode_id
                )
            return records
        except (OSError, ShardError, RecordError) as error:
            if is_temporary(error):
                raise
            raise _LostShardError(group.shard, str(error)) from None

    def _warn_once(self, error: OSError) -> None:
        if error.strerror != self._last_warning:  # not again at every poll
            self._last_warning = error.strerror or ""
            logger.warning(key_values("storage_unavailable", reason=error))

    def _lose(self, name: str, reason: str) -> None:
        """Quarantines the pending records of a shard that was valid when noticed."""
        shard = self._shards.pop(name)
        self._lost[name] = shard.records - len(shard.done)
        for group in self._groups:
            if group.shard == name:
                self._waiting.difference_update(entry.episode_digest for _, entry in group.entries)
        self._groups = [group for group in self._groups if group.shard != name]
        self._quarantine(name, reason)

    def _quarantine(self, name: str, reason: str) -> None:
        """Move a shard, if it exists; the reason is written first, so that it is never missing."""
        target = f"{QUARANTINE}/{name.replace('/', '--')}"
        try:
            # put_new: after a restart the original reason is kept.
            self._store.put_new(f"{target}.reason", f"{_stored(name)}: {reason}\n".encode())
            with contextlib.suppress(FileNotFoundError):
                self._store.move(_stored(name), target)
        except OSError as error:
            if is_temporary(error):
                raise restart_error(self._store.location(target), error) from None
            raise ShardError(
                f"{self._store.location(target)}: {error.strerror}: cannot quarantine a shard "
                f"({reason})"
            ) from None

    # ------------------------------------------------------------ restarting

    def _empty_state(self) -> dict[str, Any]:
        zeros = dict.fromkeys(("noticed", "trained", "stale", "duplicate"), 0)
        return {
            "schema": STATE_SCHEMA,
            "run_id": self._run_id,
            "open": {},
            "lost": {},
            "consumed": "",
            **zeros,
        }

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("schema") != STATE_SCHEMA or state.keys() != self._empty_state().keys():
            raise ShardError(
                f"data cursor has schema {state.get('schema')}, this reader knows {STATE_SCHEMA}"
            )
        if state["run_id"] != self._run_id:
            raise ShardError(f"data cursor of run {state['run_id']!r}, this is {self._run_id!r}")
        if state["noticed"] > len(self._journal.lines):
            raise ShardError(
                f"{self._store.location(JOURNAL)}: {len(self._journal.lines)} lines, the "
                f"checkpoint refers to {state['noticed']}: restore the files, or start in a new "
                "workdir"
            )

    def _resume(self, state: dict[str, Any]) -> None:
        """Index the records that the state has not consumed, in the journal's order."""
        existing = set(reader.shard_names(self._store))
        pending: list[tuple[int, Line]] = []
        for number, line in enumerate(self._journal.lines):
            exists = _stored(line.shard) in existing
            if line.quarantined:
                if exists:  # killed after writing the journal and before the move
                    self._quarantine(line.shard, "refused before a restart")
            elif number < state["noticed"] and line.shard not in state["open"]:
                if exists:  # killed after the commit and before the deletion
                    self._shards[line.shard] = _Shard(number)
            else:
                pending.append((number, line))
        shards = [line.shard for _, line in pending]
        found = reader.read_each(self._store, self._scan, shards)
        for (number, line), scanned in zip(pending, found, strict=True):
            done = set(state["open"].get(line.shard, ()))
            if isinstance(scanned, OSError) and is_temporary(scanned):
                raise scanned  # says nothing about the shard
            if isinstance(scanned, Exception):
                reason = str(scanned)
            elif scanned[0].records != line.records:
                reason = f"{scanned[0].records} records, expected {line.records}"
            else:
                self._admit(line.shard, number, *scanned, done)
                continue
            self._shards[line.shard] = _Shard(number, None, line.records, done=done)
            self._lose(line.shard, f"after a restart: {reason}")


class _LostShardError(Exception):
    """A shard with pending records cannot be read any more. Caught within this file."""

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard, self.reason = shard, reason


def _arrival(name: str) -> tuple[int, str, str, int, str]:
    match = _NAME.fullmatch(name.partition("/")[2])
    if not match:
        return (0, "", "", 0, name)
    return (int(match["version"]), match["actor"], match["boot"], int(match["seq"]), name)


def _stored(name: str) -> str:
    """A shard's name in the store; the journal and the states leave out the prefix."""
    return f"{SHARDS}/{name}"


def _split_digests(text: str) -> set[bytes]:
    data = base64.b64decode(text)
    size_bytes = reader.DIGEST_BYTES
    return {data[i : i + size_bytes] for i in range(0, len(data), size_bytes)}
