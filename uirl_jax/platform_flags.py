"""Settings of XLA and JAX for every command, made before the first use of a device.

What the user has set in the environment stays.
"""

import ctypes
import os
from pathlib import Path

import jax

# Matrix products by oneDNN: up to 3 times as fast on a busy machine, no difference that could be
# told from noise on an idle one (docs/performance.md).
_CPU_FLAGS = {"--xla_cpu_use_onednn": "true"}

# Compiled programs are kept from one process to the next: a restart, or the second role on a
# machine, compiles nothing again. The oldest go when they are more than this in all.
_CACHE_SIZE_BYTES = 4 * 2**30
_CACHED_FROM_S = 0.1  # compile time; JAX's default of a second leaves out dozens of small programs

# mallopt's numbers (malloc.h), what they are set to, and glibc's own values.
_MALLOC_OPTIONS = {
    -4: (0, 65_536),  # M_MMAP_MAX: no buffer is a mapping of its own, which goes back when freed
    -8: (1, 8 * (os.cpu_count() or 1)),  # M_ARENA_MAX: other arenas cannot hold a large buffer
    -1: (-1, 128 * 2**10),  # M_TRIM_THRESHOLD, bytes free at the heap's end; -1: nothing goes back
    -2: (64 * 2**20, 128 * 2**10),  # M_TOP_PAD, bytes: how far ahead the heap grows
}


def set_defaults() -> None:
    """XLA's flags, and where compiled programs are kept.

    That is JAX_COMPILATION_CACHE_DIR, by default a directory in the user's cache (XDG_CACHE_HOME,
    or ~/.cache); JAX_ENABLE_COMPILATION_CACHE=false keeps none.
    """
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in _CPU_FLAGS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # JAX read its own variables when it was imported.
    for name, value in {
        "jax_compilation_cache_dir": str(user_cache / "uirl_jax" / "compiled"),
        "jax_compilation_cache_max_size": _CACHE_SIZE_BYTES,
        "jax_persistent_cache_min_compile_time_secs": _CACHED_FROM_S,
    }.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def keep_freed_memory() -> None:
    """On the CPU a step's buffers come from the memory that the last step freed.

    glibc gives large ones back to the system, which clears every page when it is asked for again:
    a fifth of the time of a training step (docs/performance.md). Where there is another allocator,
    and on GPU and TPU, whose buffers are not malloc's, nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if mallopt is None or chosen:
        return
    for option, (ours, _) in _MALLOC_OPTIONS.items():
        mallopt(option, ours)
    # Asked only now, because it starts the threads that compute, and each takes an arena for good.
    if jax.default_backend() != "cpu":
        for option, (_, default) in _MALLOC_OPTIONS.items():
            mallopt(option, default)
