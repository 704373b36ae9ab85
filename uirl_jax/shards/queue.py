"""The learner's queue of groups: every record is used exactly once, in a fixed order.

Actor's `writer` -> shards/<actor>/ in the store -> here -> learner. What is broken or foreign goes
to quarantine/ with its reason; nothing is dropped without being counted. The queue keeps an index
in memory, not the records. It computes no advantages; `reader` checks and reads the files.
"""

import base64
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import reader, record
from uirl_jax.shards.journal import JOURNAL, Journal, Line
from uirl_jax.shards.reader import SHARDS, Entry
from uirl_jax.store import Store
from uirl_jax.types import Trajectory

QUARANTINE = "quarantine"
_NAME = re.compile(
    r"(?P<actor>.+)-(?P<boot>[0-9a-f]{32})-(?P<seq>\d{8,12})-v(?P<version>\d{1,18})\.tfrecord"
)
STATE_SCHEMA = 1


@dataclasses.dataclass
class _Shard:
    """A shard that exists. done: indices of its records that are not pending any more."""

    line: int  # in the journal
    layout: record.TokenLayout | None = None  # None once it is wholly consumed
    records: int = 0
    done: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The records of one group_id in one shard that are still to be used."""

    shard: str
    entries: tuple[tuple[int, Entry], ...]  # (index in the shard, entry)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest; members without a turn have none; (-1, -1) if that is all of them."""
        with_turns = [entry for _, entry in self.entries if entry.oldest_version >= 0]
        return (
            min((entry.oldest_version for entry in with_turns), default=-1),
            max((entry.newest_version for entry in with_turns), default=-1),
        )


