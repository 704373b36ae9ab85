"""The algorithms on one task from one start: success before and after, with its interval.

    python -m tools.bench algorithms --workdir=runs/algorithms --json=algorithms.json
    python -m tools.bench algorithms --task=enter_text --workdir=runs/algorithms
    python -m tools.bench algorithms --staleness 0 1 4 16 --names grpo --workdir=runs/algorithms
    python -m tools.bench algorithms --task=popup --ablations --workdir=runs/ablations
    python -m tools.bench algorithms --task=miniwob --base=runs/miniwob-base/cold_start/model ...

Every run is `uirl_jax.main` with a config and a workdir of its own; what is finished is not
repeated, what was interrupted carries on. All of them play the same number of episodes a step from
the same base and are evaluated, greedy, on the same held-out instances. Replaced groups (DAPO,
rejection sampling) are episodes on top: they are in the table.

The bases of enter_text and popup are made first, by cold starts (`configs/sft.py:enter_text`):
the shipped one has never seen a field. The last cold start of each context policy is its own,
and shows it the contexts that it will see. miniwob starts from `--base`, which
configs/miniwob_cpu.py:base makes.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALGORITHMS = (
    *("rejection_sampling", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp"),
    *("maxrl", "gigpo"),
)
# By the name of a table: the config string that is played.
TASKS = {
    "click_button": "click_button",
    "enter_text": "enter_text,words=2",
    "popup": "enter_text,words=2,popup=1",
    "miniwob": "miniwob",
}
# By the name of a table: the cold starts that its base needs, one after the other; their tasks,
# steps and flags. From twenty words a base learns where the field and the button are and types
# always the same one; from 110 steps with two it reads, most of the time, which of them is asked
# for (after 80 steps it does not yet, after 160 it is done). Behind a popup the same 110 steps
# leave nothing to learn (166 of 200 sampled episodes), so one click of five misses there.
COLD_STARTS = {
    "enter_text": (("enter_text", 300, ()), ("enter_text,words=2", 110, ())),
    "popup": (
        ("enter_text,popup=1", 300, ()),
        ("enter_text,words=2,popup=1", 110, ("--config.cold_start.quality=0.8",)),
    ),
}
COLD_START_FLAGS = (
    *("--config.cold_start.train=all", "--config.cold_start.optimizer.name=muon"),
    *("--config.cold_start.episodes_per_step=8", "--config.learner.batch.rows=4"),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One line of the table, for every seed one run."""

    label: str
    algorithm: str
    flags: tuple[str, ...] = ()
    base: str = "base"  # directory of the model that it starts from
    base_flags: tuple[str, ...] = ()  # of the run and of its base's cold start


def _context(most: int, dropped: int) -> tuple[str, ...]:
    return (
        f"--config.chat.max_screenshots={most}",
        f"--config.chat.drop_screenshots={dropped}",
    )


_FILTER = ("--config.algorithm.skip_equal_groups=True",)
_STALE = ("--config.learner.max_staleness=4", "--config.actor.policy_lag=4")
ABLATIONS = (
    Variant("all", "grpo", _FILTER),
    Variant("no-kl", "grpo", (*_FILTER, "--config.algorithm.loss.kl_coefficient=0.0")),
    Variant("no-filter", "grpo"),
    Variant("staleness-4", "grpo", (*_FILTER, *_STALE)),
    Variant("history-1", "grpo", _FILTER, "base-history-1", _context(1, 1)),
    Variant("history-3-sliding", "grpo", _FILTER, "base-history-3-sliding", _context(3, 1)),
    Variant("history-3-chunked", "grpo", _FILTER, "base-history-3-chunked", _context(3, 2)),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="of the runs; they resume")
    add("--task", choices=TASKS, default="click_button")
    add("--base", type=Path, help="start from this model, in place of the task's own")
    add("--names", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    add("--staleness", type=int, nargs="+", help="compare these, with and without the correction")
    add("--ablations", action="store_true", help="compare GRPO without one thing at a time")
    add("--seeds", type=int, nargs="+", default=(0, 1, 2))
    add("--steps", type=int, default=30, help="of 32 to 128 episodes each: a task's config")
    add("--at_once", type=int, default=1, help="runs side by side, each on its share of the cores")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing; by variant and seed the run's summary."""
    chosen = ABLATIONS if args.ablations else variants(args.names, args.staleness)
    if args.task == "miniwob" and args.base is None:
        raise SystemExit(
            "error: --task=miniwob needs --base; configs/miniwob_cpu.py:base makes one"
        )
    if args.base and args.ablations:
        raise SystemExit("error: --ablations make a base for each context policy: leave --base out")
    bases = {}
    if args.base:
        bases = {variant.base: args.base for variant in chosen}
    elif args.task in COLD_STARTS:
        bases = {variant.base: _make_base(args, variant) for variant in chosen}
    jobs = [(variant, seed) for seed in args.seeds for variant in chosen]
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= args.at_once <= len(cores):
        raise SystemExit(f"error: --at_once={args.at_once}: expected 1 to {len(cores)}, the cores")
    shares = [cores[n :: args.at_once] for n in range(args.at_once)]

    def run_share(number: int) -> None:
        while jobs:
            variant, seed = jobs.pop(0)  # all variants once before any a second time
            flags = [*variant.flags, *variant.base_flags, f"--config.seed={seed}"]
            flags += [f"--config.learner.steps={args.steps}"]
            if variant.base in bases:
                flags.append(f"--config.model.path={bases[variant.base]}")
            config = f"{variant.algorithm}:{TASKS[args.task]}"
            _run(config, flags, _workdir(args, variant, seed), shares[number])

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(run_share, range(args.at_once)))
    runs = {
        variant.label: {str(seed): _row(_workdir(args, variant, seed)) for seed in args.seeds}
        for variant in chosen
    }
    return {"task": args.task, "steps": args.steps, "at_once": args.at_once, "runs": runs}


