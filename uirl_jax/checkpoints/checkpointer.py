"""The learner's checkpoints: adapters, optimizer, step, rng, data cursor; each array checksummed.

The learner saves after its steps and publishes a policy once the save is committed. After a restart
it restores the newest undamaged checkpoint.

Orbax writes and reads the files. It does not detect flipped bits in array data, so the checkpoint's
JSON item has a crc32c of every array, which is checked on restore. It raises if the newest step is
damaged; `restore_latest` then tries older steps and reports the skipped ones.

A checkpoint is one flat dict of arrays, named by their paths in the tree, so that the bytes on disk
do not depend on the classes of optax or Flax. The caller provides the tree's structure.

Base weights are not saved. The processes of a learner on several hosts save and restore together,
in one directory that all of them see. Checksums need whole arrays: each host gathers them, one at a
time. Adapters are megabytes; all weights of a large model would cross the network at every save.
"""

import dataclasses
import json
import os
import shutil
import time
from typing import Any, Self

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from uirl_jax.checkpoints import array_format, orbax_storage
from uirl_jax.errors import CheckpointError, CheckpointUnavailableError, one_line
from uirl_jax.store import is_temporary, open_store

FORMAT = 1
# Free space needed besides the arrays: Orbax's metadata, some kilobytes per array, and a reserve.
SPARE_BYTES = 4 << 20
# Damaged steps are moved here and not deleted, so that the cause can be investigated.
DAMAGED_DIR = "damaged"
_SHOWN = 300  # characters of a reason; tensorstore's fill a page


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    arrays: Any  # the requested tree, with the requested shardings
    meta: dict[str, Any]
    skipped: list[str]  # newer, damaged steps: one line each, with the reason


