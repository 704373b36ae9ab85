"""XLA and JAX settings for every command, applied before the first use of a device.

Settings in the user's environment have priority.
"""

import ctypes
import os
from pathlib import Path

import jax

# Matrix products by oneDNN: up to 3 times as fast on a busy machine, no measurable difference on an
# idle one (docs/performance.md).
_CPU_FLAGS = {"--xla_cpu_use_onednn": "true"}

# Compiled programs are cached on disk, so that a restart or another role on the machine does not
# compile them again. The oldest are deleted above this size.
_CACHE_SIZE_BYTES = 4 * 2**30
_CACHED_FROM_S = 0.1  # compile time; JAX's default of 1 s leaves out dozens of small programs

# mallopt options (malloc.h): number -> (our value, glibc's default).
_MALLOC_OPTIONS = {
    -4: (0, 65_536),  # M_MMAP_MAX; 0: no buffers by mmap, which are returned when freed
    -8: (1, 8 * (os.cpu_count() or 1)),  # M_ARENA_MAX: other arenas cannot hold a large buffer
    -1: (-1, 128 * 2**10),  # M_TRIM_THRESHOLD, bytes free at the heap's end; -1: never returned
    -2: (64 * 2**20, 128 * 2**10),  # M_TOP_PAD, bytes by which the heap grows in advance
}


def set_defaults() -> None:
    """Sets XLA's flags and the cache of compiled programs.

    The cache is JAX_COMPILATION_CACHE_DIR, by default a directory in XDG_CACHE_HOME or ~/.cache;
    JAX_ENABLE_COMPILATION_CACHE=false disables it.
    """
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in _CPU_FLAGS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Environment variables would be too late: JAX reads them when it is imported.
    for name, value in {
        "jax_compilation_cache_dir": str(user_cache / "uirl_jax" / "compiled"),
        "jax_compilation_cache_max_size": _CACHE_SIZE_BYTES,
        "jax_persistent_cache_min_compile_time_secs": _CACHED_FROM_S,
    }.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def keep_freed_memory() -> None:
    """On the CPU, lets each step reuse the memory that the last step freed.

    glibc returns large buffers to the system, which clears every page when it is allocated again:
    a fifth of a training step's time (docs/performance.md). No effect with another allocator, and
    on GPU and TPU, whose buffers are not allocated by malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if mallopt is None or chosen:
        return
    for option, (ours, _) in _MALLOC_OPTIONS.items():
        mallopt(option, ours)
    # Last, because this starts the compute threads, and each keeps the arena that it gets.
    if jax.default_backend() != "cpu":
        for option, (_, default) in _MALLOC_OPTIONS.items():
            mallopt(option, default)
