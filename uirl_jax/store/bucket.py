"""A store in a bucket: gs://bucket/prefix or s3://bucket/prefix, through obstore.

Nothing is renamed: a content is put whole under its final name, by one request or by an upload in
parts that appears when it is complete. Credentials are the platform's own (a service account of the
machine, application default credentials); obstore finds them, and this module neither reads nor
prints one. STORAGE_EMULATOR_HOST names another address of Google's API, for tests.

Trap: an answer may be lost after the write. The retry of a conditional write then reports a
conflict with our own write. Every conditional write therefore carries a nonce in the object's
metadata, and a conflict is read back and compared.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, S3Store

from uirl_jax.errors import one_line
from uirl_jax.store import files
from uirl_jax.store.counted_lease import CountedLease, LeaseTimes, Sightings
from uirl_jax.store.interface import StoreUnavailableError, checked_name

T = TypeVar("T")
SCHEMES = ("gs://", "s3://")
# Listings and reads are paid for. With two listings and one read per look, an actor costs 0.007 $
# an hour at 5 s, and a learner, with one listing, 0.004 $ (docs/buckets.md).
POLL_S = 5.0
BLOCK_BYTES = 4 << 20  # of a content that is read in parts
PART_BYTES = 16 << 20  # of an upload in parts
READS_AT_ONCE = 64  # 200 shards of one step at 40 ms each: 0.2 s instead of 8
LEASES = "leases"
TIMES = LeaseTimes()
_NONCE = "nonce"
_MARK = "mark"
_ATTEMPTS = 6  # of a conditional write whose outcome is not known
_BROKEN_OFF = "body error"  # in the message of a request or an answer that ended early
_FINAL = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)  # repeating helps nothing
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


class BucketStore:
    """See `interface.Store`.

    Args:
        address: "gs://bucket/prefix" or "s3://bucket/prefix"; the prefix may be missing.
        poll_s: least seconds between two looks; None: POLL_S.
        request_s: limit of one request; of a whole call with its retries about three times that.
        times: of leases; for tests.

    Raises: OSError: the address is not valid.
    """

    reads_at_once = READS_AT_ONCE

    def __init__(
        self,
        address: str,
        *,
        poll_s: float | None = None,
        request_s: float = 30.0,
        times: LeaseTimes = TIMES,
    ) -> None:
        self._address = address.rstrip("/")
        self._scheme, bucket, self._root = _split(self._address)
        self.poll_s = POLL_S if poll_s is None else poll_s
        self._times = times
        self._client = _connect(self._scheme, bucket, request_s, retry_s=2 * request_s)
        self._quick = _connect(self._scheme, bucket, times.request_s, retry_s=times.request_s)
        self._held: dict[str, CountedLease] = {}
        self._sightings = Sightings(times, lambda: self.versions(LEASES))

    def location(self, name: str = "") -> str:
        return f"{self._address}/{name}" if name else self._address

    # ------------------------------------------------------------------------ whole contents

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        whole = content if isinstance(content, bytes) else b"".join(content)
        key = self._key(name)
        with self._errors(name):
            # In one request if possible: every part of an upload is paid for.
            obstore.put(
                self._client,
                key,
                whole,
                use_multipart=len(whole) > 2 * PART_BYTES,
                chunk_size=PART_BYTES,
            )

    def put_new(self, name: str, content: bytes) -> bool:
        return bool(self.put_version(name, content, ""))

    def put_version(
        self, name: str, content: bytes, version: str, *, is_urgent: bool = False
    ) -> str:
        """See the interface. Args: is_urgent: with the short time-outs of a lease."""
        key, client = self._key(name), self._quick if is_urgent else self._client
        nonce, attempts = uuid.uuid4().hex, 2 if is_urgent else _ATTEMPTS
        unknown: Exception | None = None
        with self._errors(name):
            for _ in range(attempts):
                try:
                    result = obstore.put(
                        client,
                        key,
                        content,
                        mode=_mode(version),
                        attributes={_NONCE: nonce},
                        use_multipart=False,
                    )
                    return _version(result)
                except (AlreadyExistsError, PreconditionError) as error:
                    unknown = error
                except _FINAL:
                    raise
                except BaseError as error:  # written or not
                    unknown = error
                # A conflict, or the answer of our own write was lost: see above.
                try:
                    found = obstore.get(client, key)
                except FileNotFoundError:
                    if version:
                        return ""  # it was deleted
                    continue  # nobody has written: a false conflict, or the request was lost
                except _FINAL:
                    raise
                except BaseError:
                    continue
                if found.attributes.get(_NONCE) == nonce:
                    return _version(found.meta)
                if _version(found.meta) != version:
                    return ""
        assert unknown is not None
        raise StoreUnavailableError(errno.EIO, _one_line(str(unknown)), self.location(name))

    def read(self, name: str) -> bytes:
        content, _ = self._read(name, self._client)
        return content

    def read_version(self, name: str, *, is_urgent: bool = False) -> tuple[bytes, str]:
        """See the interface. Args: is_urgent: with the short time-outs of a lease."""
        try:
            return self._read(name, self._quick if is_urgent else self._client)
        except FileNotFoundError:
            return b"", ""

    def _read(self, name: str, client: Any) -> tuple[bytes, str]:
        with self._errors(name):
            content, meta = _get(client, self._key(name), most_bytes=2 * PART_BYTES)
        if content is not None:
            return content, _version(meta)
        with self.open(name) as file:  # longer than one request may take
            return file.read(), _version(meta)

    def open(self, name: str) -> io.BufferedIOBase:
        key = self._key(name)
        with self._errors(name):
            content, meta = _get(self._client, key, most_bytes=BLOCK_BYTES)
        if content is not None:  # one request, as most files are small
            return io.BytesIO(content)

        def read_range(start: int, stop: int) -> bytes:
            options: Any = {"range": (start, stop), "if_match": meta["e_tag"]}
            with self._errors(name):
                try:
                    return _get(self._client, key, options)[0] or b""
                except PreconditionError:
                    raise OSError(
                        errno.ESTALE, "was replaced while it was read", self.location(name)
                    ) from None

        return io.BufferedReader(_Ranges(read_range, meta["size"]), BLOCK_BYTES)

    # ------------------------------------------------------------------------ names

    def names(self, prefix: str) -> list[str]:
        return [name for name, _ in self._listed(prefix)]

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: meta["size"] for name, meta in self._listed(prefix)}

    def move(self, name: str, target: str) -> None:
        source, key = self._key(name), self._key(target)
        with self._errors(name):
            obstore.copy(self._client, source, key)
        self.delete(name)

    def delete(self, *names: str) -> None:
        keys = [self._key(name) for name in names]
        if not keys:
            return
        with self._errors(names[0]):
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._client, keys)  # several at a time
                return
            # One was missing, or the answer of its deletion was lost: the others may be left.
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._client, key)

    def remove_unfinished(self, prefix: str) -> None:
        """Nothing to do: an unfinished upload has no name; a lifecycle rule removes it."""
        self._key(prefix)

    def _listed(self, prefix: str) -> list[tuple[str, Any]]:
        """Sorted (name, what the bucket says of it) below a prefix."""
        root = f"{self._root}/" if self._root else ""
        with self._errors(prefix):
            # S3 Express and others do not sort; Google and S3 do, and so does `sorted`.
            found = _unbroken(
                lambda: [
                    (meta["path"].removeprefix(root), meta)
                    for page in obstore.list(self._client, self._key(prefix))
                    for meta in page
                ]
            )
        return sorted((one for one in found if "/." not in one[0]), key=lambda one: one[0])

    def versions(self, prefix: str) -> dict[str, str]:
        """Version by name of everything below a prefix, by one listing."""
        return {name: _version(meta) for name, meta in self._listed(prefix)}

    # ------------------------------------------------------------------------ whole files

    def upload(self, path: Path, name: str, mark: str) -> str:
        """`put` of a local file of any size. Returns: its version.

        Args: mark: what `mark` shall say of this content.
        """
        size_bytes = path.stat().st_size
        with self._errors(name):
            result = obstore.put(
                self._client,
                self._key(name),
                path if size_bytes > 2 * PART_BYTES else path.read_bytes(),
                attributes={_MARK: mark},
                use_multipart=size_bytes > 2 * PART_BYTES,
                chunk_size=PART_BYTES,
            )
        return _version(result)

    def mark(self, name: str) -> str:
        """The mark of a content's `upload`; empty: it has none, or does not exist."""
        options: Any = {"head": True}
        with self._errors(name):
            try:
                found = obstore.get(self._client, self._key(name), options=options)
            except FileNotFoundError:
                return ""
        return found.attributes.get(_MARK, "")

    def download(self, name: str, path: Path) -> None:
        """Writes a content of any size into a local file, atomically."""
        with self.open(name) as content, files.replacing(path) as (file,):
            shutil.copyfileobj(content, file, BLOCK_BYTES)

    # ------------------------------------------------------------------------ leases

    def claim(self, name: str, holder: str) -> CountedLease:
        """May wait for a minute: the last holder may have been killed; see `counted_lease`."""
        lease = CountedLease.take(self, f"{LEASES}/{checked_name(name)}", holder, self._times)
        self._held[name] = lease
        return lease

    def is_claimed(self, name: str) -> bool:
        return self._sightings.is_claimed(f"{LEASES}/{checked_name(name)}")

    def fence(self, name: str) -> int:
        lease = self._held.get(name)
        if lease is None:
            return 0
        lease.check()
        return lease.generation

    # ------------------------------------------------------------------------ errors

    def _key(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}" if self._root else checked_name(name)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """obstore's errors as the interface's."""
        where = self.location(name)
        try:
            yield
        except (FileNotFoundError, BaseError, ValueError) as error:
            raise _converted(error, where) from None


def _converted(error: Exception, where: str) -> OSError:
    """A listing's errors are all of one class: the status is in the text alone."""
    text = str(error)
    bucket = where.split("/")[2]
    if "NoSuchBucket" in text or "specified bucket does not exist" in text:
        advice = f"the bucket {bucket} does not exist; create it, or correct --workdir"
        return OSError(errno.ENXIO, advice, where)
    if "InvalidBucketName" in text:
        return OSError(errno.EINVAL, f"{bucket} is not a valid bucket name", where)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    if isinstance(error, PermissionDeniedError) or "status code: 403" in text:
        advice = (
            "permission denied; give this process's account the role roles/storage.objectUser on "
            f"the bucket {bucket} (s3: to get, put, list and delete objects)"
        )
        return PermissionError(errno.EACCES, advice, where)
    if isinstance(error, UnauthenticatedError) or "status code: 401" in text:
        advice = (
            "no valid credentials; run `gcloud auth application-default login`, or give this "
            "machine a service account"
        )
        return PermissionError(errno.EACCES, advice, where)
    return StoreUnavailableError(errno.EIO, _one_line(text), where)


