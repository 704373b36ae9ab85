"""Publishes policies from the learner to the actors: files of adapters and one small manifest.

The learner publishes after a checkpoint is committed. Actors and evaluations read the manifest,
load its version and pass it to their engine. Version 0 is the base model with zero adapters,
published like any other, so that all actors start in the same way.

    policy/manifest.json                       the current version; replaced atomically
    policy/<version>/adapters.safetensors      named by the manifest; never changed. A run that
                                               trains all weights: weights.safetensors

The manifest is replaced by one conditional write. In a bucket it carries the generation of the
learner's lease, so that a learner that has lost its lease publishes nothing.

The last three versions are kept, because an actor may load a version while the learner publishes
the next. The manifest is untrusted input: every field is checked before use.

The learner decides when to publish; the meaning of the adapters' names is the model's.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

import google_crc32c
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from uirl_jax.errors import PolicyError
from uirl_jax.store import Store, StoreUnavailableError, lease, restart_error

KEEP_VERSIONS = 3
_CONFLICTS = 3  # of the manifest's conditional write; only the lease's holder writes it
POLICY = "policy"
MANIFEST = "policy/manifest.json"
# Usually a few hundred; 1.7 million of the largest pool of tasks, all of which were played.
MAX_MANIFEST_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of policy/manifest.json: the version that actors should use now."""

    version: int  # publish counter, from 0
    step: int  # the learner's step
    path: str  # of the adapters' file, relative to the workdir, with forward slashes
    crc32c: int  # of that file's bytes
    base_hash: str  # of the base model of the adapters
    run_id: str
    extra: dict[str, Any]  # plain JSON from the learner
    published_unix_s: float


def publish(
    store: Store,
    *,
    version: int,
    step: int,
    arrays: dict[str, np.ndarray],
    base_hash: str,
    run_id: str,
    extra: dict[str, Any],
    kind: Literal["adapters", "weights"] = "adapters",
) -> Manifest:
    """Write a version and make it current; actors see either the old or the new version.

    A version may be published again after a restart: an equal file is not rewritten, a different
    one is replaced.

    Args:
        store: of the run.
        version: publish counter, from 0.
        step: the learner's step.
        arrays: by name, any numpy dtype or bfloat16.
        base_hash: hash of the base model.
        run_id: of this run.
        extra: plain JSON for the readers.
        kind: of weights, which the file is named after.

    Raises:
        PolicyError: it could not be written; the previous version stays current.
        RestartError: another learner has the lease, or the storage does not answer.
    """
    name = f"{POLICY}/{version}/{kind}.safetensors"
    failed = f"{store.location(name)}: version {version} was not published"
    advice = "; the previous version stays current; free disk space and run the same command again"
    with _storage_errors(failed, advice):
        store.remove_unfinished(POLICY)
        contents = safetensors.numpy.save(
            {key: np.asarray(array, order="C") for key, array in arrays.items()}
        )
        if not _holds(store, name, contents):
            store.put(name, contents)
        manifest = Manifest(
            version=version,
            step=step,
            path=name,
            crc32c=google_crc32c.value(contents),
            base_hash=base_hash,
            run_id=run_id,
            extra=extra,
            published_unix_s=time.time(),
        )
        manifest = _replace(store, manifest)
    with contextlib.suppress(OSError):  # not fatal: the next publication tries again
        _delete_old(store, current=version)
    return manifest


def seal(store: Store) -> None:
    """Marks the manifest with this learner's lease, at its start.

    An earlier learner may be paused within its conditional write; that write now fails.

    Raises:
        PolicyError: the storage fails.
        RestartError: another learner has the lease, or the storage does not answer.
    """
    where = store.location(MANIFEST)
    with _storage_errors(f"{where}: cannot be replaced"):
        text, version = store.read_version(MANIFEST)
        fence = lease.learner_fence(store)
        if not fence or not version:
            return
        # Not a manifest, or nested too deeply to be written: the next publication replaces it.
        with contextlib.suppress(PolicyError, RecursionError):
            _put(store, _marked(_parse(where, text), fence), version)


