"""The learner's checkpoints: adapters, optimizer, step, rng, data cursor; each array checksummed.

On the data path: the learner saves here after its steps, and publishes a policy only once that save
is committed; a process that starts again restores the newest checkpoint that is whole.

Orbax writes and reads; what it does not do is done here. It notices no flipped bit in array data,
so a crc32c of every array stands in the checkpoint's JSON item and is checked on restore. It raises
on a damaged newest step, so restoring goes down to the first good one and says what it passed over.

A checkpoint is one flat dict of arrays, named by their paths in the tree, so that the bytes on disk
do not depend on the classes of optax or Flax. The tree's structure comes from the caller.

What this file does not do: decide when to save, publish to actors (policy_sync), or hold base
weights. Checksums take whole arrays on this host: one process, any number of its devices.
"""

import dataclasses
import functools
import json
import logging
import os
import shutil
import sys
import time
from typing import Any, Self

import google_crc32c
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import LatestN

from uirl_jax.errors import CheckpointError

FORMAT = 1
# Beside the arrays: Orbax's metadata, some kilobytes an array, and what else writes to the disk.
SPARE_BYTES = 4 << 20
# Damaged steps are moved here, never deleted: somebody may want to know what happened to the disk.
DAMAGED_DIR = "damaged"


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `restore_latest` found."""

    step: int
    arrays: Any  # the tree that was asked for, on the shardings that were asked for
    meta: dict[str, Any]
    skipped: list[str]  # newer steps that were damaged, one line each: which and why


class Checkpointer:
    """The checkpoints of one run, in `directory`; its one learner writes, others open it read-only.

    Measured for 60 float32 leaves, 370 kB in all, on two CPU cores and a local disk: a save is
    committed after 120 ms, of which 20-40 ms block when `wait=False`; 180 leaves take 250 ms, so
    the number of leaves is what costs. Orbax without its async mode, without OCDBT, without
    compression or with zarr3 is no faster (85-125 ms for 60); one packed leaf takes 25 ms, but
    could not be restored onto another mesh array by array, so the leaves stay apart.

    Args:
        directory: a local path or gs://; made if missing, unless read_only.
        keep: how many committed checkpoints stay; older ones are deleted after a commit.
        read_only: never write, delete or move anything (an evaluation beside a running learner).

    Raises:
        CheckpointError: the directory cannot be made or read.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, *, read_only: bool = False
    ) -> None:
        self._read_only = read_only
        self._is_bucket = str(directory).startswith("gs://")
        self._directory = epath.Path(directory if self._is_bucket else os.path.abspath(directory))
        self._in_flight: int | None = None
        # Not Orbax's read_only, which warns at every opening; without create, cleanup and save it
        # writes nothing either.
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            preservation_policy=LatestN(keep),
            # One damaged step's metadata must not keep the others from being listed.
            lightweight_initialize=True,
        )
        _hear_each_error_once()
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except OSError as error:
            raise CheckpointError(
                f"{self._directory}: cannot be used for checkpoints: {_one_line(error)}; "
                "free space or give another --workdir"
            ) from error

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first; some may prove to be damaged."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Any, meta: dict[str, Any], *, wait: bool = True) -> None:
        """Write one checkpoint; committed (atomically renamed into place) when this returns.

        With wait=False the arrays may be donated as soon as this returns, but the checkpoint is
        committed only when `wait` returns, or the next `save`.

        Args:
            step: the learner's step, greater than every step saved before.
            arrays: any pytree of jax or numpy arrays, typed PRNG keys included.
            meta: plain JSON (data cursor, config, run id); comes back equal up to JSON's own types.

        Raises:
            CheckpointError: it could not be written (disk full, ...); earlier ones are untouched.
        """
        if self._read_only:
            raise CheckpointError(f"{self._directory}: opened read-only, step {step} is not saved")
        self.wait()
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            # Orbax would keep the newest three by number, and delete what was just written.
            raise CheckpointError(
                f"{self._directory}: step {step} is not after the newest checkpoint, {newest}; "
                "restore that one first, or give another --workdir"
            )
        plain = {name: _plain(leaf) for name, leaf in _named_leaves(arrays).items()}
        self._check_space(step, sum(leaf.nbytes for leaf in plain.values()))
        body = {
            "format": FORMAT,
            "step": step,
            "arrays": {name: _describe(leaf) for name, leaf in plain.items()},
            "meta": meta,
        }
        canonical = _canonical(body)
        self._in_flight = step
        try:
            self._manager.save(
                step,
                force=True,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(plain),
                    meta=ocp.args.JsonSave(
                        {**json.loads(canonical), "crc32c": google_crc32c.value(canonical)}
                    ),
                ),
            )
        except Exception as error:
            raise self._failed(step, error) from error
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return once the save in flight, if any, is committed.

        Raises:
            CheckpointError: it could not be.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(step, error) from error

    def restore_latest(self, abstract: Any) -> Restored | None:
        """Restore the newest checkpoint that is whole.

        Damaged newer ones are moved to `damaged/` (unless read-only), so that the run can save
        their steps again and they do not push good ones out of the last `keep`.

        Args:
            abstract: the tree that is wanted, jax.ShapeDtypeStruct leaves; a leaf's sharding may be
                on another mesh than the saved one; without any it goes to the first device.

        Returns:
            None only where there is no committed checkpoint at all.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest whole one is of another
                model or optimizer. Never a silent fresh start.
        """
        self.wait()
        wanted = _named_leaves(abstract)
        skipped: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            try:
                body = self._read_body(step)
                self._check_fits(step, body["arrays"], wanted)
                leaves = self._read_arrays(step, body["arrays"], wanted)
            except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
                raise  # not damage: trying an older one would hide it
            except Exception as error:  # whatever Orbax and tensorstore raise on broken files
                skipped.append((step, _one_line(error)))
                continue
            if not self._read_only:
                self._set_aside([step for step, _ in skipped])
            return Restored(
                step=step,
                arrays=jax.tree.unflatten(jax.tree.structure(abstract), leaves.values()),
                meta=body["meta"],
                skipped=[f"{self._directory / str(step)}: {reason}" for step, reason in skipped],
            )
        if not skipped:
            return None
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in skipped)
        raise CheckpointError(
            f"{self._directory}: no checkpoint is whole ({reasons}); put one back from a copy, "
            "or move the directory away to start from nothing"
        )

    def close(self) -> None:
        """Commit what is in flight and release Orbax's threads.

        Raises:
            CheckpointError: the save in flight could not be committed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_space(self, step: int, size_bytes: int) -> None:
        """Refuse early what cannot fit: Orbax finds out file by file, in several threads."""
        if self._is_bucket:
            return
        needed_bytes = size_bytes + SPARE_BYTES
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < needed_bytes:
            reason = f"no space left, {free_bytes} bytes are free and {needed_bytes} are needed"
            raise self._failed(step, OSError(reason))

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        self._in_flight = None
        return CheckpointError(
            f"{self._directory}: step {step} was not saved: {_one_line(error)}; the checkpoints "
            "before it are untouched; free space and run the same command again"
        )

    def _read_body(self, step: int) -> dict[str, Any]:
        """The JSON item of a step. Raises ValueError where it is not what was written."""
        item = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))[
            "meta"
        ]
        if not isinstance(item, dict) or type(item.get("format")) is not int:
            raise ValueError("its JSON item is no checkpoint's")
        if item["format"] != FORMAT:
            raise CheckpointError(
                f"{self._directory / str(step)}: format {item['format']}, this program reads "
                f"{FORMAT}; restore it with the version that wrote it"
            )
        crc32c = item.pop("crc32c", None)
        if crc32c != google_crc32c.value(_canonical(item)):
            raise ValueError("checksum of its JSON item does not match")
        if item["step"] != step:
            raise ValueError(f"its files are those of step {item['step']}")
        return item

    def _check_fits(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Raise CheckpointError where saved and wanted arrays differ in name, shape or dtype."""
        faults = [f"{name} is missing" for name in wanted if name not in saved]
        faults += [f"{name} is unknown" for name in saved if name not in wanted]
        for name in wanted.keys() & saved.keys():
            leaf = _plain_abstract(wanted[name])
            got = f"{saved[name]['dtype']}{saved[name]['shape']}"
            expected = f"{leaf.dtype}{list(leaf.shape)}"
            if got != expected:
                faults.append(f"{name} is {got}, expected {expected}")
        if faults:
            shown = "; ".join(sorted(faults)[:8]) + ("; ..." if len(faults) > 8 else "")
            raise CheckpointError(
                f"{self._directory / str(step)}: {len(faults)} arrays are not this config's: "
                f"{shown}; restore with the config it was saved with, or give another --workdir"
            )

    def _read_arrays(
        self, step: int, saved: dict[str, Any], wanted: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """The wanted arrays, checked. Raises ValueError where a checksum does not match."""
        first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device
            )
            for name, leaf in ((name, _plain_abstract(leaf)) for name, leaf in wanted.items())
        }
        arrays = self._manager.restore(
            step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(targets))
        )["arrays"]
        broken = [name for name in wanted if _crc32c(arrays[name]) != saved[name]["crc32c"]]
        if broken:
            raise ValueError(f"checksum of {len(broken)} arrays does not match, first {broken[0]}")
        return {name: _like(arrays[name], leaf) for name, leaf in wanted.items()}

    def _set_aside(self, steps: list[int]) -> None:
        """Move damaged steps to damaged/<step>-<time>."""
        if not steps:
            return
        try:
            (self._directory / DAMAGED_DIR).mkdir(exist_ok=True)
            for step in steps:
                source = self._directory / str(step)
                source.rename(self._directory / DAMAGED_DIR / f"{step}-{time.time_ns()}")
        except OSError as error:
            raise CheckpointError(
                f"{self._directory}: damaged steps {steps} cannot be moved to {DAMAGED_DIR}/: "
                f"{_one_line(error)}; move them away by hand"
            ) from error
        self._manager.reload()


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path ("optimizer/0/mu/blocks/lora_a"), in the order of jax.tree.leaves."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in paths_and_leaves
    }
    assert len(named) == len(paths_and_leaves), "two leaves have one path"
    return named


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """An array without extended dtype: the uint32 data of a typed key, other arrays as they are."""
    if isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _plain_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract array whose bytes are on disk for an abstract leaf."""
    if not _is_key(leaf):
        return leaf
    # Key data has one more dimension than the keys, never sharded.
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _like(array: jax.Array, leaf: Any) -> jax.Array:
    """A restored plain array as the abstract leaf wants it."""
    if not _is_key(leaf):
        return array
    impls: list[Any] = []  # key_impl wants a key, and an abstract one is none: trace it
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=impls[0])


def _crc32c(array: Any) -> int:
    """Of the array's bytes in C order, little-endian, gathered on this host."""
    host = np.ascontiguousarray(np.asarray(array))
    # bfloat16 has no buffer protocol; its bytes do.
    return google_crc32c.value(host.reshape(-1).view(np.uint8).data.tobytes())


def _describe(array: Any) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "crc32c": _crc32c(array),
    }


def _canonical(body: Any) -> bytes:
    """One byte string per JSON value: keys as strings, sorted; NaN and infinity are refused."""
    as_json = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps(as_json, sort_keys=True, separators=(",", ":")).encode()


@functools.cache
def _hear_each_error_once() -> None:
    """Keep from stderr what Orbax and tensorstore print besides raising it.

    Orbax logs every error of its threads, then raises it: 300 lines for one full disk. Where one of
    several reads fails it closes its event loop, and tensorstore reports, from threads of its own
    and possibly later, that it cannot tell the loop about the others. Installed for the whole
    process because of that "later".
    """
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        from_tensorstore = unraisable.object is None
        if from_tensorstore and str(unraisable.exc_value) == "Event loop is closed":
            return
        report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
    )


def _one_line(error: Exception) -> str:
    """An exception as one short line; tensorstore's own run to a page."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-95:]}"
