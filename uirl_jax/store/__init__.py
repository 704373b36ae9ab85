"""Storage of the files that the processes of a run share.

`interface` defines what a store offers; `local` implements it for a directory, `bucket` for gs://
and s3://. `lease` gives a workdir to one learner and an actor number to one process, and
`counted_lease` is how a bucket does it. `mirror` keeps copies of a process's own files in a bucket.
`files` writes files atomically: only this module calls fsync and rename, also for files of a single
process.
"""

import functools
import os

from uirl_jax.store.bucket import BucketStore, is_address
from uirl_jax.store.interface import (
    Lease,
    Store,
    StoreUnavailableError,
    is_temporary,
    restart_error,
)
from uirl_jax.store.local import LocalStore
from uirl_jax.store.mirror import linked_address

__all__ = [
    "Lease",
    "Store",
    "StoreUnavailableError",
    "is_temporary",
    "open_store",
    "restart_error",
]


def open_store(workdir: str | os.PathLike[str]) -> Store:
    """The store of a workdir: a directory, or gs://bucket/prefix or s3://bucket/prefix.

    A directory that `mirror` has linked to an address is the local part of a run in that bucket.
    Nothing is touched before its first method call.

    Raises: OSError: the address of a bucket is not valid.
    """
    address = str(workdir) if is_address(str(workdir)) else linked_address(workdir)
    if not address:
        return LocalStore(workdir)
    hosts = tuple(os.environ.get(name, "") for name in ("STORAGE_EMULATOR_HOST", *_S3_HOST))
    return _bucket_store(address.rstrip("/"), hosts)


_S3_HOST = ("AWS_ENDPOINT_URL", "AWS_REGION")


@functools.cache
def _bucket_store(address: str, hosts: tuple[str, ...]) -> BucketStore:
    """One a process: it holds connections, a credential, and the leases of this process."""
    del hosts  # a test may start another emulator
    return BucketStore(address)
