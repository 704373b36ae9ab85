"""What Orbax needs beside its options: barriers that fail, access to a bucket, quiet errors."""

import functools
import importlib.util
import logging
import sys
from typing import Any

import orbax.checkpoint as ocp

from uirl_jax.errors import CheckpointError
from uirl_jax.store import Store

COMMITTED = "commit_success.txt"  # Orbax writes it last, where it cannot rename


def barrier() -> ocp.multihost.BarrierSyncFn:
    """Orbax's barrier between processes, but for one whose save has failed.

    Orbax 0.12.8 takes such a process to the barrier after the save, while the others wait at one
    within it, each for 20 minutes: one object that a bucket does not take would stop the learner
    for so long. The failure is raised instead; its process then ends the others.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def wait_unless_failed(*, key: str, timeout_ms: int) -> None:
        if (failure := sys.exc_info()[1]) is not None:
            raise failure
        wait(key=key, timeout_ms=timeout_ms)

    return wait_unless_failed


def prepare_bucket(directory: str) -> None:
    """Sets up Orbax's access to gs://. Raises: CheckpointError: it cannot write there."""
    if directory.startswith("s3://"):
        raise CheckpointError(
            f"{directory}: checkpoints are written to gs:// or a directory; use a --workdir there"
        )
    if directory.startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
        raise CheckpointError(
            f"{directory}: needs gcsfs, which is not installed; pip install -e '.[gcs]'"
        )
    if directory.startswith("gs://"):
        from fsspec import config

        # Otherwise gcsfs remembers listings for ever, also of steps that another process has saved
        # or deleted, and that `_set_aside` has moved.
        config.conf.setdefault("gs", {})["use_listings_cache"] = False


def move_objects(store: Store, prefix: str, target: str) -> None:
    """Moves everything below a prefix; a bucket has no directories to rename.

    Orbax's marker of a committed step goes first: killed here, the step is not committed any more.
    """
    names = store.names(prefix)
    for name in sorted(names, key=lambda name: (name != f"{prefix}/{COMMITTED}", name)):
        store.move(name, f"{target}/{name.removeprefix(prefix + '/')}")


@functools.cache
def silence_repeated_errors() -> None:
    """Suppress on stderr the errors that Orbax and tensorstore both print and raise.

    Orbax logs every error of its threads before raising it: 300 lines for one full disk. If one of
    several reads fails, it closes its event loop, and tensorstore's threads then report, possibly
    later, that the loop is closed. Because of the delay this applies to the whole process.
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
