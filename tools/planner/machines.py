"""The machines that the planner knows: published rates, hosts, and devices to compile for.

A TPU slice, or several, is compiled for by libtpu, which needs no TPU; a GPU machine has no such
compiler here and is planned by formula alone.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re

import jax

from uirl_jax.errors import ConfigError, one_line
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


_PCIE = 32e9  # 4.0 x16, one direction
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
    "L4": Chip("L4", _PEAK["NVIDIA L4"], 24 * _GB, 300e9, _PCIE, "nvidia.com, L4 datasheet"),
    "L40S": Chip(
        "L40S", _PEAK["NVIDIA L40S"], 48 * _GB, 864e9, _PCIE, "nvidia.com, L40S datasheet"
    ),
    "RTX4090": Chip(
        "GeForce RTX 4090",
        _PEAK["NVIDIA GeForce RTX 4090"],
        24 * _GB,
        1008e9,
        _PCIE,
        "nvidia.com, Ada architecture paper",
    ),
}
TPUS = ("v5e", "v5p", "v6e")
GPUS = ("A100", "H100", "H200", "L4", "L40S", "RTX4090")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine type of Google Cloud with its chips; memory as published."""

    name: str
    chips: int
    memory_bytes: float


# Slices of more chips than one of these are made of the four-chip hosts. On GKE a 2x4 may be two of
# these. Source: cloud.google.com/tpu/docs/v5e, v5p, v6e; cloud.google.com/compute/docs/gpus.
HOSTS = {
    "v5e": (
        Host("ct5lp-hightpu-1t", 1, 48 * _GB),
        Host("ct5lp-hightpu-4t", 4, 192 * _GB),
        Host("ct5lp-hightpu-8t", 8, 384 * _GB),
    ),
    "v5p": (Host("ct5p-hightpu-4t", 4, 448 * _GB),),
    "v6e": (
        Host("ct6e-standard-1t", 1, 176 * _GB),
        Host("ct6e-standard-4t", 4, 720 * _GB),
        Host("ct6e-standard-8t", 8, 1440 * _GB),
    ),
    "A100": (Host("a2-ultragpu-8g", 8, 1360 * _GB),),
    "H100": (Host("a3-highgpu-8g", 8, 1872 * _GB),),
    "H200": (Host("a3-ultragpu-8g", 8, 2952 * _GB),),
    "L4": (Host("g2-standard-96", 8, 384 * _GB),),
    # Not Google Cloud's: a server and a workstation as they are sold.
    "L40S": (Host("server", 8, 1024 * _GB),),
    "RTX4090": (Host("workstation", 4, 256 * _GB),),
}
_FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# Of a v5p any three sizes that libtpu knows.
SLICES = {"v5e": _FLAT_SLICES, "v6e": _FLAT_SLICES}
_ACCEPTED = (
    "v5e:2x4, v5e:4x4, v5p:2x2x1, v6e:2x4 (any slice of v5e, v5p or v6e), 2xv5e:4x4 (two slices), "
    "gpu:8xH100 (of A100, H100, H200, L4, L40S or RTX4090)"
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Slices of TPUs, or hosts of GPUs."""

    topology: str
    chip: Chip
    chips: int  # of all slices
    devices: tuple[jax.Device, ...] | None  # to compile for; None: planned by formula
    host: Host
    slices: int = 1

    @property
    def hosts(self) -> int:
        return -(-self.chips // self.host.chips)


def find_machine(topology: str) -> Machine:
    """The machine that a name like v5e:2x4, 2xv5e:4x4 or gpu:8xH100 stands for.

    Raises: ConfigError with what is accepted, or that libtpu is not installed.
    """
    gpu = re.fullmatch(r"gpu:(\d+)x(\w+)", topology)
    if gpu and gpu[2] in GPUS and int(gpu[1]) > 0:
        return _gpu_machine(topology, gpu[2], int(gpu[1]))
    tpu = re.fullmatch(r"(?:(\d+)x)?(v\w+):(\d+(?:x\d+)+)", topology)
    if not tpu or tpu[2] not in TPUS or tpu[1] == "0":
        raise ConfigError(f"--topology={topology}: not known, accepted are for example {_ACCEPTED}")
    slices, kind, shape = int(tpu[1] or 1), tpu[2], tpu[3]
    if shape not in SLICES.get(kind, (shape,)):
        raise ConfigError(
            f"--topology={topology}: no slice of {kind}, expected one of {', '.join(SLICES[kind])}"
        )
    chips = math.prod(int(size) for size in shape.split("x"))
    host = _host_of(kind, chips)
    if host is None:
        raise ConfigError(
            f"--topology={topology}: {chips} chips, expected a multiple of the 4 of a host"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={topology}: the TPU's compiler is not installed; pip install 'jax[tpu]'"
        )
    devices = _tpu_devices(topology, f"{kind}:{shape}", slices)
    if len(devices) != slices * chips:
        raise ConfigError(
            f"--topology={topology}: libtpu makes {len(devices)} devices of {slices * chips} chips"
        )
    return Machine(topology, CHIPS[kind], slices * chips, devices, host, slices)


def _gpu_machine(topology: str, kind: str, chips: int) -> Machine:
    host = HOSTS[kind][0]
    if chips > host.chips and chips % host.chips:
        raise ConfigError(
            f"--topology={topology}: {chips} GPUs, expected up to {host.chips} or a multiple of "
            f"them: hosts of {host.chips}"
        )
    return Machine(topology, CHIPS[kind], chips, None, host)


def _host_of(kind: str, chips: int) -> Host | None:
    """The machine type that a slice of so many chips is made of; None: of no whole number."""
    hosts = {host.chips: host for host in HOSTS[kind]}
    return hosts.get(chips, None if chips % 4 else hosts[4])


def _tpu_devices(topology: str, one_slice: str, slices: int) -> tuple[jax.Device, ...]:
    """Args: topology: as asked for; one_slice: its libtpu name."""
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
            # libtpu takes a host for four chips; the only smaller one has one chip.
            one_chip = {"chips_per_host_bounds": (1, 1, 1)} if one_slice.endswith(":1x1") else {}
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=one_slice, num_slices=slices, **one_chip
            )
    except Exception as error:  # libtpu raises nothing narrower
        reason = one_line(error)
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
