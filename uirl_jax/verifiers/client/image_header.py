"""Reads the kind and size of an encoded screenshot without decoding it.

The client checks every image that a verifier sends with it, on the event loop. Whether the pixels
are valid shows later, when an engine decodes them. Pillow is not used: opening a file with it
inflates text chunks and allocates canvases.
"""

import struct
import zlib

from uirl_jax.errors import ImageError
from uirl_jax.untrusted.images import MAX_JPEG_SCANS, has_too_many_scans

_PNG = b"\x89PNG\r\n\x1a\n"
_IHDR_BYTES = 13
_MAX_PARTS = 10_000  # chunks or segments: empty ones by the million hold up every episode
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # SOF0-15; not DHT, JPG, DAC
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM, RST0-7


def image_size(data: bytes, *, max_pixels: int) -> tuple[int, int]:
    """(width_px, height_px) of a whole, still PNG, JPEG or WEBP, by its header.

    Args:
      data: a PNG's chunks are walked to its end and their checksums compared (0.1 ms for 100 kB);
        of a JPEG and a WEBP the end must be there.
      max_pixels: that it may have.

    Raises:
      ImageError: it is none, cut, damaged, animated or too large. What is compressed in it was
        not looked at.
    """
    try:
        if data.startswith(_PNG):
            width_px, height_px = _png_size(data)
        elif data.startswith(b"\xff\xd8\xff"):
            width_px, height_px = _jpeg_size(data)
        elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            width_px, height_px = _webp_size(data)
        else:
            raise ImageError("it begins like none of them")
        if not (width_px and height_px):
            raise ImageError(f"it has {width_px}x{height_px} pixels")
    except (ImageError, struct.error, IndexError) as error:
        reason = error if isinstance(error, ImageError) else "it ends too early"
        raise ImageError(
            f"{len(data)} bytes are not a readable PNG, JPEG or WEBP image ({reason})"
        ) from error
    if width_px * height_px > max_pixels:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels, expected at most {max_pixels} pixels"
        )
    return width_px, height_px


def _png_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    has_pixels = False
    view, place = memoryview(data), len(_PNG)
    for _ in range(_MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        (crc,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(view[place + 4 : place + 8 + length]) != crc:
            raise ImageError("a chunk's checksum is wrong")
        if (kind == b"IHDR") != (size is None):
            raise ImageError("its header is not its first chunk, or not its only one")
        if kind == b"IHDR":
            if length != _IHDR_BYTES:
                raise ImageError(f"a header of {length} bytes, expected {_IHDR_BYTES}")
            size = struct.unpack_from(">II", data, place + 8)
        elif kind == b"acTL":
            raise ImageError("it is an animation, expected a still image")
        elif kind == b"IDAT":
            has_pixels = True
        elif kind == b"IEND":
            if not has_pixels:
                raise ImageError("it holds no pixels")
            assert size is not None  # the first chunk was a header
            return size
        place += 12 + length
    raise ImageError(f"it has more than {_MAX_PARTS} chunks")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    place = 2
    for _ in range(_MAX_PARTS):
        if data[place] != 0xFF:
            raise ImageError("there is no marker where one belongs")
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in _JPEG_BARE:
            place += 2
            continue
        if marker == 0xDA:  # what follows is compressed
            break
        (length,) = struct.unpack_from(">H", data, place + 2)
        if length < 2:
            raise ImageError("a segment is shorter than its own length")
        if marker in _JPEG_FRAMES:
            if size is not None:
                raise ImageError("it has two frames, expected a still image")
            height_px, width_px = struct.unpack_from(">HH", data, place + 5)
            size = width_px, height_px
        place += 2 + length
    else:
        raise ImageError(f"it has more than {_MAX_PARTS} segments before its pixels")
    if size is None or data.find(b"\xff\xd9", place) < 0:
        raise ImageError("it has no frame, or no end")
    if has_too_many_scans(data):
        raise ImageError(f"it has more than {MAX_JPEG_SCANS} scans")
    return size


def _webp_size(data: bytes) -> tuple[int, int]:
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if riff_bytes + 8 > len(data):
        raise ImageError("it ends too early")
    kind = data[12:16]
    if kind == b"VP8X":
        if data[20] & 0x02:
            raise ImageError("it is an animation, expected a still image")
        width_px = 1 + int.from_bytes(data[24:27], "little")
        height_px = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise ImageError("its frame does not begin as a key frame")
        width_px, height_px = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width_px, height_px = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        raise ImageError("its first chunk is not a picture")
    return width_px, height_px