class ShardQueue:
    """The groups that wait for the learner, and the accounts of all that came. One per workdir.

    Shards are noticed by `poll` and used in the order noticed (new ones of one poll: by policy
    version, actor, boot and sequence number), which the `journal` keeps. What `take_groups`
    returns depends on that order and its arguments alone, not on when it was asked.

    The accounts, in records: published = trained + stale + quarantined + duplicate + pending.
    A shard that is quarantined when noticed counts as many records as its header says, 1 if that
    cannot be read. A shard that is damaged or gone later counts what was left of it as quarantined.

    Args:
        state: what `state()` returned for the checkpoint that is restored; None if there is none.

    Raises ShardError for a state of another run, or one that the journal does not reach.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        base_hash: str,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._run_id, self._base_hash = run_id, base_hash
        self._journal = Journal(store)
        state = state or self._empty_state()
        self._check(state)
        self._counts = {name: int(state[name]) for name in ("trained", "stale", "duplicate")}
        self._lost: dict[str, int] = dict(state["lost"])
        self._consumed = _split_digests(state["consumed"])  # trained or stale
        self._waiting: set[bytes] = set()  # digests of pending records
        self._groups: list[_Group] = []
        self._shards: dict[str, _Shard] = {}
        self._noticed = {line.shard for line in self._journal.lines}
        self._resume(state)

    # ------------------------------------------------------------ what the learner calls

    def poll(self) -> None:
        """Notice new shards. Costs one listing, and one scan of each new shard.

        Other files, and shards that vanish meanwhile, are left alone. Raises ShardError only if
        the journal or the quarantine cannot be written.
        """
        accepted: list[tuple[str, record.Header, list[Entry]]] = []
        refused: dict[str, str] = {}
        lines: list[Line] = []
        for name in sorted(self._new_names(), key=_arrival):
            try:
                header, entries = reader.scan_shard(self._store, _stored(name))
                self._check_ours(name, header)
            except FileNotFoundError:
                continue
            except (OSError, ShardError, RecordError) as error:
                refused[name] = str(error)
                count = reader.records_by_header(self._store, _stored(name))
                lines.append(Line(name, count, quarantined=True))
            else:
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
        self, n_groups: int, current_version: int, max_staleness: int
    ) -> list[list[Trajectory]] | None:
        """The next n_groups whole groups, trained from now on; None until there are that many.

        Before that, whole groups are counted as stale and dropped: those with a turn older than
        current_version - max_staleness, and those without any turn. A shard with a turn newer than
        current_version comes from a policy that was lost with a damaged checkpoint, and is
        quarantined: left where it is, actors would take it for fresh once that version comes again.
        current_version is the version that the learner holds: publish a version only after its
        checkpoint is committed, or a restart will see its own shards as future ones.
        """
        while True:
            self._drop_stale(current_version, max_staleness)
            if len(self._groups) < n_groups:
                return None
            chosen = self._groups[:n_groups]
            try:
                groups = [self._read_group(group) for group in chosen]
            except _LostShardError as error:
                self._lose(error.shard, error.reason)
                continue
            del self._groups[:n_groups]
            for group in chosen:
                self._finish(group, "trained")
            return groups

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on from here. JSON; about 11 bytes per episode so far.

        Take it when the groups taken so far have been trained on, and no others.
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
        """Delete the shards of which `state` needs nothing more.

        Call it with the state of a checkpoint that is committed, and that no later fallback will go
        behind: the oldest checkpoint that is kept, not the newest, if one may be damaged.
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
            self._store.delete(*map(_stored, done))
        except OSError as error:
            raise ShardError(
                f"{self._store.location(SHARDS)}: {error.strerror}: cannot delete used shards"
            ) from None
        for name in done:
            del self._shards[name]

    def accounting(self) -> dict[str, int]:
        """Records by fate. Each number is counted for itself; the identity is a test, not a sum."""
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

    def _check_ours(self, name: str, header: record.Header) -> None:
        directory, _, file_name = name.partition("/")
        match = _NAME.fullmatch(file_name)
        if not match or match["actor"] != directory:
            raise ShardError("its name is not <actor>-<boot uuid>-<seq>-v<version>.tfrecord")
        for what, got, expected in (
            ("run", header.run_id, self._run_id),
            ("actor", header.actor_id, directory),
            ("base model", header.base_hash, self._base_hash),
        ):
            if got != expected:
                raise ShardError(f"{what} {got[:64]!r}, expected {expected[:64]!r}")

    def _admit(
        self, name: str, line: int, header: record.Header, entries: list[Entry], done: set[int]
    ) -> None:
        self._shards[name] = _Shard(line, header.layout, header.records, done)
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
            said = f"sampled with a policy after version {current_version}, which was lost since"
            self._lose(name, said)
        fresh = []
        for group in self._groups:
            if 0 <= group.versions[0] >= current_version - max_staleness:
                fresh.append(group)
            else:
                self._finish(group, "stale")
        self._groups = fresh

    def _finish(self, group: _Group, fate: str) -> None:
        for idx, entry in group.entries:
            self._shards[group.shard].done.add(idx)
            self._waiting.discard(entry.episode_digest)
            self._consumed.add(entry.episode_digest)
            self._counts[fate] += 1

    def _read_group(self, group: _Group) -> list[Trajectory]:
        shard = self._shards[group.shard]
        assert shard.layout is not None  # a shard with groups was admitted
        try:
            return [
                reader.read_entry(self._store, _stored(group.shard), entry, shard.layout)
                for _, entry in group.entries
            ]
        except (OSError, ShardError, RecordError) as error:
            raise _LostShardError(group.shard, str(error)) from None

    def _lose(self, name: str, reason: str) -> None:
        """A shard that was good when noticed no longer is: what is left of it is quarantined."""
        shard = self._shards.pop(name)
        self._lost[name] = shard.records - len(shard.done)
        for group in self._groups:
            if group.shard == name:
                self._waiting.difference_update(entry.episode_digest for _, entry in group.entries)
        self._groups = [group for group in self._groups if group.shard != name]
        self._quarantine(name, reason)

    def _quarantine(self, name: str, reason: str) -> None:
        """Move a shard, if it exists; its reason is written first, so that none lacks one."""
        target = f"{QUARANTINE}/{name.replace('/', '--')}"
        try:
            # Only if there is none: after a restart the first reason is the true one.
            self._store.put_new(f"{target}.reason", f"{_stored(name)}: {reason}\n".encode())
            with contextlib.suppress(FileNotFoundError):
                self._store.move(_stored(name), target)
        except OSError as error:
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
                f"checkpoint has seen {state['noticed']}: put the files back, or start in a new "
                "workdir"
            )

    def _resume(self, state: dict[str, Any]) -> None:
        """Index again what the state has not consumed, in the journal's order."""
        existing = set(reader.shard_names(self._store))
        for number, line in enumerate(self._journal.lines):
            exists = _stored(line.shard) in existing
            if line.quarantined:
                if exists:  # killed between the journal and the move
                    self._quarantine(line.shard, "refused before a restart")
                continue
            if number < state["noticed"] and line.shard not in state["open"]:
                if exists:  # killed between the commit and the deletion
                    self._shards[line.shard] = _Shard(number)
                continue
            done = set(state["open"].get(line.shard, ()))
            try:
                header, entries = reader.scan_shard(self._store, _stored(line.shard))
                if header.records != line.records:
                    raise ShardError(f"{header.records} records, there were {line.records}")
                self._check_ours(line.shard, header)
            except (OSError, ShardError, RecordError) as error:
                self._shards[line.shard] = _Shard(number, None, line.records, done)
                self._lose(line.shard, f"after a restart: {error}")
            else:
                self._admit(line.shard, number, header, entries, done)


class _LostShardError(Exception):
    """A shard of which records were pending cannot be read any more. Stays within this file."""

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard, self.reason = shard, reason


def _arrival(name: str) -> tuple[int, str, str, int, str]:
    match = _NAME.fullmatch(name.partition("/")[2])
    if not match:
        return (0, "", "", 0, name)
    return (int(match["version"]), match["actor"], match["boot"], int(match["seq"]), name)


def _stored(name: str) -> str:
    """Name in the store of a shard, which the journal and the states name without the prefix."""
    return f"{SHARDS}/{name}"


def _split_digests(text: str) -> set[bytes]:
    data = base64.b64decode(text)
    size_bytes = reader.DIGEST_BYTES
    return {data[i : i + size_bytes] for i in range(0, len(data), size_bytes)}
