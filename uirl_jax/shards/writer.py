"""Writes whole groups as shards, atomically.

Actor -> shards/<actor>/ in the store -> learner's `queue`. It does not read, delete or rename
shards, and does not retry.
"""

import dataclasses
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, record
from uirl_jax.shards.reader import SHARDS
from uirl_jax.store import Store, StoreUnavailableError, open_store
from uirl_jax.types import Trajectory

_ACTOR_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ShardWriter:
    """Publishes the groups of one actor process. One process per actor id.

    Args:
        store: of the run; shards go to `shards/<actor_id>/` in it.
        actor_id: 1 to 64 of A-Z a-z 0-9 _ -; it is part of file names.
        run_id, base_hash: written into every header; the learner refuses shards of another run.
        layout: of the model that sampled, so that readers can check tokens against screenshots.
    """

    def __init__(
        self,
        store: Store,
        actor_id: str,
        run_id: str,
        base_hash: str,
        *,
        layout: record.TokenLayout,
    ) -> None:
        if not _ACTOR_ID.fullmatch(actor_id):
            raise ShardError(f"actor id {actor_id[:80]!r}: expected 1 to 64 of A-Z a-z 0-9 _ -")
        self._store, self._prefix = store, f"{SHARDS}/{actor_id}"
        self._actor_id, self._run_id, self._base_hash = actor_id, run_id, base_hash
        self._layout = layout
        self._boot = uuid.uuid4().hex  # a restarted actor never reuses a name
        self._sequence = 0
        try:
            store.remove_unfinished(self._prefix)
        except OSError as error:
            raise ShardError(
                f"{store.location(self._prefix)}: {error.strerror}: cannot write shards"
            ) from None

    def publish(self, trajectories: Sequence[Trajectory]) -> str:
        """Writes one shard of whole groups, in the order given. Returns its name in the store.

        Empty run and actor ids are filled in. If it raises, nothing is published.

        Raises:
            ShardError: the disk is full, or a trajectory has another run or actor.
            RecordError: a trajectory is invalid, or the shard would be too large.
            StoreUnavailableError: the storage does not answer.
        """
        ours = {"run_id": self._run_id, "actor_id": self._actor_id}
        for trajectory in trajectories:
            for name, value in ours.items():
                if getattr(trajectory, name) not in ("", value):
                    raise ShardError(
                        f"episode {trajectory.episode_id}: {name} is {getattr(trajectory, name)!r},"
                        f" this writer's is {value!r}"
                    )
        stamped = [dataclasses.replace(trajectory, **ours) for trajectory in trajectories]
        newest = max((t.policy_versions[1] for t in stamped), default=-1)
        stem = f"{self._actor_id}-{self._boot}-{self._sequence:08d}-v{max(newest, 0)}"
        name = f"{self._prefix}/{stem}.tfrecord"
        self._sequence += 1
        put_shard(self._store, name, stamped, base_hash=self._base_hash, layout=self._layout)
        return name


def put_shard(
    store: Store,
    name: str,
    trajectories: Sequence[Trajectory],
    *,
    base_hash: str,
    layout: record.TokenLayout,
) -> None:
    """Write one shard, of trajectories of one run and actor, atomically.

    Also used for records that are not for the learner, such as an evaluation's.

    Raises:
        ShardError: the disk is full, there is no trajectory, or they are of several runs or actors.
        RecordError: a trajectory is invalid, or the shard would be too large.
        StoreUnavailableError: the storage does not answer.
    """
    where = store.location(name)
    if not trajectories:
        raise ShardError(f"{where}: a shard needs at least one trajectory")
    if len({(t.run_id, t.actor_id) for t in trajectories}) > 1:
        raise ShardError(f"{where}: trajectories of several runs or actors; a shard holds one")
    versions = [v for t in trajectories for v in t.policy_versions if v >= 0]
    header = record.Header(
        run_id=trajectories[0].run_id,
        actor_id=trajectories[0].actor_id,
        base_hash=base_hash,
        lowest_version=min(versions, default=-1),
        highest_version=max(versions, default=-1),
        records=len(trajectories),
        layout=layout,
    )
    try:
        store.put(name, _frames(where, header, trajectories))
    except StoreUnavailableError:
        raise
    except OSError as error:
        raise ShardError(
            f"{where}: {error.strerror}: the shard was not published; free disk space or choose "
            "another workdir"
        ) from None


def write_shard(
    path: Path,
    trajectories: Sequence[Trajectory],
    *,
    base_hash: str,
    layout: record.TokenLayout,
) -> None:
    """`put_shard` for a local file outside a workdir, or for a file of this process alone."""
    store = open_store(path.parent)
    put_shard(store, path.name, trajectories, base_hash=base_hash, layout=layout)


def _frames(
    where: str, header: record.Header, trajectories: Sequence[Trajectory]
) -> Iterator[bytes]:
    """The shard's frames one by one, so that memory holds one encoded record, not a shard."""
    crcs: list[int] = []
    size_bytes = 0

    def framed(payload: bytes) -> bytes:
        nonlocal size_bytes
        frame = framing.frame(payload)
        size_bytes += len(frame)
        if size_bytes > framing.MAX_SHARD_BYTES:
            raise RecordError(
                f"{where}: more than {framing.MAX_SHARD_BYTES} bytes, which readers refuse; use "
                "smaller groups or shorter episodes"
            )
        crcs.append(int.from_bytes(frame[-4:], "little"))
        return frame

    yield framed(record.encode_header(header))
    for trajectory in trajectories:
        yield framed(record.encode(trajectory, header.layout))
    footer = record.Footer(len(trajectories), size_bytes, framing.crc_of_crcs(crcs))
    yield framed(record.encode_footer(footer))