def _replace(store: Store, manifest: Manifest) -> Manifest:
    """Makes a manifest the current one. Raises: as `publish`, and OSError."""
    for _ in range(_CONFLICTS):
        _, version = store.read_version(MANIFEST)
        # After reading the version: whoever takes the lease from here on changes it by `seal`.
        fence = lease.learner_fence(store)
        marked = _marked(manifest, fence) if fence else manifest
        if _put(store, marked, version):
            return marked
    raise PolicyError(
        f"{store.location(MANIFEST)}: is replaced by others while this learner has the lease; "
        "is a learner of an earlier release running?"
    )


def _marked(manifest: Manifest, fence: int) -> Manifest:
    return dataclasses.replace(manifest, extra={**manifest.extra, "lease_generation": fence})


def _put(store: Store, manifest: Manifest, version: str) -> bool:
    fields = dataclasses.asdict(manifest)
    text = json.dumps(fields, allow_nan=False, indent=1, sort_keys=True).encode()
    if len(text) > MAX_MANIFEST_BYTES:  # actors would not read it, and wait
        raise PolicyError(
            f"{store.location(MANIFEST)}: {len(text)} bytes, at most {MAX_MANIFEST_BYTES}; the "
            "tallies of curriculum.instances are most of it"
        )
    return bool(store.put_version(MANIFEST, text, version))


def read_manifest(store: Store) -> Manifest | None:
    """The current manifest; None before the first publication.

    Raises:
        PolicyError: the file is not a valid manifest, or cannot be read.
        RestartError: the storage does not answer.
    """
    where = store.location(MANIFEST)
    with _storage_errors(f"{where}: cannot be read"), contextlib.suppress(FileNotFoundError):
        with store.open(MANIFEST) as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
        return _parse(where, text)
    return None


