"""The algorithms on one task from one start: success before and after, with its interval.

    python -m tools.bench algorithms --workdir=runs/algorithms --json=algorithms.json

Every run is `uirl_jax.main` with a config and a workdir of its own, one after the other; what is
finished is not repeated, what was interrupted carries on. All of them play the same number of
episodes a step from the shipped base and are evaluated, greedy, on the same held-out instances.
Replaced groups (DAPO, rejection sampling) are episodes on top: they are in the table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ALGORITHMS = (
    *("rejection_sampling", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp"),
)


def add_command(commands: Any) -> None:
    """`algorithms`, among the commands of tools.bench."""
    comparing = commands.add_parser("algorithms", help="what every algorithm reaches, seed by seed")
    comparing.add_argument("--workdir", type=Path, required=True, help="of the runs; they resume")
    comparing.add_argument("--names", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    comparing.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    comparing.add_argument("--steps", type=int, default=40, help="of 64 episodes each")
    comparing.add_argument("--json", type=Path, help="write the numbers here too")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing; by algorithm and seed the run's summary."""
    result: dict[str, Any] = {"steps": args.steps, "runs": {}}
    for seed in args.seeds:  # all algorithms once before any a second time
        for name in args.names:
            workdir = args.workdir / f"{name}-{args.steps}-{seed}"
            summary = workdir / "summary.json"
            if not summary.is_file():
                print(f"run={name} seed={seed} steps={args.steps}", flush=True)
                _run(name, seed, args.steps, workdir)
            result["runs"].setdefault(name, {})[str(seed)] = _row(json.loads(summary.read_text()))
    return result


def _run(name: str, seed: int, steps: int, workdir: Path) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "uirl_jax.main", f"--config=configs/{name}.py"),
        *(f"--workdir={workdir}", f"--config.seed={seed}", f"--config.learner.steps={steps}"),
    ]
    with (workdir / "bench.log").open("ab") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}: see {log.name}")


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "before": summary["before"],
        "after": summary["after"],
        "train_seconds": summary["train_seconds"],
        "episodes": summary["episodes"]["trained"],
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['steps']} steps; successes of held-out instances, 95 % interval",
        f"{'':20s}{'seed':>5s}{'before':>10s}{'after':>10s}{'interval':>18s}{'episodes':>10s}"
        f"{'train s':>9s}",
    ]
    for name, seeds in result["runs"].items():
        for seed, row in seeds.items():
            before, after = row["before"], row["after"]
            interval = f"{after['low']:.1%} - {after['high']:.1%}"
            lines.append(
                f"{name:20s}{seed:>5s}{before['rate']:>10.1%}{after['rate']:>10.1%}{interval:>18s}"
                f"{row['episodes']:>10d}{row['train_seconds']:>9.0f}"
            )
    return "\n".join(lines)