class Checkpointer:
    """The checkpoints of one run, in `directory`. The learner writes; others open it read-only.

    Measured with 60 float32 leaves, 370 kB in total, on two CPU cores and a local disk: a save is
    committed after 120 ms, of which 20-40 ms block when `wait=False`. 180 leaves take 250 ms, so
    the cost depends on the number of leaves. Orbax without async mode, OCDBT or compression, or
    with zarr3, is not faster (85-125 ms for 60). One packed leaf takes 25 ms, but could not be
    restored array by array onto another mesh, so the leaves are separate.

    Args:
        directory: a local path or gs://; created if missing, unless read_only.
        keep: number of committed checkpoints to keep; older ones are deleted after a commit. The
            run continues from one of these.
        keep_every: checkpoints of these steps are never deleted; 0: of none.
        read_only: never write, delete or move anything (an evaluation during training).

    Raises:
        CheckpointError: the directory cannot be created or read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        keep_every: int = 0,
        read_only: bool = False,
    ) -> None:
        self._read_only, self._keep = read_only, keep
        orbax_storage.prepare_bucket(str(directory))
        self._is_bucket = str(directory).startswith("gs://")
        self._directory = epath.Path(directory if self._is_bucket else os.path.abspath(directory))
        self._in_flight: int | None = None
        # Not Orbax's read_only, which logs a warning each time; without create, cleanup and save
        # Orbax writes nothing either.
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            preservation_policy=AnyPreservationPolicy(
                [LatestN(keep), *([EveryNSteps(keep_every)] if keep_every else [])]
            ),
            # Otherwise damaged metadata of one step makes listing all steps fail.
            lightweight_initialize=True,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=orbax_storage.barrier()),
        )
        orbax_storage.silence_repeated_errors()
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except OSError as error:
            raise CheckpointError(
                f"{self._directory}: cannot be used for checkpoints: {one_line(error, _SHOWN)}; "
                "free disk space or use another --workdir"
            ) from error

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first; some may be damaged."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Any, meta: dict[str, Any], *, wait: bool = True) -> None:
        """Write one checkpoint; it is committed (atomically renamed) when this returns.

        With wait=False the arrays may be donated once this returns, but the checkpoint is committed
        only when `wait` or the next `save` returns.

        Args:
            step: the learner's step, greater than every step saved before.
            arrays: any pytree of jax or numpy arrays, including typed PRNG keys.
            meta: plain JSON (data cursor, config, run id); restored equal up to JSON's types.

        Raises:
            CheckpointError: it could not be written (disk full, ...); earlier ones are unchanged.
                Of a bucket it is a CheckpointUnavailableError.
        """
        if self._read_only:
            raise CheckpointError(f"{self._directory}: opened read-only, step {step} is not saved")
        self.wait()
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            # Orbax keeps the highest step numbers and would delete this checkpoint at once.
            raise CheckpointError(
                f"{self._directory}: step {step} is not after the newest checkpoint, {newest}; "
                "restore that one first, or use another --workdir"
            )
        plain = {
            name: array_format.plain(leaf)
            for name, leaf in array_format.named_leaves(arrays).items()
        }
        self._check_space(step, sum(leaf.nbytes for leaf in plain.values()))
        body = {
            "format": FORMAT,
            "step": step,
            "arrays": {name: array_format.describe(leaf) for name, leaf in plain.items()},
            "meta": meta,
        }
        canonical = array_format.canonical(body)
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
        """Wait until the save in progress, if any, is committed.

        Raises:
            CheckpointError: it could not be committed.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(step, error) from error

    def restore_latest(self, abstract: Any) -> Restored | None:
        """Restore the newest undamaged one of the last `keep` checkpoints.

        Older ones are for `restore` into another run: their records are deleted. Newer, damaged
        ones are moved to `damaged/` (unless read-only), so that the run can save their steps again
        and they do not count among the last `keep`.

        Args:
            abstract: the requested tree of jax.ShapeDtypeStruct leaves; a leaf's sharding may be
                on another mesh than the saved one; leaves without one go to the first device.

        Returns:
            None only if there is no committed checkpoint.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest undamaged one has another
                model or optimizer. The run never starts over silently.
        """
        self.wait()
        wanted = array_format.named_leaves(abstract)
        skipped: list[tuple[int, str]] = []
        for step in reversed(self.steps() if self._read_only else self.steps()[-self._keep :]):
            try:
                body = self._read_body(step)
                self._check_fits(step, body["arrays"], wanted)
                leaves = self._read_arrays(step, body["arrays"], wanted)
            except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
                raise  # the files are not damaged: an older step would hide the error
            except Exception as error:  # Orbax and tensorstore raise many types on damaged files
                skipped.append((step, one_line(error, _SHOWN)))
                continue
            if not self._read_only and skipped:
                if jax.process_index() == 0:
                    self._set_aside([step for step, _ in skipped])
                if jax.process_count() > 1:
                    multihost_utils.sync_global_devices("damaged checkpoints are set aside")
                self._manager.reload()
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
            f"{self._directory}: all checkpoints are damaged ({reasons}); restore one from a "
            "backup, continue from a kept one in another --workdir with --resume_from, or move the "
            "directory away to start over"
        )

    def restore(self, abstract: Any, step: int | None) -> Restored:
        """Restore the checkpoint of a step; None: the newest undamaged one.

        Raises:
            CheckpointError: it does not exist, is damaged, or has another model or optimizer.
        """
        if step is None:
            restored = self.restore_latest(abstract)
            if restored is None:
                raise CheckpointError(f"{self._directory}: no checkpoint yet")
            return restored
        wanted = array_format.named_leaves(abstract)
        body = self._read_undamaged(step)
        self._check_fits(step, body["arrays"], wanted)
        try:
            leaves = self._read_arrays(step, body["arrays"], wanted)
        except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # as in restore_latest
            raise CheckpointError(
                f"{self._directory / str(step)}: {one_line(error, _SHOWN)}"
            ) from error
        arrays = jax.tree.unflatten(jax.tree.structure(abstract), leaves.values())
        return Restored(step=step, arrays=arrays, meta=body["meta"], skipped=[])

    def read_part(self, prefix: str, step: int | None) -> Restored:
        """The arrays below a prefix, as numpy by the rest of their path; of any model.

        Args:
            prefix: of the paths, such as "trainable/".
            step: None: the newest undamaged one.
        Raises: as `restore`.
        """
        skipped: list[str] = []
        for candidate in [step] if step is not None else reversed(self.steps()):
            try:
                body = self._read_body(candidate) if step is None else self._read_undamaged(step)
                found = {
                    name: jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]))
                    for name, entry in body["arrays"].items()
                }
                arrays = self._read_arrays(candidate, body["arrays"], found)
            except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # as in restore_latest
                reason = f"{self._directory / str(candidate)}: {one_line(error, _SHOWN)}"
                if step is not None:
                    raise CheckpointError(reason) from error
                skipped.append(reason)
                continue
            part = {
                name.removeprefix(prefix): np.asarray(array)
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
            return Restored(step=candidate, arrays=part, meta=body["meta"], skipped=skipped)
        raise CheckpointError(
            f"{self._directory}: no checkpoint yet" + "".join(f"; {line}" for line in skipped)
        )

    def _read_undamaged(self, step: int) -> dict[str, Any]:
        """`_read_body`, with one error for everything. Raises: CheckpointError."""
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self._directory}: no checkpoint of step {step}; there are {known}"
            )
        try:
            return self._read_body(step)
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and tensorstore raise many types on damaged files
            raise CheckpointError(
                f"{self._directory / str(step)}: is damaged: {one_line(error, _SHOWN)}"
            ) from error

    def close(self) -> None:
        """Commit the save in progress and stop Orbax's threads.

        Raises:
            CheckpointError: the save in progress could not be committed.
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
        if self._is_bucket:
            return CheckpointUnavailableError(
                f"{self._directory}: step {step} was not saved: {one_line(error, _SHOWN)}; earlier "
                "checkpoints are unchanged; run the same command again"
            )
        return CheckpointError(
            f"{self._directory}: step {step} was not saved: {one_line(error, _SHOWN)}; earlier "
            "checkpoints are unchanged; free disk space and run the same command again"
        )

    def _restore(self, step: int, item: str, how: Any) -> Any:
        """An item as Orbax reads it. What fails while the storage answers is damaged.

        Raises: CheckpointUnavailableError: the storage does not answer, or not now.
        """
        args = ocp.args.Composite(**{item: how})
        try:
            return self._manager.restore(step, args=args)[item]
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            away = error if is_temporary(error) else None
            if self._is_bucket:
                # Each client has errors of its own for a bucket that is away. Ask it by ours.
                try:
                    open_store(str(self._directory)).names(str(step))
                except OSError as unanswered:
                    away = unanswered
                else:
                    return self._manager.restore(step, args=args)[item]
            if away is None:
                raise
            raise CheckpointUnavailableError(
                f"{self._directory / str(step)}: cannot be read now: {one_line(away, _SHOWN)}; "
                "run the same command again"
            ) from error

    def _read_body(self, step: int) -> dict[str, Any]:
        """The JSON item of a step. Raises ValueError if it is damaged."""
        item = self._restore(step, "meta", ocp.args.JsonRestore())
        if not isinstance(item, dict) or type(item.get("format")) is not int:
            raise ValueError("its JSON item is not a checkpoint's")
        if item["format"] != FORMAT:
            raise CheckpointError(
                f"{self._directory / str(step)}: format {item['format']}, this program reads "
                f"{FORMAT}; restore it with the version that wrote it"
            )
        crc32c = item.pop("crc32c", None)
        if crc32c != google_crc32c.value(array_format.canonical(item)):
            raise ValueError("checksum of its JSON item does not match")
        if item["step"] != step:
            raise ValueError(f"its files are from step {item['step']}")
        return item

    def _check_fits(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Raise CheckpointError if saved and wanted arrays differ in name, shape or dtype."""
        faults = [f"{name} is missing" for name in wanted if name not in saved]
        faults += [f"{name} is unknown" for name in saved if name not in wanted]
        for name in wanted.keys() & saved.keys():
            leaf = array_format.plain_abstract(wanted[name])
            got = f"{saved[name]['dtype']}{saved[name]['shape']}"
            expected = f"{leaf.dtype}{list(leaf.shape)}"
            if got != expected:
                faults.append(f"{name} is {got}, expected {expected}")
        if faults:
            shown = "; ".join(sorted(faults)[:8]) + ("; ..." if len(faults) > 8 else "")
            raise CheckpointError(
                f"{self._directory / str(step)}: {len(faults)} arrays do not fit this config: "
                f"{shown}; restore with the config it was saved with, or use another --workdir"
            )

    def _read_arrays(
        self, step: int, saved: dict[str, Any], wanted: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """The wanted arrays, checked. Raises ValueError if a checksum does not match."""
        first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device
            )
            for name, leaf in (
                (name, array_format.plain_abstract(leaf)) for name, leaf in wanted.items()
            )
        }
        arrays = self._restore(step, "arrays", ocp.args.StandardRestore(targets))
        broken = [
            name for name in wanted if array_format.crc32c(arrays[name]) != saved[name]["crc32c"]
        ]
        if broken:
            raise ValueError(f"checksum of {len(broken)} arrays does not match, first {broken[0]}")
        return {name: array_format.like(arrays[name], leaf) for name, leaf in wanted.items()}

    def _set_aside(self, steps: list[int]) -> None:
        """Move damaged steps to damaged/<step>-<time>."""
        try:
            for step in steps:
                target = f"{DAMAGED_DIR}/{step}-{time.time_ns()}"
                if self._is_bucket:
                    orbax_storage.move_objects(open_store(str(self._directory)), str(step), target)
                else:
                    (self._directory / DAMAGED_DIR).mkdir(exist_ok=True)
                    (self._directory / str(step)).rename(self._directory / target)
        except OSError as error:
            raise CheckpointError(
                f"{self._directory}: damaged steps {steps} cannot be moved to {DAMAGED_DIR}/: "
                f"{one_line(error, _SHOWN)}; move them away by hand"
            ) from error
