"""Flags that XLA reads once, when JAX first uses a device: set before that, by every command.

What the user has set stays. Imports nothing of JAX.
"""

import os

# Matrix products by oneDNN: up to 3 times as fast on a busy machine, no difference that could be
# told from noise on an idle one (docs/performance.md).
_CPU_FLAGS = {"--xla_cpu_use_onednn": "true"}


def set_defaults() -> None:
    """Adds to XLA_FLAGS what it does not say yet."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in _CPU_FLAGS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
