"""Does a run fit a machine, and how fast could it be? Asked of the TPU's compiler, without a TPU.

    python -m tools.plan --config=configs/grpo_qwen2vl_2b.py --topology=v5e:2x4
    python -m tools.plan --config=... --topology=v6e:2x4 --search --json=plan.json
    python -m tools.plan --config=... --topology=gpu:8xH100

Needs the `libtpu` wheel (pip install 'jax[tpu]'), no TPU and no weights: the learner's `score` and
gradients and the engine's sampling program are compiled for the slice on this host, some minutes
each. model.path may be a directory with nothing but a config.json, or be named like a published
model. Times are bounds: all of a program's FLOPs, HBM bytes and interconnect bytes at the chip's
published rates, the three of them overlapping perfectly. GPU machines are planned by formula.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: the TPU is only compiled for

from absl import app, flags

from tools import plan_machines, plan_programs, plan_report, plan_search
from tools.plan_machines import Machine
from uirl_jax import config
from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.models.qwen2_vl import Qwen2VLConfig
from uirl_jax.run_config import RunConfig

TRAINING = ("score", "gradients")
_MOST_CHANGES = 4  # compiled to find one that fits; a compilation takes minutes


def make_plan(
    cfg: RunConfig,
    model_cfg: Qwen2VLConfig,
    machine: Machine,
    programs: tuple[str, ...],
    say: Callable[[str], None],
    texts_dir: Path | None = None,
) -> dict[str, Any]:
    """The plan of one config on one machine."""
    run = plan_programs.abstract_run(cfg, model_cfg, machine.chips, machine.devices)
    if machine.devices is None:
        return plan_report.plan_by_formula(run, machine)
    compiled = plan_programs.compile_programs(run, programs, say)
    for program in compiled:
        if texts_dir is not None and program.text:
            texts_dir.mkdir(parents=True, exist_ok=True)
            (texts_dir / f"{program.name}.txt").write_text(program.text, encoding="utf-8")
    return plan_report.plan_compiled(run, machine, compiled)


def find_nearest_change(
    cfg: RunConfig,
    model_cfg: Qwen2VLConfig,
    machine: Machine,
    plan: dict[str, Any],
    say: Callable[[str], None],
) -> str:
    """The first change that makes everything fit that does not, in words."""
    sizes = plan["mesh"]
    found = []
    broken = [name for name, entry in plan["programs"].items() if not entry["fits"]]
    for kind in (TRAINING, ("sample",)):
        failed = [name for name in kind if name in broken]
        if not failed:
            continue
        changes = plan_search.nearest_changes(cfg, failed[0], sizes["data"] * sizes["fsdp"])
        for (words, changed), _ in zip(changes, range(_MOST_CHANGES), strict=False):
            say(f"trying {words}")
            again = tuple(name for name in kind if name in plan["programs"])
            if make_plan(changed, model_cfg, machine, again, say)["fits"]:
                found.append(words)
                break
        else:
            found.append(f"none of up to {_MOST_CHANGES} changes makes {failed[0]} fit")
    return "; ".join(found)


def search(
    cfg: RunConfig,
    model_cfg: Qwen2VLConfig,
    machine: Machine,
    most: int,
    say: Callable[[str], None],
) -> list[tuple[str, dict[str, Any]]]:
    """Ranks the candidates by formula, compiles the first `most`; the best that fits first."""
    ranked = []
    for words, changed in plan_search.candidates(cfg, machine.chips):
        run = plan_programs.abstract_run(changed, model_cfg, machine.chips, machine.devices)
        plan = plan_report.plan_by_formula(run, machine)
        if plan["peak_bytes"] <= 1.1 * machine.chip.hbm_bytes:  # the estimate may be too high
            ranked.append((words, changed, plan))
    ranked.sort(key=lambda entry: -entry[2]["step"]["tokens_per_s"])
    say(f"search: {len(ranked)} candidates may fit by formula")
    if machine.devices is None:
        fitting = [(words, plan) for words, _, plan in ranked if plan["fits"]]
        return fitting[:most]
    tried = []
    for number, (words, changed, _) in enumerate(ranked[:most], start=1):
        say(f"search {number}/{min(most, len(ranked))}: {words}")
        plan = make_plan(changed, model_cfg, machine, TRAINING, say)
        if "step" in plan:
            tried.append((words, plan))
    tried.sort(key=lambda entry: (not entry[1]["fits"], -entry[1]["step"]["tokens_per_s"]))
    return tried


# ------------------------------------------------------------------------------------ the command

_CONFIG = config.define_config_file(
    RunConfig, help="an experiment, e.g. configs/grpo_qwen2vl_2b.py"
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "v5e:2x4, v5p:2x2x1, v6e:4x4, gpu:8xH100, ...")
_SEARCH = flags.DEFINE_bool("search", False, "also try rows, remat and meshes")
_MOST = flags.DEFINE_integer("search_compiles", 4, "candidates to compile", lower_bound=1)
_SAMPLING = flags.DEFINE_bool("sampling", True, "also compile the engine's program")
_JSON = flags.DEFINE_string("json", None, "write the numbers here too")
_TEXTS = flags.DEFINE_string("texts", None, "write the compiled programs into this directory")


def main(argv: list[str]) -> int:
    del argv
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:4.0f} s] {line}", flush=True)

    try:
        if _CONFIG.value is None or _TOPOLOGY.value is None:
            raise ConfigError(
                "--config and --topology are needed; e.g. --config=configs/grpo_qwen2vl_2b.py "
                "--topology=v5e:2x4"
            )
        cfg = config.from_config(RunConfig, _CONFIG.value)
        model_cfg = plan_programs.read_model_config(cfg.model.path)
        machine = plan_machines.find_machine(_TOPOLOGY.value)
        programs = plan_programs.PROGRAMS if _SAMPLING.value else TRAINING
        texts_dir = Path(_TEXTS.value) if _TEXTS.value else None
        plan = make_plan(cfg, model_cfg, machine, programs, say, texts_dir)
        if not plan["fits"] and machine.devices is not None:
            plan["nearest_change"] = find_nearest_change(cfg, model_cfg, machine, plan, say)
        print(plan_report.format_plan(plan), flush=True)
        if "nearest_change" in plan:
            print(f"nearest change that fits: {plan['nearest_change']}")
        if _SEARCH.value:
            plan["search"] = []
            for words, found in search(cfg, model_cfg, machine, _MOST.value, say):
                plan["search"].append({"change": words, **found})
                print(
                    f"  {'fits        ' if found['fits'] else 'does not fit'} "
                    f"{found['peak_bytes'] / plan_report.GIB:6.2f} GiB "
                    f"{found['step']['tokens_per_s']:9.0f} tokens/s at most  {words}"
                )
            best = next((entry for entry in plan["search"] if entry["fits"]), None)
            print(f"best that fits: {best['change'] if best else 'none of those tried'}")
        if _JSON.value:
            Path(_JSON.value).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        return 0
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    app.run(main, flags_parser=config.parse_flags)
