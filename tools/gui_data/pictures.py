"""Pictures of a set: found by name inside its folder, decoded once, shrunk where that is asked."""

import collections
import hashlib
import io
import stat
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from uirl_jax.errors import RecordError
from uirl_jax.families.screens import decode_image
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.checks import MAX_IMAGE_BYTES, MAX_PIXELS
from uirl_jax.verifiers.recorded.row import Step

_REMEMBERED = 512  # pictures that were decoded
_FILES = 4  # pictures whose bytes are kept: sets ask ten questions of a screen, one after the other
_COMPRESS_LEVEL = 3  # of a PNG: half the time of 6, a tenth more bytes on screens


_looked_at: collections.OrderedDict[bytes, tuple[tuple[int, int], bytes]]
_looked_at = collections.OrderedDict()  # hash of the encoded bytes -> size, digest of the pixels


class Picture(NamedTuple):
    """An encoded picture whose pixels can be decoded."""

    data: bytes
    size: tuple[int, int]
    digest: bytes  # of the pixels: equal for pictures that look alike


class Pictures:
    """The pictures in some folders.

    Args: roots: searched in this order.
    """

    def __init__(self, roots: tuple[Path, ...] = ()) -> None:
        self._roots = tuple(root.resolve() for root in roots)
        self._files: collections.OrderedDict[Path, bytes] = collections.OrderedDict()

    def find(self, name: object) -> Picture:
        """The picture of a name as the set writes it. Raises RecordError, ImageError."""
        if not isinstance(name, str) or not name or "\0" in name:
            raise RecordError(f"{printable(repr(name))} is no name of a picture")
        if len(name) > 1000:
            raise RecordError(f"a name of {len(name)} characters for a picture")
        for root in self._roots:
            try:
                path = (root / name).resolve()
                is_there = path.exists()
            except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle
                reason = getattr(error, "strerror", None) or type(error).__name__
                raise RecordError(f"picture {printable(name)!r}: {reason}") from None
            if not path.is_relative_to(root):
                hint = ""
                if path.parent.name == "blobs":  # a link of Hugging Face's cache
                    hint = "; download the set with `hf download --local-dir`, not into the cache"
                raise RecordError(f"picture {printable(name)!r} lies outside of {root}{hint}")
            if is_there:
                return look(self._read(path))
        where = " or ".join(map(str, self._roots))
        raise RecordError(f"picture {printable(name)!r} is not in {where}")

    def _read(self, path: Path) -> bytes:
        if path not in self._files:
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    raise RecordError(f"{path} is not a file")
                if status.st_size > MAX_IMAGE_BYTES:
                    raise RecordError(f"{path}: {status.st_size} bytes, at most {MAX_IMAGE_BYTES}")
                self._files[path] = path.read_bytes()
            except OSError as error:
                raise RecordError(f"{path}: {error.strerror}") from None
            if len(self._files) > _FILES:
                self._files.popitem(last=False)
        return self._files[path]


def look(data: object) -> Picture:
    """The picture in some bytes: decoded whole, once. Raises RecordError, ImageError."""
    if not isinstance(data, bytes):
        raise RecordError(f"a picture that is a {type(data).__name__}, expected bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise RecordError(f"a picture of {len(data)} bytes, at most {MAX_IMAGE_BYTES}")
    key = hashlib.blake2b(data, digest_size=16).digest()
    if key not in _looked_at:
        image = decode_image(data, max_pixels=MAX_PIXELS)
        digest = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
        digest.update(image.tobytes())
        _looked_at[key] = image.size, digest.digest()
        if len(_looked_at) > _REMEMBERED:
            _looked_at.popitem(last=False)
    return Picture(data, *_looked_at[key])


def encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=_COMPRESS_LEVEL)
    return file.getvalue()


def shrink(step: Step, longest_px: int) -> Step:
    """The step on a picture whose longer side has at most so many pixels, as PNG."""
    old = (step.width_px, step.height_px)
    if max(old) <= longest_px:
        return step
    width, height = (max(1, round(side * longest_px / max(old))) for side in old)
    new = (width, height)
    image = decode_image(step.image, max_pixels=MAX_PIXELS)
    return step.resized(new, encode_png(image.resize(new, Image.Resampling.LANCZOS)))
