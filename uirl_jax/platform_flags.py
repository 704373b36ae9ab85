"""Settings of XLA and JAX for every command, made before the first use of a device.

What the user has set in the environment stays.
"""

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
