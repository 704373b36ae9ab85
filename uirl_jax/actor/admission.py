"""Which groups of a run exist, and which groups an actor may start.

Reads the published shards and the policy manifest; writes nothing. A group is accounted for if the
learner has trained on it or still can. A group that was lost, quarantined or became stale is not:
its index is started again. `claims` says which groups are being played, `host` starts them.

The learner's fields in `Manifest.extra`:

    groups_trained    [[0, 57], [58, 120]]   indices trained so far, as half-open ranges
    groups_extra      3                      groups beyond groups_per_step, which replaced groups
                                             that the learner could not use
    ended             200                    a run of so many steps has ended, perhaps before its
                                             last step; null: it goes on
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Self

from uirl_jax.errors import PolicyError, RecordError, ShardError
from uirl_jax.policy_sync import Manifest
from uirl_jax.shards.reader import SHARDS, scan_shard, shard_names
from uirl_jax.store import Store, StoreUnavailableError

_LAST = 10**18  # no index is greater: `len` of a range ends at 2**63


def group_id(index: int) -> str:
    """The group_id in the records of a group; `int` of it gives the index back."""
    return f"{index:08d}"


@dataclasses.dataclass(frozen=True)
class ShardGroup:
    """One group in a published shard, with the oldest and newest policy version of its turns."""

    index: int
    oldest_version: int
    newest_version: int


class PublishedShards:
    """The groups in the published shards of a run. Each shard is read once.

    Args:
        actor_id: whose shards; empty: of all actors. In a bucket 200 actors would read each other's
            shards 200 times, so there each one reads its own, and the others' groups count as
            in flight for as long as their claims stay: until they are trained.
    """

    def __init__(self, store: Store, run_id: str, actor_id: str = "") -> None:
        self._store, self._run_id = store, run_id
        self._prefix = f"{SHARDS}/{actor_id}" if actor_id else SHARDS
        self._groups: dict[str, tuple[ShardGroup, ...]] = {}

    def poll(self) -> tuple[ShardGroup, ...]:
        """The groups in the store now.

        Call this before reading the manifest, not after: the learner publishes that it trained on a
        group before it deletes the group's shard, so in this order no group is missed in both.
        """
        self._groups = {
            name: self._groups[name] if name in self._groups else self._read(name)
            for name in shard_names(self._store, self._prefix)
        }
        return tuple(itertools.chain.from_iterable(self._groups.values()))

    def note(self, name: str, group: ShardGroup) -> None:
        """Adds the group of a shard that this process wrote itself, without reading the shard."""
        self._groups[name] = (group,)

    def _read(self, name: str) -> tuple[ShardGroup, ...]:
        try:
            header, entries = scan_shard(self._store, name)
        except StoreUnavailableError:
            raise
        except (OSError, ShardError, RecordError):
            return ()  # the learner quarantines it with the reason
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
    pending: frozenset[int]  # in a shard, and the learner can still train on them
    extra: int = 0  # trained groups that do not count towards groups_per_step

    @classmethod
    def of(cls, manifest: Manifest, on_disk: Collection[ShardGroup], max_staleness: int) -> Self:
        """Raises PolicyError if the manifest's extra is not as described above."""
        trained = _trained(manifest)
        # The same rule as in shards.queue.take_groups, which drops or quarantines other groups.
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

    def next_index(
        self,
        in_flight: Mapping[int, int],
        unavailable: Collection[int],
        *,
        groups_per_step: int,
        max_staleness: int,
        steps: int | None = None,
    ) -> int | None:
        """The lowest index that may be started now; None while the limit is reached.

        The limit counts from the version at which the oldest group in flight was started. The
        learner then cannot take so many steps without that group that it becomes stale.

        Args:
          in_flight: claimed groups of all actors -> the version at their start.
          unavailable: indices that may not be started although they are not accounted for.
          steps: of the learner; groups that no step would take are not started.
        Source: AReaL, arXiv:2505.24298: accepted + running < (eta + version + 1) * batch; there
          `version` is the current one, and groups that run for more than eta steps are stale.
        """
        running = {index: version for index, version in in_flight.items() if index not in self}
        oldest = min([self.version, *running.values()])
        accepted = sum(map(len, self.trained)) - self.extra + len(self.pending)
        batches = max_staleness + oldest + 1
        batches = batches if steps is None else min(batches, steps)
        if accepted + len(running) >= batches * groups_per_step:
            return None
        index = 0
        while True:
            held = next((r for r in self.trained if index in r), None)
            if held is not None:
                index = held.stop
            elif index in self.pending or index in unavailable:
                index += 1
            else:
                return index


def _holds(ranges: tuple[range, ...], index: int) -> bool:
    return any(index in span for span in ranges)


def has_ended(manifest: Manifest, steps: int) -> bool:
    """Whether a run of so many steps has ended. One that was extended since goes on.

    Earlier releases publish `true`, which does not say how many steps the run had.
    """
    ended = manifest.extra.get("ended")
    if isinstance(ended, bool):
        return ended or manifest.step >= steps
    return manifest.step >= steps or (isinstance(ended, int) and ended >= steps)


def _trained(manifest: Manifest) -> tuple[range, ...]:
    pairs = manifest.extra.get("groups_trained")
    try:
        ranges = None if pairs is None else [range(start, stop) for start, stop in pairs]
    except (TypeError, ValueError):
        ranges = None
    if ranges is None or not _ascending(ranges):
        raise PolicyError(
            f"policy version {manifest.version}: the manifest's groups_trained is "
            f"{str(pairs)[:80]}, expected ascending pairs of whole numbers up to {_LAST:.0e}; "
            "does the learner run this release?"
        )
    return tuple(span for span in ranges if span)


def _extra(manifest: Manifest) -> int:
    count = manifest.extra.get("groups_extra", 0)
    if count.__class__ is not int or count < 0:
        raise PolicyError(
            f"policy version {manifest.version}: the manifest's groups_extra is "
            f"{str(count)[:80]}, expected a whole number; does the learner run this release?"
        )
    return count


def _ascending(ranges: list[range]) -> bool:
    edges = [edge for span in ranges for edge in (span.start, span.stop)]
    return all(before <= after for before, after in itertools.pairwise([0, *edges, _LAST]))
