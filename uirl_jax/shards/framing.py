"""TFRecord framing: payloads in a file, each with checksums of its length and its bytes.

Used by `writer` and `reader`; payloads are opaque here. Size limits are checked before memory is
allocated. A file that is cut exactly between two frames is valid here; `reader` detects it.
"""

import gzip
import io
import struct
from collections.abc import Iterator, Sequence

import google_crc32c

from uirl_jax.errors import ShardError

MAX_RECORD_BYTES = 64 * 2**20
MAX_SHARD_BYTES = 2**30
FRAME_BYTES = 16  # overhead per payload


def masked_crc(data: bytes) -> int:
    """crc32c, rotated and offset as in TFRecord. Source: tensorflow/core/lib/hash/crc32c.h."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """A frame: uint64 length, its masked crc, the payload, its masked crc; little-endian."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc(length)),
            payload,
            struct.pack("<I", masked_crc(payload)),
        )
    )


def read_frame(
    file: io.BufferedIOBase, left_bytes: int, max_bytes: int = MAX_RECORD_BYTES
) -> tuple[bytes, int]:
    """The payload at the file's position, and its masked crc.

    Args:
      left_bytes: the rest of the file; a longer length, or one above the limit, is refused before
        memory is allocated.
      max_bytes: that limit; our own records are never longer than MAX_RECORD_BYTES.
    Raises: ShardError: a damaged or truncated frame.
    """
    head = file.read(12) if left_bytes >= 12 else b""
    if len(head) < 12:
        left_bytes = len(head) or left_bytes
        raise ShardError(f"truncated: {left_bytes} bytes left, a record needs {FRAME_BYTES}")
    length, length_crc = struct.unpack("<QI", head)
    if masked_crc(head[:8]) != length_crc:
        raise ShardError("the crc of a record's length does not match")
    if length > max_bytes:
        raise ShardError(f"record of {length} bytes, at most {max_bytes} are allowed")
    if length > left_bytes - FRAME_BYTES:
        raise ShardError(f"truncated: record of {length} bytes, the file has {left_bytes} left")
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise ShardError(f"truncated: record of {length} bytes, got {len(data)}")
    payload, (crc,) = data[:length], struct.unpack("<I", data[length:])
    if masked_crc(payload) != crc:
        raise ShardError("the crc of a record does not match")
    return payload, crc


def iterate_frames(file: io.BufferedIOBase, size_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """(offset, payload, masked crc) of every frame from the file's start to size_bytes."""
    offset = 0
    while offset < size_bytes:
        payload, crc = read_frame(file, size_bytes - offset)
        yield offset, payload, crc
        offset += len(payload) + FRAME_BYTES


def stream_frames(file: io.BufferedReader | gzip.GzipFile, max_bytes: int) -> Iterator[bytes]:
    """The payloads of a file of others whose length is not known, because it is compressed.

    Args: max_bytes: of one payload; no more than that is ever in memory.
    Raises: ShardError: a damaged or truncated frame. What the decompression raises.
    """
    while file.peek(1):
        yield read_frame(file, max_bytes + FRAME_BYTES, max_bytes)[0]


def crc_of_crcs(crcs: Sequence[int]) -> int:
    return google_crc32c.value(struct.pack(f"<{len(crcs)}I", *crcs))
