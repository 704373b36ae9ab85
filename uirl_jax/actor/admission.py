"""Which groups of a run exist already, and so which ones an actor may start.

Beside the data path: reads the shards that are on disk and the policy manifest, and writes nothing.
A group is accounted for while the learner has trained on it or still can; one that was lost,
quarantined or has become stale is not, and its index is started again. `host` acts on the answers.

What the learner says in `Manifest.extra`:

    groups_trained    [[0, 57], [58, 120]]   indices trained on up to here, as half-open ranges
    groups_consumed   119                    without groups_trained: the first 119 indices
    groups_extra      3                      of these, on top of what the steps were to take:
                                             others taught nothing, or too little
"""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Self

from uirl_jax.errors import PolicyError, RecordError, ShardError
from uirl_jax.policy_sync import Manifest
from uirl_jax.shards.reader import scan_shard, shard_names
from uirl_jax.store import Store


def group_id(index: int) -> str:
    """The group_id in the records of a group; `int` of it is the index."""
    return f"{index:08d}"


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """One group in a shard on disk. The versions are those of its oldest and its newest turn."""

    index: int
    oldest_version: int
    newest_version: int


class PublishedShards:
    """The groups in all shards of a run, whichever actor wrote them. Each file is read once."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._groups: dict[str, tuple[ShardGroup, ...]] = {}

    def poll(self) -> tuple[ShardGroup, ...]:
        """What is in the store now.

        Call it before reading the manifest, not after: the learner publishes that it trained on a
        group before it deletes the group's shard, so that in this order none is missed in both.
        """
        self._groups = {
            name: self._groups[name] if name in self._groups else self._read(name)
            for name in shard_names(self._store)
        }
        return tuple(itertools.chain.from_iterable(self._groups.values()))

    def note(self, name: str, group: ShardGroup) -> None:
        """Of a shard that this process wrote itself: it need not be read."""
        self._groups[name] = (group,)

    def _read(self, name: str) -> tuple[ShardGroup, ...]:
        try:
            header, entries = scan_shard(self._store, name)
        except (OSError, ShardError, RecordError):
            return ()  # the learner will quarantine it, and says why
        versions: dict[str, list[int]] = {}
        for entry in entries:
            seen = versions.setdefault(entry.group_id, [])
            seen += [v for v in (entry.oldest_version, entry.newest_version) if v >= 0]
        return tuple(
            ShardGroup(int(group), min(seen), max(seen))
            for group, seen in versions.items()
            if header.run_id == self._run_id and group.isdecimal() and seen
        )


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The groups that are accounted for under one manifest."""

    version: int
    trained: tuple[range, ...]  # ascending, disjoint
    pending: frozenset[int]  # on disk, and the learner can still train on them
    extra: int = 0  # of the trained ones: others are wanted beside them

    @classmethod
    def of(cls, manifest: Manifest, on_disk: Collection[ShardGroup], max_staleness: int) -> Self:
        """Raises PolicyError where the manifest's extra is not as described above."""
        trained = _trained(manifest)
        # The rule of shards.queue.take_groups: all else it drops or quarantines.
        oldest = manifest.version - max_staleness
        pending = frozenset(
            group.index
            for group in on_disk
            if oldest <= group.oldest_version
            and group.newest_version <= manifest.version
            and not _holds(trained, group.index)
        )
        return cls(manifest.version, trained, pending, _extra(manifest))

    def __contains__(self, index: int) -> bool:
        return index in self.pending or _holds(self.trained, index)

    def admits(
        self, running: int, *, groups_per_step: int, max_staleness: int, actors: int = 1
    ) -> bool:
        """Whether one more group may start beside `running` ones that are not pending yet.

        Args:
          actors: how many there are. Each knows what it runs itself and takes the others to run as
            many: what all of them sampled beyond a step would be stale.
        Source: AReaL, arXiv:2505.24298: accepted + running < (eta + version + 1) * batch.
        """
        accepted = sum(map(len, self.trained)) - self.extra + len(self.pending)
        limit = (max_staleness + self.version + 1) * groups_per_step
        return accepted + running * actors < limit

    def next_index(self, first: int, stride: int, taken: Collection[int]) -> int:
        """The lowest of first, first + stride, ... that is neither accounted for nor taken."""
        index = first
        while True:
            held = next((r for r in self.trained if index in r), None)
            if held is not None:
                index += -(-(held.stop - index) // stride) * stride  # past the range at once
            elif index in self.pending or index in taken:
                index += stride
            else:
                return index


def _holds(ranges: tuple[range, ...], index: int) -> bool:
    return any(index in span for span in ranges)


def _trained(manifest: Manifest) -> tuple[range, ...]:
    pairs = manifest.extra.get("groups_trained", [[0, manifest.extra.get("groups_consumed")]])
    try:
        ranges = [range(start, stop) for start, stop in pairs]
    except (TypeError, ValueError):
        ranges = None
    if ranges is None or not _ascending(ranges):
        raise PolicyError(
            f"policy version {manifest.version}: the manifest's groups_trained is "
            f"{str(pairs)[:80]}, expected ascending pairs of whole numbers; is the learner of this "
            "release?"
        )
    return tuple(span for span in ranges if span)


def _extra(manifest: Manifest) -> int:
    count = manifest.extra.get("groups_extra", 0)
    if count.__class__ is not int or count < 0:
        raise PolicyError(
            f"policy version {manifest.version}: the manifest's groups_extra is "
            f"{str(count)[:80]}, expected a whole number; is the learner of this release?"
        )
    return count


def _ascending(ranges: list[range]) -> bool:
    edges = [edge for span in ranges for edge in (span.start, span.stop)]
    return all(before <= after for before, after in itertools.pairwise([0, *edges]))
