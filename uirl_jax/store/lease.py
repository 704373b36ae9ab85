"""Leases: one learner per workdir, one process per actor number.

A lease is a small shared file with its holder's name. `claim` creates the file, or takes it over
from a dead holder; the holder renews it every RENEW_S seconds. A bucket can offer this too. How a
dead holder is detected depends on the store:

- `local` locks the file (flock). The kernel releases the lock when the process ends for any reason,
  so a supervisor can restart it at once, and pauses of the process do not matter. A renewal checks
  only that the locked file still has its name (someone may have deleted it). Other hosts see the
  lock if the file system supports that: NFS does, a mounted bucket does not.
- `bucket` writes a counter, because a bucket has no locks: see `counted_lease`. A pause can lose
  such a lease, so what its holder publishes carries a number that grows with every taking
  (`Store.fence`), and is refused once another process has taken it.

Guarantees: at most one process holds a lease and renews it successfully, and the lease of a dead
process becomes free eventually.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

from uirl_jax.errors import ConfigError, LeaseHeldError, RestartError
from uirl_jax.log_lines import key_values
from uirl_jax.store.interface import Lease, Store

logger = logging.getLogger(__name__)

RENEW_S = 10.0
LEARNER = "learner.lock"


def only_learner(
    store: Store, on_lost: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Hold the learner's lease of a workdir: two learners would overwrite each other's steps.

    Args:
        on_lost: called from a thread if another process has taken the lease; must stop the work.
    Raises: ConfigError: another process holds it; the message names the holder.
    """
    return _hold(store, LEARNER, "a learner", "use another --workdir", on_lost)


def only_actor(
    store: Store, actor_id: str, on_lost: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Hold the lease of an actor number: two processes would play the same groups.

    Args and Raises as for `only_learner`.
    """
    way_out = "give each actor another --actor"
    return _hold(store, _actor_lease(actor_id), f"actor {actor_id}", way_out, on_lost)


def learner_fence(store: Store) -> int:
    """`Store.fence` of the learner's lease; ask right before what only one learner may write.

    Raises: RestartError: this process has lost the lease. OSError: the storage does not answer.
    """
    try:
        return store.fence(LEARNER)
    except LeaseHeldError as error:
        raise RestartError(
            f"{store.location()}: the lease of this learner was lost to {error}; it has written "
            "nothing since. Is another learner running? If not, run the same command again"
        ) from None


def is_alive(store: Store, actor_id: str) -> bool:
    """Whether a process holds the lease of an actor number."""
    return store.is_claimed(_actor_lease(actor_id))


def _actor_lease(actor_id: str) -> str:
    return f"actor-{actor_id}.lock"


@contextlib.contextmanager
def _hold(
    store: Store, name: str, who: str, way_out: str, on_lost: Callable[[], None]
) -> Iterator[None]:
    try:
        lease = store.claim(name, f"process {os.getpid()} on {socket.gethostname()}")
    except LeaseHeldError as error:
        raise ConfigError(
            f"{store.location()}: {who} is running there ({error}); wait for it or stop it, or "
            f"{way_out}"
        ) from None
    with renewed(lease, on_lost):
        yield


@contextlib.contextmanager
def renewed(lease: Lease, on_lost: Callable[[], None], every_s: float = RENEW_S) -> Iterator[None]:
    """Renew a lease from a thread until the block ends, then release it."""
    ended = threading.Event()

    def renew() -> None:
        wait_s = every_s
        while not ended.wait(wait_s):
            wait_s = every_s
            try:
                lease.renew()
            except LeaseHeldError as error:
                logger.error(key_values("lease_lost", holder=error))
                on_lost()
                return
            except OSError as error:  # possibly temporary: try again soon
                wait_s = every_s / 4
                logger.warning(key_values("lease_not_renewed", reason=error))

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=every_s)
        lease.release()