def _parse(where: str, text: bytes) -> Manifest:
    """Raises: PolicyError: it is not a valid manifest."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise PolicyError(f"{where}: more than {MAX_MANIFEST_BYTES} bytes, which no learner writes")
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, NaN, 200,000 levels
        raise PolicyError(f"{where}: not JSON: {error}; the learner will rewrite it") from error
    return _to_manifest(where, fields)


def load(
    store: Store,
    manifest: Manifest,
    base_hash: str,
    *,
    run_id: str | None = None,
) -> dict[str, np.ndarray]:
    """Loads and checks the adapters of a manifest.

    Args:
        store: of the run; the adapters' file must be inside it after following links.
        manifest: from `read_manifest`.
        base_hash: of the base model that this process has loaded.
        run_id: of this process's run; None accepts any run.

    Raises:
        PolicyError: another base model or run, a path outside the workdir, or a file that is
            missing, damaged or not safetensors.
        RestartError: the storage does not answer.
    """
    where = store.location(MANIFEST)
    if manifest.base_hash != base_hash:
        raise PolicyError(
            f"{where}: version {manifest.version} belongs to base model "
            f"{manifest.base_hash}, this process loaded {base_hash}; "
            "start it with the learner's model"
        )
    if run_id is not None and manifest.run_id != run_id:
        raise PolicyError(
            f"{where}: version {manifest.version} is from run {manifest.run_id}, this "
            f"process belongs to run {run_id}; use the workdir of that run"
        )
    _check_relative(where, manifest.path)
    where = store.location(manifest.path)
    with _storage_errors(f"{where}: cannot be read", "; read the manifest again"):
        contents = store.read(manifest.path)
    crc32c = google_crc32c.value(contents)
    if crc32c != manifest.crc32c:
        raise PolicyError(
            f"{where}: crc32c {crc32c:08x}, the manifest has {manifest.crc32c:08x}; "
            "the file is damaged, or was just replaced: read the manifest again"
        )
    return _read_safetensors(where, contents)


def load_version(store: Store, version: int) -> dict[str, np.ndarray] | None:
    """The arrays of a version that is still kept, the current one or an older one; None: it is not.

    Only the manifest has a checksum, so that of an older version is not checked.

    Raises:
        PolicyError: the file cannot be read, or is not safetensors.
        RestartError: the storage does not answer.
    """
    for kind in ("adapters", "weights"):
        name = f"{POLICY}/{version}/{kind}.safetensors"
        where = store.location(name)
        with _storage_errors(f"{where}: cannot be read"), contextlib.suppress(FileNotFoundError):
            return _read_safetensors(where, store.read(name))
    return None


@contextlib.contextmanager
def _storage_errors(failed: str, advice: str = "") -> Iterator[None]:
    """Converts the errors of a store to those of this module.

    Args:
        failed: where and what.
        advice: for a storage that answers with an error.
    """
    try:
        yield
    except StoreUnavailableError as error:
        raise restart_error(failed, error) from error
    except OSError as error:
        raise PolicyError(f"{failed}: {error}{advice}") from error


def _to_manifest(where: str, fields: Any) -> Manifest:
    """Parsed JSON -> Manifest. Raises: PolicyError: lists all faults."""
    if not isinstance(fields, dict):
        raise PolicyError(f"{where}: is {type(fields).__name__}, expected a JSON object")
    known = {field.name: field.type for field in dataclasses.fields(Manifest)}
    faults = [f"{name} is missing" for name in known if name not in fields]
    faults += [f"{str(name)[:60]!r} is unknown" for name in fields if name not in known]
    for name, value in fields.items():
        expected = {int: int, float: (int, float), str: str}.get(known.get(name, object), dict)
        if name in known and (isinstance(value, bool) or not isinstance(value, expected)):
            faults.append(f"{name} is {type(value).__name__}")
    if not faults:
        for name, highest in (("version", 2**62), ("step", 2**62), ("crc32c", 2**32 - 1)):
            if not 0 <= fields[name] <= highest:
                faults.append(f"{name} is out of range")
        seconds = fields["published_unix_s"]
        if not (abs(seconds) < 1e15 and math.isfinite(seconds)):
            faults.append("published_unix_s is out of range")
    if faults:
        raise PolicyError(
            f"{where}: not a manifest: {'; '.join(faults[:8])}; the learner will rewrite it"
        )
    _check_relative(where, fields["path"])
    return Manifest(**{**fields, "published_unix_s": float(fields["published_unix_s"])})


def _check_relative(where: str, path: str) -> None:
    """Refuse every path that is not plainly below the workdir, before accessing it."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise PolicyError(f"{where}: path {path[:200]!r} is not below the workdir; it is not read")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_safetensors(where: str, contents: bytes) -> dict[str, np.ndarray]:
    """Arrays by name. safetensors.numpy.load does not support bfloat16, so it is decoded here.

    Raises: PolicyError: it is not safetensors.
    """
    arrays = {}
    try:
        for name, entry in safetensors.deserialize(contents):
            dtype = _DTYPES[entry["dtype"]]
            arrays[name] = np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise PolicyError(f"{where}: not a safetensors file: {error}") from error
    return arrays


_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
}


def _holds(store: Store, name: str, contents: bytes) -> bool:
    try:
        return store.read(name) == contents
    except FileNotFoundError:
        return False


def _delete_old(store: Store, current: int) -> None:
    """Keep the last versions up to the current one."""
    names_by_version: dict[int, list[str]] = {}
    for name in store.names(POLICY):
        version = name.split("/")[1]
        if version.isdecimal():
            names_by_version.setdefault(int(version), []).append(name)
    kept = sorted(version for version in names_by_version if version <= current)[-KEEP_VERSIONS:]
    for version, names in names_by_version.items():
        if version not in kept:
            store.delete(*names)