def variants(names: Sequence[str], staleness: Sequence[int] | None) -> list[Variant]:
    """The algorithms as they are, or each at every staleness with and without the correction."""
    if staleness is None:
        return [Variant(name, name) for name in names]
    made = []
    for name in names:
        for versions in staleness:
            flags = (
                f"--config.learner.max_staleness={versions}",
                f"--config.actor.policy_lag={versions}",
            )
            made.append(Variant(f"{name}-stale{versions}", name, flags))
            if versions:
                plain = (*flags, "--config.algorithm.loss.importance=none")
                made.append(Variant(f"{name}-stale{versions}-uncorrected", name, plain))
    return made


def _workdir(args: argparse.Namespace, variant: Variant, seed: int) -> Path:
    return args.workdir / args.task / f"{variant.label}-{args.steps}-{seed}"


def _make_base(args: argparse.Namespace, variant: Variant) -> Path:
    """The model that a variant of the task starts from, made once a workdir."""
    cores, base = sorted(os.sched_getaffinity(0)), None
    last = len(COLD_STARTS[args.task]) - 1
    for number, (task, steps, own_flags) in enumerate(COLD_STARTS[args.task]):
        own = number == last  # what comes before is the same for all of them
        flags = [*COLD_START_FLAGS, *own_flags, f"--config.cold_start.steps={steps}"]
        flags += variant.base_flags if own else ()
        flags += [f"--config.model.path={base}"] if base else []
        workdir = args.workdir / args.task / f"{variant.base if own else 'base'}-{number}"
        _run(f"sft:{task}", flags, workdir, cores)
        base = workdir / "cold_start" / "model"
    return base


def _run(config: str, flags: Sequence[str], workdir: Path, cores: Sequence[int]) -> None:
    if (workdir / "summary.json").is_file():
        return
    print(f"run={workdir}", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    command = [
        *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "uirl_jax.main"),
        *(f"--config={config}", f"--workdir={workdir}", *flags),
    ]
    with (workdir / "bench.log").open("ab") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}: see {log.name}")


def _row(workdir: Path) -> dict[str, Any]:
    """What a run came to; its staleness and training success are means over all its steps."""
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps if name in step)

    return {
        "before": summary["before"],
        "after": summary["after"],
        "train_seconds": summary["train_seconds"],
        "episodes": summary["episodes"]["trained"],
        "success_while_training": mean("success/mean"),
        "staleness": mean("offpolicy/staleness"),
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['task']}, {result['steps']} steps; greedy successes of held-out instances",
        f"{'':26s}{'seed':>5s}{'before':>10s}{'after':>10s}{'95 % interval':>18s}"
        f"{'training':>10s}{'stale':>7s}{'episodes':>10s}{'train s':>9s}",
    ]
    for name, seeds in result["runs"].items():
        for seed, row in seeds.items():
            before, after = row["before"], row["after"]
            interval = f"{after['low']:.1%} - {after['high']:.1%}"
            lines.append(
                f"{name:26s}{seed:>5s}{before['rate']:>10.1%}{after['rate']:>10.1%}{interval:>18s}"
                f"{row['success_while_training']:>10.1%}{row['staleness']:>7.1f}"
                f"{row['episodes']:>10d}{row['train_seconds']:>9.0f}"
            )
    return "\n".join(lines)
