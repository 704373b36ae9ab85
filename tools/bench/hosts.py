"""A learner of 1, 2 and 4 processes on one machine, on the same records.

    python -m tools.bench hosts --steps=12 --json=hosts.json

The quickstart's base model trains on records with larger screenshots, so that the hosts' own work
counts: reading records, decoding screenshots, building batches. Printed are steps a minute and the
processor seconds of that work on process 0 and on the busiest other one. The processes share this
machine's cores: steps a minute say what coordination costs here, not how fast a pod is.
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tools.bench import cluster_world
from uirl_jax import assets

SCREEN_PX = (644, 420)  # 23 x 15 visual tokens of 28 x 28 pixels
VISUAL_TOKENS = 23 * 15
PROCESSES = (1, 2, 4)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12, help="the first three are left out")
    parser.add_argument("--groups", type=int, default=4, help="of four episodes, in a step")


def run(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        shutil.copytree(assets.find("asset:tiny-ui-base"), model_dir)
        preprocessor = model_dir / "preprocessor_config.json"
        settings = json.loads(preprocessor.read_text())
        settings["size"]["longest_edge"] = 2**21  # pixels; the asset's own is 512 x 512
        preprocessor.write_text(json.dumps(settings))
        for count in PROCESSES:
            values = _values(model_dir, args)
            workdir = Path(folder) / f"run{count}"
            cluster_world.write_records(
                workdir,
                values,
                groups=args.groups * args.steps,
                size_px=SCREEN_PX,
                visual=VISUAL_TOKENS,
            )
            started = cluster_world.start(workdir, values, processes=count, devices=4 // count)
            codes = cluster_world.wait(started, 1800)
            output = cluster_world.output_of(workdir, 0).read_text()
            if codes != [0] * count:
                raise SystemExit(f"error: {count} processes ended with {codes}: {output[-2000:]}")
            results[str(count)] = _measured(workdir, count, cluster_world.output_of)
    return {"processes": results, "screen_px": SCREEN_PX, "episodes_a_step": 4 * args.groups}


def _values(model_dir: Path, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model.path": str(model_dir),
        "learner.steps": args.steps,
        "learner.groups_per_step": args.groups,
        "learner.batch.rows": 4,
        "learner.batch.row_lengths": (2 * VISUAL_TOKENS + 64,),
        "learner.batch.image_rows": (8,),
        "learner.batch.patch_lengths": (4 * VISUAL_TOKENS,),
        "engine.image_row_patches": 4 * VISUAL_TOKENS,
        "model.remat": "full",
    }


def _measured(workdir: Path, count: int, output_of: Any) -> dict[str, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()][3:]
    others = [
        float(re.findall(r"host_cpu_s_a_step=(\S+)", output_of(workdir, index).read_text())[0])
        for index in range(1, count)
    ]
    return {
        "steps_a_minute": 60 / statistics.median(row["time/step_s"] for row in rows),
        "host_cpu_s_process_0": statistics.median(row["time/host_cpu_s"] for row in rows),
        "host_cpu_s_others": max(others, default=0.0),
        "save_s": statistics.median(row["time/save_and_publish_s"] for row in rows),
    }


def format_table(result: dict[str, Any]) -> str:
    lines = ["processes  steps a minute  host CPU s a step: process 0  busiest other   save s"]
    for count, row in result["processes"].items():
        lines.append(
            f"{count:>9}  {row['steps_a_minute']:14.1f}  {row['host_cpu_s_process_0']:28.3f}"
            f"  {row['host_cpu_s_others']:13.3f}  {row['save_s']:7.2f}"
        )
    return "\n".join(lines)
