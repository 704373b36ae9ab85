"""Storage of the files that the processes of a run share.

`interface` defines what a store offers, so that a bucket can be added; `local` implements it for a
directory. `lease` gives a workdir to one learner and an actor number to one process. `files` writes
files atomically: only this module calls fsync and rename, also for files of a single process.
"""

import os

from uirl_jax.store.interface import Lease, Store
from uirl_jax.store.local import LocalStore

__all__ = ["Lease", "Store", "open_store"]


def open_store(workdir: str | os.PathLike[str]) -> Store:
    """The store of a workdir. Files are not touched before its first method call."""
    return LocalStore(workdir)
