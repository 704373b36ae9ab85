"""What holds for all tests of a process."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Every compiled program takes mappings of memory, of which Linux gives a process 65,530: XLA
# crashed in one that had compiled for half an hour.
_MOST_MAPPINGS = 25_000
# Programs that tests compiled, for the next file of tests and the next run. Processes do not share
# them: without a limit of its size, JAX writes a program while another process may read it.
_COMPILED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uirl_jax" / "tests"
_MOST_COMPILED_BYTES = 2**30


@pytest.fixture(autouse=True, scope="session")
def old_programs_are_deleted() -> None:
    """The size of what is kept has no other bound: changed code leaves old programs behind."""
    folder = _of_process()
    if sum(path.stat().st_size for path in folder.glob("*")) > _MOST_COMPILED_BYTES:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True, scope="module")
def programs_are_kept(request: pytest.FixtureRequest) -> None:
    """Reads compiled programs from disk, where tests are not about a TPU that is not there.

    Those cannot be read back.
    """
    of_file = [item for item in request.session.items if item.path == request.path]
    for name, value in {
        "jax_enable_compilation_cache": not any(
            item.get_closest_marker("tpu_aot") for item in of_file
        ),
        "jax_compilation_cache_dir": str(_of_process()),
        "jax_compilation_cache_max_size": -1,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }.items():
        jax.config.update(name, value)
    # A test that calls a tool's `main` sets these anew.
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed() -> Iterator[None]:
    """Drops compiled programs after a file of tests, if there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _of_process() -> Path:
    return _COMPILED / os.environ.get("PYTEST_XDIST_WORKER", "alone")
