"""Storage of the files that the processes of a run share.

`interface` defines what a store offers; `local` implements it for a directory, `bucket` for gs://
and s3://. `lease` gives a workdir to one learner and an actor number to one process, and
`counted_lease` is how a bucket does it. `files` writes files atomically: only this module calls
fsync and rename, also for files of a single process.
"""

import functools
import os

from uirl_jax.store.bucket import BucketStore, is_address
from uirl_jax.store.interface import Lease, Store, StoreUnavailableError
from uirl_jax.store.local import LocalStore

__all__ = ["Lease", "Store", "StoreUnavailableError", "open_store"]


def open_store(workdir: str | os.PathLike[str]) -> Store:
    """The store of a workdir: a directory, or gs://bucket/prefix or s3://bucket/prefix.

    Nothing is touched before its first method call.

    Raises: OSError: the address of a bucket is not valid.
    """
    if is_address(str(workdir)):
        hosts = tuple(os.environ.get(name, "") for name in ("STORAGE_EMULATOR_HOST", *_S3_HOST))
        return _bucket_store(str(workdir).rstrip("/"), hosts)
    return LocalStore(workdir)


_S3_HOST = ("AWS_ENDPOINT_URL", "AWS_REGION")


@functools.cache
def _bucket_store(address: str, hosts: tuple[str, ...]) -> BucketStore:
    """One a process: it holds connections, a credential, and the leases of this process."""
    del hosts  # a test may start another emulator
    return BucketStore(address)
