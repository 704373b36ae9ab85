"""What an OpenEnv server's messages must be. Everything that one says is checked here before use.

A message is JSON text: {"type": "observation" | "state" | "error", "data": {...}}. The screen is in
`observation.screenshot`: base64 of an encoded image (OpenApp, the bundled server), or rows of
pixels of three or four numbers (BrowserGym), about 10 MB for 1280x720. Such rows are cut out
before the JSON is parsed and read as one array, because Python objects for them would be some 30
times as large.

`openenv` sends and receives; this module does neither, and holds nothing.
Source: openenv 0.10.0 (PyPI), core/env_server/types.py, serialization.py, http_server.py.
"""

import base64
import binascii
import dataclasses
import math
import re
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import (
    ImageError,
    InvalidRequestError,
    VerifierError,
    VerifierFullError,
)
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.client.image_header import image_size
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.screenshots import encode_image

_PIXELS = re.compile(rb'"screenshot"\s*:\s*(?=\[)')
_BASE64 = re.compile(rb'"screenshot"\s*:\s*"([^"]*)"')
_DIGITS = b"0123456789"
_MAX_ERROR_CHARS = 300


@dataclasses.dataclass(frozen=True)
class Observation:
    """The answer to a reset or a step."""

    fields: dict[str, Any]  # of the observation, without its picture
    image: bytes  # encoded; empty: it has none
    size_px: tuple[int, int]  # (width, height); (0, 0) without an image
    reward: float  # of this step; 0 where the environment gives none
    done: bool

    @property
    def action_error(self) -> str:
        """Why the environment could not do the last action; empty where it did."""
        told = self.fields.get("last_action_error")
        if not told:
            return ""
        metadata = self.fields.get("metadata")
        inner = metadata.get("browsergym_obs") if isinstance(metadata, dict) else None
        texts = [told, self.fields.get("error")]
        if isinstance(inner, dict):  # BrowserGym's own text, of which OpenEnv makes a boolean
            texts.insert(1, inner.get("last_action_error"))
        text = next((text for text in texts if isinstance(text, str) and text), "it was refused")
        return printable(text, _MAX_ERROR_CHARS)


def max_message_bytes(limits: ClientLimits) -> int:
    """Of one message: an image as base64, or as rows of pixels, and the rest of the JSON."""
    return limits.max_image_bytes * 4 // 3 + limits.max_json_bytes


def read_observation(data: bytes, limits: ClientLimits, where: str) -> Observation:
    """The observation in a message, its screen as an encoded image.

    Args:
      where: for errors.
    Raises:
      VerifierError: the message is none, is too long besides its screenshot, or says that
        something failed (`read_error`).
    """
    data, pixels = _cut_pixels(data, where)
    base64_picture = _BASE64.search(data)
    size_bytes = len(data) - (0 if base64_picture is None else len(base64_picture[1]))
    message = _read_message(data, "observation", limits, where, size_bytes)
    fields, reward, done = message.get("observation"), message.get("reward"), message.get("done")
    if not isinstance(fields, dict):
        raise VerifierError(f"{where}: the answer has no `observation`; is this an OpenEnv server?")
    if not isinstance(done, bool):
        raise VerifierError(f"{where}: done is not a boolean")
    # A boolean is a reward in OpenEnv; so is none.
    if not isinstance(reward, bool | int | float | None):
        raise VerifierError(f"{where}: reward is a {type(reward).__name__}, not a number")
    reward = float(reward or 0.0)
    if not math.isfinite(reward):
        raise VerifierError(f"{where}: reward is not finite")
    picture = fields.pop("screenshot", None)
    try:
        if pixels is not None:
            if picture is not None:
                raise ImageError("it has two screenshots")
            image = encode_pixels(pixels, limits.max_image_pixels)
        else:
            image = _decode(picture, limits.max_image_bytes)
        size_px = image_size(image, max_pixels=limits.max_image_pixels) if image else (0, 0)
    except ImageError as error:
        raise VerifierError(f"{where}: the screenshot: {error}") from error
    return Observation(fields, image, size_px, reward, done)


def read_state(data: bytes, limits: ClientLimits, where: str) -> dict[str, Any]:
    """The state in a message. Arguments and errors as of `read_observation`."""
    return _read_message(data, "state", limits, where, len(data))


def _read_message(
    data: bytes, kind: str, limits: ClientLimits, where: str, size_bytes: int
) -> dict[str, Any]:
    """The `data` of a message; size_bytes: of the message without its screenshot."""
    if size_bytes > limits.max_json_bytes:  # parsed, it would be many times as large
        raise VerifierError(
            f"{where}: an answer of {size_bytes} bytes without its screenshot, at most "
            f"{limits.max_json_bytes} are accepted (verifier.limits.max_json_bytes)"
        )
    try:
        message = untrusted_json.parse(data)
    except ValueError as error:
        raise VerifierError(f"{where}: the answer {error}") from error
    content = message.get("data")
    if not isinstance(content, dict):
        raise VerifierError(f"{where}: the answer has no `data`; is this an OpenEnv server?")
    if message.get("type") == "error":
        raise read_error(content, where)
    if message.get("type") != kind:
        shown = printable(str(message.get("type")))
        raise VerifierError(f"{where}: a message of type {shown!r}, expected {kind!r}")
    return content


