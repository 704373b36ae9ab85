"""What can still be read of a damaged shard: every record whose checksums and contents are whole.

For `tools.inspect_shards`. The learner takes no part of a damaged shard (`queue` moves it to
quarantine/): a person decides. Reads files; writes none.
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import framing, record
from uirl_jax.types import Trajectory

_LENGTH_BYTES = 12  # a frame's length and the crc of it


@dataclasses.dataclass(frozen=True)
class Salvaged:
    """Attributes:
    header: of the shard.
    trajectories: the whole ones, in their order.
    damage: a line for everything that was dropped, with its byte.
    """

    header: record.Header
    trajectories: list[Trajectory]
    damage: list[str]


def salvage(path: Path) -> Salvaged:
    """Reads what is whole.

    Raises: ShardError: the file cannot be read, or its header is damaged: without it nobody knows
      to which run and model the records belong.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from None
    damage: list[str] = []
    frames = _frames(data, damage)
    try:
        header = record.decode_header(next(frames, (0, b""))[1])
    except (ShardError, RecordError) as error:
        raise ShardError(
            f"{path}: its header is damaged, so nothing can be kept: {error}"
        ) from None
    kept: dict[str, Trajectory] = {}
    for offset, payload in frames:
        if _is_footer(payload):
            continue
        try:
            trajectory = record.decode(payload, header.layout)
        except RecordError as error:
            damage.append(f"byte {offset}: {error}")
            continue
        if (trajectory.run_id, trajectory.actor_id) != (header.run_id, header.actor_id):
            damage.append(f"byte {offset}: episode of another run or actor than the header")
        elif trajectory.episode_id in kept:
            damage.append(f"byte {offset}: episode {trajectory.episode_id} is there already")
        else:
            kept[trajectory.episode_id] = trajectory
    if header.records > len(kept) and not damage:
        damage.append(f"the header says {header.records} records, the file has {len(kept)}")
    return Salvaged(header, list(kept.values()), damage)


def _is_footer(payload: bytes) -> bool:
    try:
        record.decode_footer(payload)
    except (ShardError, RecordError):
        return False
    return True


def _frames(data: bytes, damage: list[str]) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of every whole frame; what lies between them goes to `damage`."""
    file, offset = io.BytesIO(data), 0
    while offset < len(data):
        file.seek(offset)
        try:
            payload, _ = framing.read_frame(file, len(data) - offset)
        except ShardError as error:
            after = _next_frame(data, offset + 1)
            damage.append(f"bytes {offset} to {after - 1}: {error}")
            offset = after
            continue
        yield offset, payload
        offset += len(payload) + framing.FRAME_BYTES


def _next_frame(data: bytes, start: int) -> int:
    """Where the next whole frame begins; the file's end, if there is none.

    A length with the right crc is found by chance once in four billion bytes; the payload's crc is
    checked as well.
    """
    for offset in range(start, len(data) - framing.FRAME_BYTES + 1):
        length_crc = int.from_bytes(data[offset + 8 : offset + _LENGTH_BYTES], "little")
        if framing.masked_crc(data[offset : offset + 8]) != length_crc:
            continue
        file = io.BytesIO(data)
        file.seek(offset)
        try:
            framing.read_frame(file, len(data) - offset)
        except ShardError:
            continue
        return offset
    return len(data)
