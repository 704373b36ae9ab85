"""What a list of episodes shows of each record, read without its screenshots and token arrays.

For people who look at a run (`watch.episode_index`), not for the learner: the contents that are
passed over are not checked. A record that is opened is decoded and checked whole (`record.decode`).
"""

import dataclasses
import io
import json
import math
import struct
from collections.abc import Iterator

import numpy as np

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import example, framing, record
from uirl_jax.types import StopReason

_MAX_NAME_CHARS = 200  # of a task and a variant: a row of a list, not a place for texts
_NAMES = (
    *("kind", "episode_id", "group_id", "task", "stop_reason", "success", "turns", "actor_id"),
    *("reward_started_duration", "turns/policy_versions"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One record of a shard, where it is and what it is about. Texts are untrusted."""

    offset: int  # of its frame
    size_bytes: int  # of its frame
    episode_id: str
    group_id: str
    actor_id: str
    task: str
    variant: str
    seed: int
    stop_reason: str
    success: bool
    reward: float
    started_unix_s: float
    turns: int
    lowest_version: int  # -1: no policy sampled it
    highest_version: int


def summaries(file: io.BufferedIOBase) -> Iterator[record.Header | Summary]:
    """The header of a shard, then its records, one at a time.

    What comes before the damage of a damaged shard is yielded. Raises: ShardError, RecordError.
    """
    size_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    if size_bytes > framing.MAX_SHARD_BYTES:
        raise ShardError(f"{size_bytes} bytes, at most {framing.MAX_SHARD_BYTES} are allowed")
    if size_bytes == 0:
        raise ShardError("empty file")
    header, count = None, 0
    for offset, payload, _ in framing.iterate_frames(file, size_bytes):
        if header is None:
            header = record.decode_header(payload)
            yield header
        elif count < header.records:
            count += 1
            yield _summary(payload, offset)
        else:  # the footer; its checksums are the learner's to check
            record.decode_footer(payload)
            return
    raise ShardError(f"truncated: {count} records and no footer")


def _summary(payload: bytes, offset: int) -> Summary:
    found = example.decode_some(payload, _NAMES)
    try:
        task = json.loads(found["task"][0])
        reward, started_unix_s, _ = struct.unpack("<3d", found["reward_started_duration"][0])
        versions = np.frombuffer(found["turns/policy_versions"][0], "<i4").tolist()
        summary = Summary(
            offset=offset,
            size_bytes=len(payload) + framing.FRAME_BYTES,
            episode_id=_text(found, "episode_id"),
            group_id=_text(found, "group_id"),
            actor_id=_text(found, "actor_id"),
            task=str(task["name"])[:_MAX_NAME_CHARS],
            variant=str(task["variant"])[:_MAX_NAME_CHARS],
            seed=int(task["seed"]),
            stop_reason=_text(found, "stop_reason"),
            success=bool(found["success"][0]),
            reward=reward,
            started_unix_s=started_unix_s,
            turns=int(found["turns"][0]),
            lowest_version=min(versions, default=-1),
            highest_version=max(versions, default=-1),
        )
    except _MALFORMED as error:
        raise RecordError(f"the record at byte {offset} is no episode ({error!r})") from None
    if found["kind"] != [b"trajectory"] or summary.stop_reason not in _REASONS:
        raise RecordError(f"the record at byte {offset} is no episode")
    if not (math.isfinite(reward) and math.isfinite(started_unix_s)):
        raise RecordError(f"the record at byte {offset} has a reward or a time that is not finite")
    return summary


_REASONS = frozenset(StopReason)
# What a missing feature, one of another type and a number out of range raise: an infinite seed
# overflows, an id that is a list of integers has no `decode`.
_MALFORMED = (
    *(LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError),
    struct.error,
)


def _text(found: dict[str, list], name: str) -> str:
    return example.decode_text(found[name][0], name)[:_MAX_NAME_CHARS]