class _Ranges(io.RawIOBase):
    """A content that is read by ranges."""

    def __init__(self, read_range: Any, size: int) -> None:
        self._read_range, self._size, self._at = read_range, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, "seek to before the start")
        self._at = start + offset
        return self._at

    def readall(self) -> bytes:
        """In large ranges: io's own would ask for some kilobytes at a time."""
        starts = range(self._at, self._size, PART_BYTES)
        parts = [self._read_range(at, min(at + PART_BYTES, self._size)) for at in starts]
        self._at = max(self._at, self._size)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._size)
        if stop <= self._at:
            return 0
        content = self._read_range(self._at, stop)
        view[: len(content)] = content
        self._at += len(content)
        return len(content)


def check_address(address: str) -> None:
    """Raises: OSError: it is not the address of a bucket."""
    _split(address.rstrip("/"))


def is_address(workdir: str) -> bool:
    return workdir.startswith(SCHEMES)


def _split(address: str) -> tuple[str, str, str]:
    """(scheme, bucket, prefix). Raises OSError."""
    scheme, _, rest = address.partition("://")
    bucket, _, root = rest.partition("/")
    if scheme not in ("gs", "s3") or not _BUCKET.fullmatch(bucket):
        text = (
            "not the address of a bucket; expected gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, the "
            "bucket's name with 3 to 63 of a-z 0-9 . _ -"
        )
        raise OSError(errno.EINVAL, text, address)
    if root:
        checked_name(root)
    return scheme, bucket, root


