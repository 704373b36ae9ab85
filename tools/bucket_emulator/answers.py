"""What the two APIs share: a request after routing, an answer before faults, byte ranges."""

import dataclasses
import re
import time
from collections.abc import Mapping

from tools.bucket_emulator.objects import Condition, Refused, Stored

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclasses.dataclass(frozen=True)
class Call:
    """A request with its body read."""

    method: str
    host: str
    path: str  # still percent-encoded
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a request is, for its price and its faults.

    Attributes:
        name: "put", "list", "get", ...
        price: "A", "B" or "free".
    """

    name: str
    price: str
    conditional: bool = False

    @property
    def writes(self) -> bool:
        return self.name in ("put", "copy", "delete", "upload_part", "upload_end", "batch")

    @property
    def reads(self) -> bool:
        return self.name == "get"


def whole_number(text: str, name: str) -> int:
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise Refused(400, "InvalidArgument", f"{name} is {text[:40]!r}, expected a whole number")
    return int(text)


def generation_of(text: str | None, name: str) -> int | None:
    return None if text is None else whole_number(text, name)


def content(found: Stored, headers: Mapping[str, str], extra: Mapping[str, str]) -> Answer:
    """The content or the asked range of it. Raises: Refused: 416."""
    size = len(found.content)
    match = _RANGE.fullmatch(headers.get("Range", ""))
    if not match or not any(match.groups()):
        return Answer(200, found.content, extra)
    first, last = match.groups()
    if first:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, stop = max(size - int(last), 0), size
    if start >= size or start >= stop:
        raise Refused(416, "InvalidRange", f"bytes */{size}")
    return Answer(
        206,
        found.content[start:stop],
        {**extra, "Content-Range": f"bytes {start}-{stop - 1}/{size}"},
    )


def http_date(unix_s: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(unix_s))


def rfc3339(unix_s: float) -> str:
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{text}.{int(unix_s % 1 * 1000):03d}Z"


__all__ = ["Answer", "Call", "Condition", "Operation", "content"]
