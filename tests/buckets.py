"""An emulated bucket and a store in it, for tests."""

import contextlib
from collections.abc import Iterator

import pytest

from tools.bucket_emulator import Emulator, Faults, emulator
from uirl_jax.store.bucket import BucketStore
from uirl_jax.store.counted_lease import LeaseTimes

# A lease is taken over after three seconds instead of a minute.
SHORT = LeaseTimes(expiry_s=3.0, give_up_s=1.5, request_s=0.3, look_s=0.05, sight_s=0.05)


@contextlib.contextmanager
def bucket_store(
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    faults: Faults | None = None,
    times: LeaseTimes = SHORT,
    request_s: float = 10.0,
    root: str = "run",
) -> Iterator[tuple[BucketStore, Emulator]]:
    """A store below gs://runs/run or s3://runs/run, and the emulator of its bucket."""
    with emulator(faults=faults or Faults()) as service:
        point_to(service, monkeypatch)
        address = f"{scheme}://runs/{root}"
        yield BucketStore(address, poll_s=0.0, times=times, request_s=request_s), service


def point_to(service: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients of this process and of its children use the emulator, without credentials."""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
