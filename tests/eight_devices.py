"""Eight fake devices on the CPU, shared by tests of sharding."""

import os
import pathlib
import subprocess
import sys


def on_eight_devices(function: str, module: str) -> subprocess.CompletedProcess[str]:
    """A function of a test file in a process of its own: the device count is fixed at its start."""
    flags = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            # Every program runs once or twice: compiled fast, not to run fast.
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", f"from tests import {module}; {module}.{function}()"],
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=900,
    )