def read_error(content: dict[str, Any], where: str) -> VerifierError:
    """The error that an error message stands for.

    Returns:
      VerifierFullError: there are as many sessions as fit.
      InvalidRequestError: nothing was done, and the same would be refused again.
      VerifierError: something failed in the environment.
    """
    code = content.get("code")
    text = printable(str(content.get("message", "")), _MAX_ERROR_CHARS)
    if isinstance(errors := content.get("errors"), list) and errors:
        text += f" ({printable(str(errors[0]), _MAX_ERROR_CHARS)})"
    shown = f"{where}: {printable(str(code), 40)}: {text or 'no reason given'}"
    if code == "CAPACITY_REACHED":
        most = content.get("max_sessions")
        fits = most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else 0
        return VerifierFullError(shown, fits)
    if code in ("VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE"):
        return InvalidRequestError(shown)
    return VerifierError(shown)


# ------------------------------------------------------------------------------- the picture


def _decode(picture: object, max_bytes: int) -> bytes:
    """Base64 of an encoded image, perhaps as a data URL; empty where there is none."""
    if picture is None or picture == "":
        return b""
    if not isinstance(picture, str):
        raise ImageError(f"it is a {type(picture).__name__}, expected base64 or rows of pixels")
    if picture.startswith("data:"):
        picture = picture.partition(",")[2]
    if len(picture) > 4 * (max_bytes // 3 + 1):
        raise ImageError(f"it has more than {max_bytes} bytes (verifier.limits.max_image_bytes)")
    try:
        return base64.b64decode(picture, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError("it is not base64") from error


def _cut_pixels(data: bytes, where: str) -> tuple[bytes, bytes | None]:
    """The message with null in the place of rows of pixels, and these rows."""
    found = _PIXELS.search(data)
    if found is None:
        return data, None
    end = data.find(b"]]]", found.end())
    if end < 0:
        raise VerifierError(f"{where}: the screenshot: it is a list, but not one of rows of pixels")
    end += 3
    return data[: found.end()] + b"null" + data[end:], data[found.end() : end]


def encode_pixels(rows: bytes, max_pixels: int) -> bytes:
    """A PNG of pixels that came as JSON.

    Args:
      rows: JSON text of a list of rows of pixels, each [r, g, b] or [r, g, b, a] of 0-255; alpha is
        dropped. Separators as json.dumps and pydantic write them: "," or ", ".
      max_pixels: that it may have.
    Raises:
      ImageError: it is something else.
    """
    compact = rows.replace(b", ", b",")
    frame = compact.translate(None, _DIGITS)  # of [[[1,2,3],[4,5,6]]]: [[[,,],[,,]]]
    pixel = frame[2 : frame.find(b"]") + 1]
    if pixel not in (b"[,,]", b"[,,,]"):
        raise ImageError("a pixel is not a list of three or four whole numbers")
    row_length = frame.find(b"]]") + 1  # with its brackets, from 1 on
    width_px = row_length // (len(pixel) + 1)
    row = b"[" + b",".join([pixel] * width_px) + b"]"
    height_px = (len(frame) - 1) // (len(row) + 1)
    if width_px * height_px > max_pixels:
        raise ImageError(f"{width_px}x{height_px} pixels, at most {max_pixels} are accepted")
    if frame != b"[" + b",".join([row] * height_px) + b"]":
        raise ImageError("its rows differ in length, or hold something else than whole numbers")
    text = np.frombuffer(b"," + compact.translate(None, b"[]") + b",", np.uint8)
    ends = np.flatnonzero(text == ord(","))
    ends, lengths = ends[1:], np.diff(ends) - 1
    if lengths.min() < 1 or lengths.max() > 3:
        raise ImageError("a value of a pixel is not one of 0-255")
    # A comma becomes 65532, and is not looked at. Of 16 bits, or 300 would become 44.
    digits = text.astype(np.uint16) - np.uint16(ord("0"))
    values = digits[ends - 1]
    for place, weight in ((2, 10), (3, 100)):
        values += np.where(lengths >= place, digits[np.maximum(ends - place, 0)], 0) * weight
    if values.max() > 255:
        raise ImageError("a value of a pixel is not one of 0-255")
    pixels_hwc = values.astype(np.uint8).reshape(height_px, width_px, -1)
    return encode_image(Image.fromarray(pixels_hwc[:, :, :3]), "png")
