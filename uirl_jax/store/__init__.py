"""The files that the processes of a run share: the one border to the disk, later also to a bucket.

`interface` says what every store offers, `local` is a directory's form of it, `lease` gives a
workdir to one learner and an actor number to one process. `files` writes whole files: the one place
in the package that syncs and renames; also for files that only one process uses.
"""

import os

from uirl_jax.store.interface import Lease, Store
from uirl_jax.store.local import LocalStore

__all__ = ["Lease", "Store", "open_store"]


def open_store(workdir: str | os.PathLike[str]) -> Store:
    """The store of a workdir. Nothing is made or read before the first call of it."""
    return LocalStore(workdir)
