"""The contents of the emulated buckets: generations, preconditions, listings, unfinished uploads.

Knows nothing of HTTP: it raises `Refused` with the status that the service answers.
"""

import base64
import bisect
import dataclasses
import functools
import hashlib
import re
import time
import uuid

import google_crc32c

MAX_PAGE = 1000
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
MIN_OVERWRITE_S = 1.0  # about one write a second and name, says the service


class Refused(Exception):
    """A request that the service refuses."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


@dataclasses.dataclass(frozen=True)
class Stored:
    """One object in one generation."""

    name: str
    content: bytes
    generation: int
    written_unix_s: float
    content_type: str = "application/octet-stream"
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def md5(self) -> bytes:
        return hashlib.md5(self.content, usedforsecurity=False).digest()

    @property
    def etag(self) -> str:
        return f'"{self.md5.hex()}"'

    @functools.cached_property
    def crc32c_base64(self) -> str:
        return base64.b64encode(google_crc32c.value(self.content).to_bytes(4, "big")).decode()


@dataclasses.dataclass(frozen=True)
class Condition:
    """Preconditions of a request; None: not given."""

    generation: int | None = None  # 0: the object must not exist
    not_generation: int | None = None
    etag: str | None = None  # S3's If-Match; "*": any
    not_etag: str | None = None  # If-None-Match

    def __bool__(self) -> bool:
        return self != Condition()

    def check(self, found: Stored | None, *, reads: bool) -> None:
        """Raises: Refused: 412; for a read that would repeat what the client has 304."""
        generation = found.generation if found else 0
        if self.generation is not None and self.generation != generation:
            raise Refused(412, "PreconditionFailed", f"generation is {generation}")
        if self.etag is not None and (found is None or self.etag not in ("*", found.etag)):
            raise Refused(412, "PreconditionFailed", "ETag differs")
        same = self.not_generation is not None and self.not_generation == generation
        same |= bool(found) and self.not_etag in ("*", found.etag if found else "")
        if same:
            raise Refused(304 if reads else 412, "PreconditionFailed", "is unchanged or exists")


@dataclasses.dataclass
class Upload:
    """A resumable or multipart upload.

    Attributes:
        written: what it became; a resumable one answers with it to a client that missed the answer.
    """

    bucket: str
    name: str
    condition: Condition
    content_type: str
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    received: bytearray = dataclasses.field(default_factory=bytearray)
    parts: dict[int, bytes] = dataclasses.field(default_factory=dict)
    written: Stored | None = None


@dataclasses.dataclass(frozen=True)
class Page:
    found: list[Stored]
    prefixes: list[str]
    next_token: str  # name after which the next page starts; empty: the last page


class Buckets:
    """Args:
    names: of the buckets that exist.
    denied: of the buckets that answer 403.
    refuse_fast_writes: answer 429 to a second write of a name within a second, as the service
        may; otherwise it is only counted in `overwritten_too_fast`.
    """

    def __init__(
        self, names: list[str], denied: list[str] = (), refuse_fast_writes: bool = False
    ) -> None:
        self._objects: dict[str, dict[str, Stored]] = {}
        self._sorted: dict[str, list[str]] = {}
        self._denied = frozenset(denied)
        self._generation = time.time_ns() // 1000
        self._refuse_fast_writes = refuse_fast_writes
        self.uploads: dict[str, Upload] = {}
        self.overwritten_too_fast = 0
        self.fastest_names: dict[str, int] = {}
        for name in [*names, *denied]:
            self.create(name)

    def create(self, bucket: str) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise Refused(400, "InvalidBucketName", f"Invalid bucket name: '{bucket}'")
        if bucket in self._objects:
            raise Refused(409, "BucketAlreadyOwnedByYou")
        self._objects[bucket], self._sorted[bucket] = {}, []

    def contents(self, bucket: str) -> dict[str, Stored]:
        """Raises: Refused: the bucket has an invalid name, does not exist, or is forbidden."""
        if not _BUCKET.fullmatch(bucket):
            raise Refused(400, "InvalidBucketName", f"Invalid bucket name: '{bucket}'")
        if bucket in self._denied:
            raise Refused(403, "AccessDenied", "caller lacks storage.objects permissions")
        if bucket not in self._objects:
            raise Refused(404, "NoSuchBucket", "The specified bucket does not exist.")
        return self._objects[bucket]

    def read(self, bucket: str, name: str, condition: Condition) -> Stored:
        found = self.contents(bucket).get(name)
        if found is None:
            raise Refused(404, "NoSuchKey", f"No such object: {bucket}/{name}")
        condition.check(found, reads=True)
        return found

    def check_writable(self, bucket: str, name: str, condition: Condition) -> Stored | None:
        objects = self.contents(bucket)
        if not 1 <= len(name.encode()) <= 1024 or set("\r\n\0") & set(name) or name in (".", ".."):
            raise Refused(400, "InvalidArgument", f"invalid object name {name[:80]!r}")
        found = objects.get(name)
        condition.check(found, reads=False)
        return found

    def write(
        self,
        bucket: str,
        name: str,
        content: bytes,
        condition: Condition,
        content_type: str = "application/octet-stream",
        metadata: dict[str, str] | None = None,
    ) -> Stored:
        found = self.check_writable(bucket, name, condition)
        now_s = time.time()
        if found and now_s - found.written_unix_s < MIN_OVERWRITE_S:
            self.overwritten_too_fast += 1
            self.fastest_names[name] = self.fastest_names.get(name, 0) + 1
            if self._refuse_fast_writes:
                raise Refused(429, "SlowDown", f"{name} is changed more than once a second")
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        stored = Stored(name, content, self._generation, now_s, content_type, metadata or {})
        if found is None:
            bisect.insort(self._sorted[bucket], name)
        self._objects[bucket][name] = stored
        return stored

    def delete(self, bucket: str, name: str, condition: Condition) -> None:
        found = self.contents(bucket).get(name)
        if found is None:
            raise Refused(404, "NoSuchKey", f"No such object: {bucket}/{name}")
        condition.check(found, reads=False)
        del self._objects[bucket][name]
        names = self._sorted[bucket]
        del names[bisect.bisect_left(names, name)]

    def page(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        start: str = "",
        end: str = "",
        limit: int = MAX_PAGE,
    ) -> Page:
        """One page of a listing.

        Args:
            after: names up to and including it, and prefixes up to it, are left out.
            start: the first name that may be listed.
            end: the first name that may not be listed; empty: none.
        """
        objects, names = self.contents(bucket), self._sorted[bucket]
        found: list[Stored] = []
        prefixes: list[str] = []
        at = max(bisect.bisect_left(names, max(prefix, start)), bisect.bisect_right(names, after))
        last = ""
        while at < len(names) and names[at].startswith(prefix) and (not end or names[at] < end):
            name = names[at]
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            shared = name[: cut + len(delimiter)] if cut >= 0 else ""
            if shared and shared == after:  # was on the page before
                at = bisect.bisect_left(names, shared + "\U0010ffff")
                continue
            if len(found) + len(prefixes) >= min(limit, MAX_PAGE):
                return Page(found, prefixes, last)
            if shared:
                prefixes.append(shared)
                at = bisect.bisect_left(names, shared + "\U0010ffff")
            else:
                found.append(objects[name])
                at += 1
            last = shared or name
        return Page(found, prefixes, "")

    def begin(self, upload: Upload) -> str:
        self.check_writable(upload.bucket, upload.name, upload.condition)
        key = uuid.uuid4().hex
        self.uploads[key] = upload
        return key

    def upload(self, key: str) -> Upload:
        if key not in self.uploads:
            raise Refused(404, "NoSuchUpload", "no such upload, or it is complete")
        return self.uploads[key]
