"""Who owns a workdir, and which process is an actor number.

A lease is a small shared file with its holder's name. The interface is one that a bucket can offer:
`claim` creates the file or takes it over from a holder that is dead, and the holder renews it every
RENEW_S seconds. How a dead holder is told from a live one is the store's:

- `local` locks the file (flock). The kernel frees the lock with the process, however that ends, so
  a supervisor can start the next one at once, and a stopped clock or a long step costs nothing. A
  renewal only checks that the file is still the locked one (somebody may have deleted it). Other
  hosts see the lock where the file system passes locks on: NFS does, a mounted bucket does not.
- A bucket has no locks. There a renewal increments a counter in the file, and a taker watches the
  counter for a minute of its own clock before it replaces the file, if that is unchanged.

So a caller may rely on this: at most one process holds a lease and renews it successfully, and the
lease of a dead process becomes free. It may not rely on how soon. A counter in the local form would
have no reader, so there is none: the lock says more than the counter could.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

from uirl_jax.errors import ConfigError, LeaseHeldError
from uirl_jax.store.interface import Lease, Store

logger = logging.getLogger(__name__)

RENEW_S = 10.0


def only_learner(
    store: Store, on_lost: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Hold the workdir: a second learner would overwrite the steps of the first.

    Args:
        on_lost: called from a thread if another process has taken the lease over; must end the
            work.
    Raises: ConfigError, with the holder.
    """
    return _hold(store, "learner.lock", "a learner", "use another --workdir", on_lost)


def only_actor(
    store: Store, actor_id: str, on_lost: Callable[[], None]
) -> contextlib.AbstractContextManager[None]:
    """Hold an actor's number: a second process would play the same groups, to be trained twice.

    Args and Raises as for `only_learner`.
    """
    way_out = "give each actor its --actor, from 0, and all of them the same --actors"
    return _hold(store, f"actor-{actor_id}.lock", f"actor {actor_id}", way_out, on_lost)


@contextlib.contextmanager
def _hold(
    store: Store, name: str, who: str, way_out: str, on_lost: Callable[[], None]
) -> Iterator[None]:
    try:
        lease = store.claim(name, f"process {os.getpid()} on {socket.gethostname()}")
    except LeaseHeldError as error:
        raise ConfigError(
            f"{store.location()}: {who} is at work there ({error}); wait for it or stop it, or "
            f"{way_out}"
        ) from None
    with renewed(lease, on_lost):
        yield


@contextlib.contextmanager
def renewed(lease: Lease, on_lost: Callable[[], None], every_s: float = RENEW_S) -> Iterator[None]:
    """Renew a lease from a thread until the block ends, then release it."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(every_s):
            try:
                lease.renew()
            except LeaseHeldError as error:
                logger.error('event=lease_lost holder="%s"', error)
                on_lost()
                return
            except OSError as error:  # the storage is away for a moment: try again
                logger.warning('event=lease_not_renewed reason="%s"', error)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=every_s)
        lease.release()
