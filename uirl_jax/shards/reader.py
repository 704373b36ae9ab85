"""Reads and checks shard files: framing, header, contents of all records, footer.

Used by the learner's `queue`, the actors' admission and tools that show episodes. Reads from a
store, or a local file by its path; never writes or deletes.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, record
from uirl_jax.store import Store
from uirl_jax.types import Trajectory

Item = TypeVar("Item")
Result = TypeVar("Result")
SHARDS = "shards"  # shards/<actor>/<shard>.tfrecord in the store
DIGEST_BYTES = 8  # of an episode id: a million episodes collide with probability 3e-8


@dataclasses.dataclass(frozen=True)
class Entry:
    """The position of one record in its shard, and the fields that the queue needs."""

    offset: int  # of its frame
    size_bytes: int  # of its frame
    episode_digest: bytes
    group_id: str
    oldest_version: int  # -1 if no turn was sampled by a policy
    newest_version: int


class RecordRef(NamedTuple):
    """Where the record of an episode is; JSON."""

    name: str  # of the shard, in the store
    offset: int  # of its frame
    size_bytes: int
    episode_id: str


def shard_names(store: Store, prefix: str = SHARDS) -> list[str]:
    """Names of all shards in a store, of all actors or below a prefix. Raises OSError."""
    return [
        name for name in store.names(prefix) if name.count("/") == 2 and name.endswith(".tfrecord")
    ]


def read_each(store: Store, read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`read` of every item, in their order; several at once where the store is far away.

    Raises: what `read` raises for the first item that fails, once the running ones are done.
    """
    if store.reads_at_once == 1 or len(items) < 2:
        return [read(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(store.reads_at_once, "read-shards") as threads:
        return list(threads.map(read, items))


def scan_shard(store: Store, name: str) -> tuple[record.Header, list[Entry]]:
    """Check a whole shard: framing, header, contents of all records, footer.

    Memory holds one record at a time. Raises ShardError or RecordError, whose messages lack the
    name; FileNotFoundError if the shard does not exist.
    """
    header: record.Header | None = None
    entries: list[Entry] = []
    with store.open(name) as file:
        for found, offset, trajectory, size_bytes in _walk(file):
            header = found
            oldest, newest = trajectory.policy_versions
            entries.append(
                Entry(
                    offset=offset,
                    size_bytes=size_bytes,
                    episode_digest=episode_digest(trajectory.episode_id),
                    group_id=trajectory.group_id,
                    oldest_version=oldest,
                    newest_version=newest,
                )
            )
    assert header is not None  # _walk raises for a shard without records
    seen = [v for e in entries for v in (e.oldest_version, e.newest_version) if v >= 0]
    if (header.lowest_version, header.highest_version) != (
        min(seen, default=-1),
        max(seen, default=-1),
    ):
        raise ShardError(
            f"the header has versions {header.lowest_version} to {header.highest_version}, the "
            f"records have {min(seen, default=-1)} to {max(seen, default=-1)}"
        )
    return header, entries


def read_shard(path: str | os.PathLike[str]) -> tuple[record.Header, list[Trajectory]]:
    """Header and all trajectories of a local file, for reports and tools. Raises ShardError."""
    try:
        with open(path, "rb") as file:
            walked = list(_walk(file))
    except (OSError, ShardError, RecordError) as error:
        raise ShardError(f"{os.fspath(path)}: {error}") from None
    return walked[0][0], [trajectory for _, _, trajectory, _ in walked]


def read_entries(
    store: Store, name: str, entries: Sequence[Entry], layout: record.TokenLayout
) -> list[Trajectory]:
    """Records of a shard that was scanned before. Raises ShardError, RecordError or OSError."""
    trajectories = []
    with store.open(name) as file:  # once: in a bucket every opening and every read is a request
        for entry in entries:
            file.seek(entry.offset)
            payload, _ = framing.read_frame(file, entry.size_bytes)
            trajectory = record.decode(payload, layout)
            if episode_digest(trajectory.episode_id) != entry.episode_digest:
                raise ShardError(
                    f"the episode at byte {entry.offset} changed since the shard was scanned"
                )
            trajectories.append(trajectory)
    return trajectories


def read_refs(
    store: Store, refs: Sequence[RecordRef], layout: record.TokenLayout
) -> list[Trajectory]:
    """Records of one shard by their references. Raises ShardError, RecordError or OSError."""
    entries = [
        Entry(ref.offset, ref.size_bytes, episode_digest(ref.episode_id), "", -1, -1)
        for ref in refs
    ]
    return read_entries(store, refs[0].name, entries, layout)


def records_by_header(store: Store, name: str) -> int:
    """The number of records that a damaged shard counts as: its header's, or 1 if unreadable."""
    try:
        with store.open(name) as file:
            payload, _ = framing.read_frame(file, _size_bytes(file))
        return record.decode_header(payload).records
    except (OSError, ShardError):
        return 1


def episode_digest(episode_id: str) -> bytes:
    return hashlib.blake2b(episode_id.encode(), digest_size=DIGEST_BYTES).digest()


def _walk(file: io.BufferedIOBase) -> Iterator[tuple[record.Header, int, Trajectory, int]]:
    """(header, frame offset, trajectory, frame size in bytes) of every record of a shard."""
    size_bytes = _size_bytes(file)
    if size_bytes > framing.MAX_SHARD_BYTES:
        raise ShardError(f"{size_bytes} bytes, at most {framing.MAX_SHARD_BYTES} are allowed")
    if size_bytes == 0:
        raise ShardError("empty file")
    header, footer, crcs = None, None, []
    for offset, payload, crc in framing.iterate_frames(file, size_bytes):
        if header is None:
            header = record.decode_header(payload)
        elif len(crcs) <= header.records:
            number = len(crcs)
            try:
                trajectory = record.decode(payload, header.layout)
            except RecordError as error:
                raise RecordError(f"record {number}: {error}") from None
            if (trajectory.run_id, trajectory.actor_id) != (header.run_id, header.actor_id):
                raise RecordError(f"record {number} has another run or actor than the header")
            yield header, offset, trajectory, len(payload) + framing.FRAME_BYTES
        elif footer is None:
            footer = record.decode_footer(payload)
            expected = record.Footer(header.records, offset, framing.crc_of_crcs(crcs))
            if footer != expected:
                raise ShardError(f"the footer has {footer}, the file has {expected}")
        else:
            raise ShardError("there are bytes after the footer")
        crcs.append(crc)
    if footer is None:
        raise ShardError(f"truncated: {len(crcs)} records and no footer")


def _size_bytes(file: io.BufferedIOBase) -> int:
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size_bytes
