"""Starts the command as a user does, in processes of its own, and checks what a run leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from tests import tiny_model
from uirl_jax.shards import journal
from uirl_jax.store import open_store

ROOT = Path(__file__).parents[1]
SHIPPED_MODEL = ROOT / "uirl_jax" / "assets" / "tiny-ui-base"
STEPS, GROUPS, MEMBERS = 4, 2, 4  # of tiny_config


def command(
    workdir: Path, model_dir: Path | str, *arguments: str, config: Path = tiny_model.CONFIG
) -> list[str]:
    return [
        *(sys.executable, "-m", "uirl_jax.main", f"--config={config}"),
        *(f"--workdir={workdir}", f"--config.model.path={model_dir}", *arguments),
    ]


def run(
    workdir: Path,
    model_dir: Path | str,
    *arguments: str,
    devices: int = 1,
    config: Path = tiny_model.CONFIG,
) -> subprocess.CompletedProcess[str]:
    more_flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {more_flags}",
    }
    return subprocess.run(
        command(workdir, model_dir, *arguments, config=config),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def start(arguments: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=log)


def assert_whole(workdir: Path, process: subprocess.CompletedProcess[str]) -> dict:
    """A finished run: every record trained once, in every account of it."""
    assert process.returncode == 0, process.stderr[-2000:]
    summary = json.loads((workdir / "summary.json").read_text())
    episodes = summary["episodes"]
    assert episodes["trained"] == STEPS * GROUPS * MEMBERS
    fates = ("trained", "stale", "quarantined", "duplicate", "pending")
    assert episodes["published"] == sum(episodes[name] for name in fates)
    assert metric_by_step(workdir, "step") == list(range(1, STEPS + 1))
    shards = [line.shard for line in journal.Journal(open_store(workdir)).lines]
    assert len(shards) == len(set(shards))
    assert summary["before"]["attempts"] == summary["after"]["attempts"] == 4
    assert (workdir / "report.html").stat().st_size > 1000
    return summary


def metric_by_step(workdir: Path, name: str) -> list[float]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # The line of step 0 is the evaluation of the base.
    assert [row["step"] for row in rows if "reward/mean" not in row] in ([], [0])
    return [row[name] for row in rows if "reward/mean" in row]
