"""Runs a learner of several processes on this machine, on records that were written before.

For `hosts` and for the tests of such learners.
"""

import hashlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.bench import cluster_config
from uirl_jax.actor.admission import group_id
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.families import qwen2_vl
from uirl_jax.models import weights
from uirl_jax.run import open_run
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

Values = Mapping[str, Any]  # of the config, by dotted name
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("cluster_config.py")
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def screenshot(rng: np.random.Generator, size_px: tuple[int, int]) -> tuple[str, bytes]:
    file = io.BytesIO()
    pixels = rng.integers(0, 256, (size_px[1] // 4, size_px[0] // 4, 3), np.uint8)
    Image.fromarray(pixels.repeat(4, 0).repeat(4, 1)).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest(), file.getvalue()


def trajectory(
    rng: np.random.Generator, cfg, group: int, member: int, size_px: tuple[int, int], visual: int
) -> Trajectory:
    """One or two turns, each with a screenshot of its own."""
    images, turns = {}, []
    context: list[int] = []
    for _ in range(1 + (group + member) % 2):
        images |= dict([screenshot(rng, size_px)])
        text = rng.integers(10, 200, 5)
        context = [*context, *text, cfg.vision_start_token_id, *[cfg.image_token_id] * visual]
        context += [cfg.vision_end_token_id, *rng.integers(10, 200, 3)]
        sampled = rng.integers(10, 200, int(rng.integers(2, 6)))
        turns.append(
            Turn(
                context_ids=np.array(context, np.int32),
                token_ids=sampled.astype(np.int32),
                logprobs=-rng.exponential(4, len(sampled)).astype(np.float32),
                full_logprobs=-rng.exponential(4, len(sampled)).astype(np.float32),
                policy_versions=np.zeros(len(sampled), np.int32),
                image_keys=tuple(images),
                text="click(1, 2)",
                action=None,
            )
        )
        context += sampled.tolist()
    return Trajectory(
        episode_id=f"{group:04d}{member:04d}".rjust(32, "0"),
        group_id=group_id(group),
        task=TaskSpec("desktop/click_button", seed=group),
        instruction="Click the red button.",
        turns=tuple(turns),
        images=images,
        image_tokens=dict.fromkeys(images, visual),
        stop_reason=StopReason.COMPLETED,
        reward=float(rng.integers(0, 2)),
        success=False,
    )


def write_records(
    workdir: Path, values: Values, *, groups: int = 40, size_px=(56, 56), visual: int = 4
) -> None:
    """A run in the workdir whose shards hold so many groups of four."""
    cfg = config_of(values)
    model_dir = Path(cfg.model.path)
    model_cfg = qwen2_vl.FAMILY.read_config(model_dir)
    run_id = open_run(workdir, cfg)
    writer = ShardWriter(
        open_store(workdir), "a0", run_id, weights.base_hash(model_dir), layout=layout_of(model_cfg)
    )
    for group in range(groups):
        rng = np.random.default_rng(group)
        writer.publish([trajectory(rng, model_cfg, group, m, size_px, visual) for m in range(4)])


def config_of(values: Values) -> RunConfig:
    """The config of tools/bench/cluster_config.py with its overrides, as `main` reads it."""
    cfg = cluster_config.get_config()
    cfg.update_from_flattened_dict({f"{name}": value for name, value in values.items()})
    return reading.from_config(RunConfig, cfg)


def flags_of(values: Values) -> list[str]:
    return [f"--config.{name}={value}" for name, value in values.items()]


def environment(devices: int) -> dict[str, str]:
    flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(
    workdir: Path, values: Values, *, processes: int, **how: Any
) -> list[subprocess.Popen[str]]:
    """Starts all processes of a learner; see `start_one`."""
    port = free_port()
    return [
        start_one(workdir, values, index, processes=processes, port=port, **how)
        for index in range(processes)
    ]


def start_one(
    workdir: Path,
    values: Values,
    index: int,
    *,
    processes: int,
    port: int,
    devices: int = 1,
    module: str = "uirl_jax.main",
    directly: bool = False,
    role: str = "learner",
    config: Path = CONFIG,
) -> subprocess.Popen[str]:
    """Starts one process of a learner; its output goes to <workdir>-<index>.txt.

    Args:
        directly: without the parent that each process of a cluster has, which saves its imports.
    """
    cluster = [
        f"--coordinator=127.0.0.1:{port}",
        f"--num_processes={processes}",
        f"--process_index={index}",
    ]
    with output_of(workdir, index).open("w") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", module, f"--role={role}"),
                *(f"--config={config}", f"--workdir={workdir}"),
                *(cluster if processes > 1 else []),
                *([f"--exit_with_parent={os.getpid()}"] if directly else []),
                *flags_of(values),
            ],
            cwd=ROOT,
            env=environment(devices),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def output_of(workdir: Path, index: int) -> Path:
    return workdir.with_name(f"{workdir.name}-{index}.txt")


def wait(started: Sequence[subprocess.Popen[str]], timeout_s: float = 400.0) -> list[int]:
    """Exit codes; what does not end in time is killed. Raises: subprocess.TimeoutExpired."""
    deadline_s = time.monotonic() + timeout_s
    try:
        return [p.wait(max(0.1, deadline_s - time.monotonic())) for p in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
