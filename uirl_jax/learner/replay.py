"""Experience replay: stored successes for groups in which every episode failed.

Used by the learner's loop. workdir/replay/ holds the newest success of each task instance, as a
shard of one record. It is added to a group of the same instance that has no success, with the
logprobs of the policy that sampled it, so that the loss corrects for its age (`loss.importance`).
The checkpoint lists the files in use; files that no kept checkpoint lists are deleted.

Source: ARPO, arXiv:2505.16282.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.log_lines import key_values
from uirl_jax.shards.reader import RecordRef, read_entries, scan_shard
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import put_shard
from uirl_jax.store import Store, StoreUnavailableError, is_temporary, restart_error
from uirl_jax.types import TaskSpec, Trajectory

Group = list[Trajectory]

REPLAY = "replay"


class Replay:
    """The stored successes of one run.

    Args:
      files: file name by task key, as the checkpoint has it.
    """

    def __init__(
        self, store: Store, base_hash: str, layout: TokenLayout, files: dict[str, str]
    ) -> None:
        self._store, self._base_hash, self._layout = store, base_hash, layout
        self.files = dict(files)
        # Where the added records are, by episode; the caller may clear it.
        self.taken_from: dict[str, RecordRef] = {}

    def complete(self, group: Group) -> Group:
        """The group; without a success in it, also a stored success of its instance if any."""
        key = _key(group[0].task)
        if key not in self.files or any(record.success for record in group):
            return group
        name = f"{REPLAY}/{self.files[key]}"
        try:
            header, (entry,) = scan_shard(self._store, name)
            (record,) = read_entries(self._store, name, [entry], header.layout)
            if header.base_hash != self._base_hash or record.task != group[0].task:
                raise ShardError(f"{self._store.location(name)}: from another run or task")
        except (OSError, ShardError, RecordError, ValueError) as error:
            if is_temporary(error):
                return group  # the file may be as good as before
            del self.files[key]
            path = self._store.location(name)
            print(key_values("replay_lost", path=path, reason=error), flush=True)
            return group
        self.taken_from[record.episode_id] = RecordRef(
            name, entry.offset, entry.size_bytes, record.episode_id
        )
        return [*group, record]

    def remember(self, groups: Sequence[Group], step: int) -> None:
        """Stores the best success of each group; `prune` deletes the one that it replaces.

        Raises: ShardError: the disk is full. RestartError: the storage does not answer.
        """
        for group in groups:
            fresh = [
                record for record in group if record.success and not is_replayed(record, group)
            ]
            if not fresh:
                continue
            best = max(fresh, key=lambda record: record.reward)
            key = _key(best.task)
            # With the episode: a step that takes groups several times must not replace what it
            # has completed a group with.
            name = f"{key}-{step}-{_digest(best.episode_id)}.tfrecord"
            path = f"{REPLAY}/{name}"
            try:
                put_shard(self._store, path, [best], base_hash=self._base_hash, layout=self._layout)
            except StoreUnavailableError as error:
                raise restart_error(self._store.location(path), error) from None
            self.files[key] = name

    def prune(self, kept: Iterable[dict[str, str]]) -> None:
        """Deletes the files that no kept checkpoint lists; `kept` has the `files` of each."""
        listed = {f"{REPLAY}/{name}" for files in kept for name in files.values()}
        self._store.delete(*(name for name in self._store.names(REPLAY) if name not in listed))


def is_replayed(record: Trajectory, group: Group) -> bool:
    """Whether the record was sampled in another group."""
    return record.group_id != group[0].group_id


def _key(task: TaskSpec) -> str:
    return _digest(json.dumps(asdict(task), sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
