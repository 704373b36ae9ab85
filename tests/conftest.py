"""What holds for all tests of a process."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

# Every compiled program takes mappings of memory, of which Linux gives a process 65,530: XLA
# crashed in one that had compiled for half an hour.
_MOST_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed() -> Iterator[None]:
    """Drops compiled programs after a file of tests, if there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
