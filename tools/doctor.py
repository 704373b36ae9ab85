"""Looks at this machine before a run: packages, devices, memory, disk, cache, browser, speed.

    python -m tools.doctor
    python -m tools.doctor --workdir=runs/quickstart --json

A line for every thing, `ok`, `warn` or `FAIL`; exit code 1 if one failed. Verifier servers have a
doctor of their own: python -m uirl_jax.verifiers.doctor URL.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from uirl_jax import platform_flags

_REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
_MATRIX = 2048  # rows and columns of the timed product
_WRITTEN_BYTES = 64 * 2**20
_LEAST_DISK_GIB = 5.0
_LEAST_MEMORY_GIB = 4.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line."""

    state: Literal["ok", "warn", "FAIL"]
    what: str
    text: str
    advice: str = ""


def packages() -> Finding:
    """Against the versions of requirements.txt."""
    wrong = []
    lines = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        asked = Requirement(line)
        try:
            version = importlib.metadata.version(asked.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{asked.name} is missing")
            continue
        if version not in asked.specifier:
            wrong.append(f"{asked.name} {version}, tested with {asked.specifier}")
    if wrong:
        return Finding("warn", "packages", "; ".join(wrong), "pip install -r requirements.txt")
    jax_version = importlib.metadata.version("jax")
    return Finding("ok", "packages", f"as requirements.txt; jax {jax_version}")


def devices() -> Finding:
    """What JAX computes on, and how much memory a device has."""
    import jax

    found = jax.devices()
    kinds = sorted({device.device_kind for device in found})
    text = f"{len(found)} x {', '.join(kinds)} ({found[0].platform})"
    limit = (found[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return Finding("ok", "devices", f"{text}, {limit / 2**30:.1f} GiB each")
    if found[0].platform != "cpu":
        return Finding("ok", "devices", text)
    hidden = [
        path for path in ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0") if os.path.exists(path)
    ]
    if hidden:
        return Finding(
            "warn",
            "devices",
            f"{text}, though {hidden[0]} is there",
            "install the extra cuda or tpu, and unset JAX_PLATFORMS",
        )
    return Finding("ok", "devices", text)


def memory() -> Finding:
    """Of the host."""
    available = _available_gib()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{available:.1f} GiB free, {cores} cores"
    if available < _LEAST_MEMORY_GIB:
        return Finding("warn", "memory", text, f"the quickstart needs {_LEAST_MEMORY_GIB:g} GiB")
    return Finding("ok", "memory", text)


def _available_gib() -> float:
    """Free for this process: of the machine, or of its cgroup, where that is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else free
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and limit.read_text().strip().isdecimal():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free / 2**30


def disk(workdir: Path) -> Finding:
    """Room and speed where a run would write."""
    folder = workdir.absolute()
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / 2**30
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            started_s = time.monotonic()
            file.write(bytes(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = _WRITTEN_BYTES / 1e6 / max(time.monotonic() - started_s, 1e-9)
    except OSError as error:
        return Finding("FAIL", "disk", f"{folder}: {error.strerror}", "choose another --workdir")
    text = f"{folder}: {free_gib:.0f} GiB free, written at {speed:.0f} MB/s"
    if free_gib < _LEAST_DISK_GIB:
        return Finding("warn", "disk", text, "a full disk ends a run; nothing is lost")
    return Finding("ok", "disk", text)


def cache() -> Finding:
    """Of compiled programs."""
    import jax

    folder = Path(jax.config.jax_compilation_cache_dir or "")
    if not jax.config.jax_enable_compilation_cache or folder == Path():
        return Finding("warn", "cache", "off", "every start compiles all programs again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Finding(
            "warn", "cache", f"{folder}: {error.strerror}", "set JAX_COMPILATION_CACHE_DIR"
        )
    size_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Finding("ok", "cache", f"{folder}: {size_bytes / 2**20:.0f} MiB")


def browser() -> Finding:
    """Chromium and the fonts that pages are drawn with."""
    from uirl_jax.errors import UirlError
    from uirl_jax.verifiers.browser import pool, rendering

    advice = "needed for browser tasks alone: docs/bundled_server.md"
    try:
        executable = pool.find_chromium()
        shown = subprocess.run(
            [str(executable), "--version"], capture_output=True, text=True, timeout=60
        )
    except (UirlError, OSError, subprocess.SubprocessError) as error:
        return Finding("warn", "browser", str(error), advice)
    version = " ".join(shown.stdout.split()[:2]) or str(executable)
    if missing := rendering.missing_fonts():
        fonts = "apt-get install fonts-liberation fonts-dejavu-core"
        return Finding("warn", "browser", f"{version}; no {', '.join(missing)}", fonts)
    return Finding("ok", "browser", f"{version}, both font packages")


def speed() -> Finding:
    """Of a matrix product on the first device, the median of five."""
    import jax
    import jax.numpy as jnp

    parts = []
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((_MATRIX, _MATRIX), dtype)
        product = jax.jit(lambda x: x @ x)
        product(x).block_until_ready()
        seconds = []
        for _ in range(5):
            started_s = time.monotonic()
            product(x).block_until_ready()
            seconds.append(time.monotonic() - started_s)
        rate = 2 * _MATRIX**3 / sorted(seconds)[2] / 1e9
        parts.append(f"{jnp.dtype(dtype).name} {rate:,.0f} GFLOP/s")
    return Finding("ok", "speed", f"{', '.join(parts)} ({_MATRIX} x {_MATRIX} product)")


def findings(workdir: Path) -> Iterator[Finding]:
    """One after the other; a check that raises is a finding, too."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("packages", packages),
        ("devices", devices),
        ("memory", memory),
        ("disk", lambda: disk(workdir)),
        ("cache", cache),
        ("browser", browser),
        ("speed", speed),
    )
    for what, check in checks:
        try:
            yield check()
        except Exception as error:  # a broken installation must not hide the other lines
            first = (str(error).splitlines() or [""])[0]
            yield Finding("FAIL", what, f"{type(error).__name__}: {first[:200]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs"), help="where a run would write"
    )
    parser.add_argument("--json", action="store_true", help="an object for every line instead")
    args = parser.parse_args(argv)
    platform_flags.set_defaults()
    failed = False
    for finding in findings(args.workdir):
        failed |= finding.state == "FAIL"
        content: dict[str, Any] = dataclasses.asdict(finding)
        advice = f" ({finding.advice})" if finding.advice else ""
        line = f"{finding.state:4}  {finding.what:8}  {finding.text}{advice}"
        print(json.dumps(content) if args.json else line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
