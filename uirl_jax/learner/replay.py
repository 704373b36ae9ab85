"""Successes that are kept for later: what a group learns from when all of it failed.

On the data path: beside the learner's loop. The newest success of every task instance lies in
workdir/replay/ as a shard of one record. It joins a group of the same instance in which nobody
succeeded, and is then what it is: old, with the logprobs of the policy that sampled it, so that the
loss corrects for its age (`loss.importance`). Which files count is in the checkpoint; a file that
no kept checkpoint names goes.

Source: ARPO, arXiv:2505.16282.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from uirl_jax.errors import ShardError
from uirl_jax.metrics import key_values
from uirl_jax.shards.reader import read_stored_shard
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import put_shard
from uirl_jax.store import Store
from uirl_jax.types import TaskSpec, Trajectory

Group = list[Trajectory]

REPLAY = "replay"


class Replay:
    """One run's store.

    Args:
      files: what `files` was when the checkpoint was written; by task the name of its file.
    """

    def __init__(
        self, store: Store, base_hash: str, layout: TokenLayout, files: dict[str, str]
    ) -> None:
        self._store, self._base_hash, self._layout = store, base_hash, layout
        self.files = dict(files)

    def complete(self, group: Group) -> Group:
        """The group, and where none of it succeeded, a stored success of the same instance."""
        key = _key(group[0].task)
        if key not in self.files or any(record.success for record in group):
            return group
        name = f"{REPLAY}/{self.files[key]}"
        try:
            header, (record,) = read_stored_shard(self._store, name)
            if header.base_hash != self._base_hash or record.task != group[0].task:
                raise ShardError(f"{self._store.location(name)}: of another run or task")
        except (ShardError, ValueError) as error:
            del self.files[key]
            path = self._store.location(name)
            print(key_values("replay_lost", path=path, reason=error), flush=True)
            return group
        return [*group, record]

    def remember(self, groups: Sequence[Group], step: int) -> None:
        """Keeps the best success of each group, beside the one it replaces.

        Raises: ShardError where the disk is full.
        """
        for group in groups:
            fresh = [
                record for record in group if record.success and not is_replayed(record, group)
            ]
            if not fresh:
                continue
            best = max(fresh, key=lambda record: record.reward)
            key = _key(best.task)
            name = f"{key}-{step}.tfrecord"
            put_shard(
                self._store,
                f"{REPLAY}/{name}",
                [best],
                base_hash=self._base_hash,
                layout=self._layout,
            )
            self.files[key] = name

    def prune(self, kept: Iterable[dict[str, str]]) -> None:
        """Deletes the files that no checkpoint of `kept`, each with its `files`, names."""
        named = {f"{REPLAY}/{name}" for files in kept for name in files.values()}
        self._store.delete(*(name for name in self._store.names(REPLAY) if name not in named))


def is_replayed(record: Trajectory, group: Group) -> bool:
    """Whether it was sampled in another group than the one that it is in."""
    return record.group_id != group[0].group_id


def _key(task: TaskSpec) -> str:
    text = json.dumps(asdict(task), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