def _get(
    client: Any, key: str, options: Any = None, *, most_bytes: int = PART_BYTES
) -> tuple[bytes | None, Any]:
    """Content and metadata; None: the content is longer than `most_bytes`."""

    def get() -> tuple[bytes | None, Any]:
        found = obstore.get(client, key, options=options)
        if options is None and found.meta["size"] > most_bytes:
            return None, found.meta
        return found.bytes().to_bytes(), found.meta

    return _unbroken(get)


def _unbroken(read: Callable[[], T], tries: int = 4) -> T:
    """The result of a read whose answer may break off; obstore does not repeat such a request."""
    while True:
        try:
            return read()
        except GenericError as error:
            tries -= 1
            if not tries or _BROKEN_OFF not in str(error):
                raise


def _connect(scheme: str, bucket: str, request_s: float, retry_s: float) -> GCSStore | S3Store:
    retry: Any = {
        "max_retries": 1000,  # ten are used up after two seconds of refused connections
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=min(5.0, request_s)),
            "base": 2,
        },
    }
    client: Any = {
        "timeout": timedelta(seconds=request_s),
        "connect_timeout": timedelta(seconds=min(5.0, request_s)),
    }
    if scheme == "s3":
        client["allow_http"] = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        return S3Store(bucket, client_options=client, retry_config=retry)
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return GCSStore(bucket, client_options=client, retry_config=retry)
    if "://" not in host:
        host = f"http://{host}"
    client["allow_http"] = True
    # Any token: obstore would otherwise look for the platform's, and an emulator wants none.
    config: Any = {"base_url": host, "bearer_token": "emulator"}
    return GCSStore(bucket, config=config, client_options=client, retry_config=retry)


def _mode(version: str) -> Any:
    if not version:
        return "create"
    e_tag, _, generation = version.partition(" ")
    return {"e_tag": e_tag, "version": generation} if generation else {"e_tag": e_tag}


def _version(meta: Any) -> str:
    """Google's writes are conditional on the generation, S3's on the ETag."""
    e_tag, generation = meta.get("e_tag") or "", meta.get("version")
    return f"{e_tag} {generation}" if generation else e_tag


def _one_line(text: str) -> str:
    """Without obstore's dump of the error's fields, which fills a page."""
    return one_line(text.partition("Debug source")[0], 300)
