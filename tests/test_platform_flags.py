"""Settings of the process, each seen by its effect in a process of its own."""

import os
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import statistics
from uirl_jax import platform_flags

if {kept}:
    platform_flags.keep_freed_memory()

import jax
import jax.numpy as jnp

step = jax.jit(lambda x: (jnp.tanh(x)[::-1] + 1.0).cumsum())
x = jnp.ones(10_000_000)  # 40 MB, 9,766 pages; up to 32 MB are sometimes kept anyway
counts = []
for _ in range(60):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# Kept: the threads' arenas grow by an array or two in five to ten steps, most of them among the
# first (more of these on a busy machine), and in all the others by nothing.
# Not kept: two arrays in every step.
print(int(statistics.median(counts[30:])))
"""


def _faults(kept: bool, **environment: str) -> int:
    """The page faults of a step that makes two arrays of 9,766 pages, by median."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        # Without XLA's optimizations, as tests/run.sh asks, such a step takes half a second.
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "XLA_FLAGS"))
    }
    command = [sys.executable, "-c", _FAULTS.format(kept=kept)]
    environment = inherited | environment | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_was_freed_is_not_cleared_again():
    plain = _faults(kept=False)
    assert plain > 9_766
    assert _faults(kept=True) < plain / 10
    assert _faults(kept=True, MALLOC_ARENA_MAX="8") > 9_766  # the user's own choice stays
