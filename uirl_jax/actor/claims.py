"""Which actor plays which group, so that all actors together stay within the learner's limit.

An actor claims a group before it starts it, and keeps the claim until the learner has trained on
the group or can no longer use it:

    claims/<run id>/00000012             "a1 5": actor a1 plays group 12, started at version 5
    claims/<run id>/00000012.by.a1.5     the same as a name, so that a listing tells it
    claims/<run id>/00000013.abandoned   group 13 had too many env_errors; no actor plays it again

A claim is written with `Store.put_new`, so that only one actor gets a group. All actors choose the
lowest free index; the loser of a race reads the claims again before it tries another one.

The name that tells the content, the label, is written before the claim and deleted after it. A
claim is read where it has no label or several, which a race leaves for a moment. In a bucket 200
actors would otherwise read each other's claims 200 times: 690 requests a second.

The claims of an actor that was killed, or whose group takes longer than `overdue_s`, no longer
count towards the limit. Their groups are left to that actor: after its restart it plays them again.
In a bucket an actor that is stopped, too, leaves the claims of what it has published.
"""

import dataclasses
import re
import time
from collections.abc import Collection, Sequence

from uirl_jax.store import Store
from uirl_jax.store.lease import is_alive

CLAIMS = "claims"
CHECK_S = 5.0  # between two checks whether the other actors are alive
_ABANDONED = ".abandoned"
_INDEX = re.compile(r"\d{8,18}")
_LABEL = re.compile(r"(\d{8,18})\.by\.([0-9A-Za-z_.-]{1,64})\.(\d{1,18})")
_CONTENT = re.compile(rb"([0-9A-Za-z_.-]{1,64}) (\d{1,18})\s*")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claimed group.

    Attributes:
        actor_id: empty if the content is damaged; such a claim becomes overdue.
        version: policy version when the group was started.
        seen_s: when this process first saw the claim (time.monotonic).
    """

    actor_id: str
    version: int
    seen_s: float


class Claims:
    """The claims of a run, as one actor sees them.

    The constructor deletes the actor's own claims: they are of an earlier process, which is dead
    because this process holds the actor's lease. Methods that read or write raise OSError if the
    store fails.

    Args:
        overdue_s: time after which another actor's claim no longer counts.
        kept: groups that the earlier process has published, and that others know by its claims.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        actor_id: str,
        *,
        overdue_s: float,
        kept: Collection[int] = (),
    ) -> None:
        self._store, self._prefix = store, f"{CLAIMS}/{run_id}"
        self._actor_id, self._overdue_s = actor_id, overdue_s
        self._claims: dict[int, Claim] = {}
        self._abandoned: set[int] = set()
        self._dead: set[str] = set()  # actors, at the last check
        self._next_check_s = 0.0
        self._is_open = False
        self.poll()
        self.release(*(index for index in self.own() if index not in kept))
        self._is_open = True

    def poll(self) -> None:
        """Reads the claims. Call it before reading shards and manifest.

        A group's claim is deleted after the learner has trained on it, so in this order no group
        looks free that was claimed, published or trained.
        """
        claimed: list[int] = []
        abandoned: set[int] = set()
        labels: dict[int, list[tuple[str, int]]] = {}
        for name in self._store.names(self._prefix):
            stem = name.rpartition("/")[2]
            if _INDEX.fullmatch(stem):
                claimed.append(int(stem))
            elif label := _LABEL.fullmatch(stem):
                labels.setdefault(int(label[1]), []).append((label[2], int(label[3])))
            elif stem.endswith(_ABANDONED) and _INDEX.fullmatch(stem.removesuffix(_ABANDONED)):
                abandoned.add(int(stem.removesuffix(_ABANDONED)))
        found: dict[int, Claim] = {}
        for index in claimed:
            claim = self._known_or_read(index, labels.get(index, ()))
            if claim is not None:
                found[index] = claim
        for index in [i for i, c in found.items() if c.actor_id == self._actor_id]:
            if index not in self._claims and self._is_open:
                # `take` failed, and yet the claim was written, or `release` failed: no group is
                # played for it.
                self._store.delete(self._name(index))
                del found[index]
        unused = [  # of a process killed within `take`, or of a `take` or `release` that failed
            self._label(index, version)
            for index, pairs in labels.items()
            for actor_id, version in pairs
            if actor_id == self._actor_id
            and (index not in found or found[index].actor_id != self._actor_id)
            and index not in self.own()
        ]
        self._store.delete(*unused)
        own = {index: self._claims[index] for index in self.own()}  # also if its file was deleted
        self._claims, self._abandoned = found | own, abandoned

    def take(self, index: int, version: int) -> bool:
        """Claims a group; returns False if another actor has it."""
        content = f"{self._actor_id} {version}\n".encode()
        label = self._label(index, version)
        self._store.put(label, b"")
        taken = self._store.put_new(self._name(index), content)
        if not taken:
            self._store.delete(label)
        # Another actor's claim is read at the next poll; until then the index is not free.
        owner = self._actor_id if taken else ""
        self._claims[index] = Claim(owner, version, time.monotonic())
        return taken

    def release(self, *indices: int) -> None:
        """Deletes own claims.

        They are forgotten first: if a deletion fails, it may have been done, and the claim be
        another actor's by now. `poll` deletes what is left, after it has read whose it is.
        """
        labels = [self._label(index, self._claims.pop(index).version) for index in indices]
        self._store.delete(*map(self._name, indices))
        self._store.delete(*labels)

    def abandon(self, index: int) -> None:
        """Marks a group that no actor shall play again, and deletes the claim."""
        self._store.put_new(f"{self._name(index)}{_ABANDONED}", b"")
        self._abandoned.add(index)
        self.release(index)

    def own(self) -> list[int]:
        return [i for i, claim in self._claims.items() if claim.actor_id == self._actor_id]

    def in_flight(self) -> dict[int, int]:
        """Group index -> version at its start, of the claims that count towards the limit."""
        now_s = time.monotonic()
        return {
            index: claim.version
            for index, claim in self._claims.items()
            if claim.actor_id == self._actor_id
            or (claim.actor_id not in self._dead and now_s - claim.seen_s < self._overdue_s)
        }

    def unavailable(self) -> set[int]:
        """Indices that this actor must not start: claimed or abandoned."""
        return self._claims.keys() | self._abandoned

    def check_alive_if_due(self) -> None:
        """Finds out, at most every CHECK_S, which of the other claims' actors are dead."""
        if time.monotonic() < self._next_check_s:
            return
        self._next_check_s = time.monotonic() + CHECK_S
        others = {claim.actor_id for claim in self._claims.values()} - {self._actor_id, ""}
        self._dead = {actor_id for actor_id in others if not is_alive(self._store, actor_id)}

    def _name(self, index: int) -> str:
        return f"{self._prefix}/{index:08d}"

    def _label(self, index: int, version: int) -> str:
        """The name that tells this actor's claim."""
        return f"{self._name(index)}.by.{self._actor_id}.{version}"

    def _known_or_read(self, index: int, labels: Sequence[tuple[str, int]]) -> Claim | None:
        known = self._claims.get(index)
        if known is not None and known.actor_id:
            same = (known.actor_id, known.version)
            if not labels or same in labels:
                return known
            # Released, and claimed anew, since the last look; or only asked for.
            read = self._read(self._name(index))
            return known if read and (read.actor_id, read.version) == same else read
        if len(labels) == 1:
            return Claim(*labels[0], time.monotonic())
        read = self._read(self._name(index))
        return known if known and read and not read.actor_id else read  # damaged: since when

    def _read(self, name: str) -> Claim | None:
        try:
            match = _CONTENT.fullmatch(self._store.read(name))
        except FileNotFoundError:
            return None  # released since it was listed
        now_s = time.monotonic()
        return Claim(match[1].decode(), int(match[2]), now_s) if match else Claim("", 0, now_s)
