"""The machines that the planner knows: published rates, and devices to compile for.

A TPU slice is compiled for by libtpu, which needs no TPU; a GPU machine has no such compiler here
and is planned by formula alone.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re

import jax

from uirl_jax.errors import ConfigError
from uirl_jax.learner.mfu import PEAK_FLOPS_PER_S as _PEAK


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published rates of one chip; FLOPs of dense bfloat16 products."""

    name: str
    flops_per_s: float
    hbm_bytes: float  # what a program may use
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # all links together, one direction
    source: str


_CLOUD = "cloud.google.com/tpu/docs"
_GIB, _GB = 2**30, 1e9
# HBM of the TPUs: what libtpu leaves to a program of 16, 95 and 32 GiB. Interconnect: half of the
# bidirectional rate that is published.
CHIPS = {
    "v5e": Chip("TPU v5e", _PEAK["TPU v5 lite"], 15.75 * _GIB, 819e9, 200e9, f"{_CLOUD}/v5e"),
    "v5p": Chip("TPU v5p", _PEAK["TPU v5"], 95 * _GIB, 2765e9, 600e9, f"{_CLOUD}/v5p"),
    "v6e": Chip("TPU v6e", _PEAK["TPU v6 lite"], 31.25 * _GIB, 1638e9, 400e9, f"{_CLOUD}/v6e"),
    "A100": Chip(
        "A100 80GB SXM", _PEAK["NVIDIA A100"], 80 * _GB, 2039e9, 300e9, "nvidia.com, A100 datasheet"
    ),
    "H100": Chip(
        "H100 80GB SXM", _PEAK["NVIDIA H100"], 80 * _GB, 3350e9, 450e9, "nvidia.com, H100 datasheet"
    ),
    "H200": Chip(
        "H200 SXM", _PEAK["NVIDIA H200"], 141 * _GB, 4800e9, 450e9, "nvidia.com, H200 datasheet"
    ),
}
TPUS = ("v5e", "v5p", "v6e")
GPUS = ("A100", "H100", "H200")
_ACCEPTED = (
    "v5e:2x4, v5e:4x4, v5p:2x2x1, v6e:2x4 (any slice of v5e, v5p or v6e), gpu:8xH100 (of A100, "
    "H100 or H200)"
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A slice of TPUs or a host of GPUs."""

    topology: str
    chip: Chip
    chips: int
    devices: tuple[jax.Device, ...] | None  # to compile for; None: planned by formula


def find_machine(topology: str) -> Machine:
    """The machine that a name like v5e:2x4 or gpu:8xH100 stands for.

    Raises: ConfigError with what is accepted, or that libtpu is not installed.
    """
    gpu = re.fullmatch(r"gpu:(\d+)x(\w+)", topology)
    if gpu and gpu[2] in GPUS and int(gpu[1]) > 0:
        return Machine(topology, CHIPS[gpu[2]], int(gpu[1]), None)
    tpu = re.fullmatch(r"(v\w+):(\d+(?:x\d+)+)", topology)
    if not tpu or tpu[1] not in TPUS:
        raise ConfigError(f"--topology={topology}: not known, accepted are for example {_ACCEPTED}")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={topology}: the TPU's compiler is not installed; pip install 'jax[tpu]'"
        )
    chips = math.prod(int(size) for size in tpu[2].split("x"))
    devices = _tpu_devices(topology)
    if len(devices) != chips:
        raise ConfigError(
            f"--topology={topology}: libtpu makes {len(devices)} devices of {chips} chips"
        )
    return Machine(topology, CHIPS[tpu[1]], chips, devices)


def _tpu_devices(topology: str) -> tuple[jax.Device, ...]:
    from jax.experimental import topologies

    # libtpu asks a server of the cloud otherwise, and says on stderr that it is not there.
    defaults = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        with _quiet_stderr():
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu raises nothing narrower
        reason = " ".join(str(error).split())
        if "lockfile" in reason or "in use" in reason:
            raise ConfigError(
                f"--topology={topology}: another process uses libtpu (/tmp/libtpu_lockfile)"
            ) from None
        raise ConfigError(
            f"--topology={topology}: libtpu does not know it ({reason[:120]}); accepted are for "
            f"example {_ACCEPTED}"
        ) from None
    return tuple(found.devices)


@contextlib.contextmanager
def _quiet_stderr():
    """libtpu writes a dozen lines past Python when it starts."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
