"""The plan of a config on a machine, the nearest change that fits it, and the search for the best.

Puts the files of this room together: what is compiled (programs), what its text says (hlo), what
is known by formula (model), what is printed (report), and which changes are tried (search).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.planner import programs as plan_programs
from tools.planner import report as plan_report
from tools.planner import search as plan_search
from tools.planner.families import PlannedModel
from tools.planner.machines import Machine
from uirl_jax.config.schema import RunConfig

_MOST_CHANGES = 4  # compiled to find one that fits; a compilation takes minutes


def make_plan(
    cfg: RunConfig,
    planned: PlannedModel,
    machine: Machine,
    programs: tuple[str, ...],
    say: Callable[[str], None],
    texts_dir: Path | None = None,
) -> dict[str, Any]:
    """The plan of one config on one machine."""
    run = plan_programs.abstract_run(cfg, planned, machine.chips, machine.devices)
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
    planned: PlannedModel,
    machine: Machine,
    plan: dict[str, Any],
    say: Callable[[str], None],
) -> str:
    """The first change that makes everything fit that does not, in words."""
    sizes = plan["mesh"]
    found = []
    broken = [name for name, entry in plan["programs"].items() if not entry["fits"]]
    for kind in (plan_programs.TRAINING, plan_programs.SAMPLING):
        failed = [name for name in kind if name in broken]
        if not failed:
            continue
        across = sizes["data"] * sizes["fsdp"]
        changes = plan_search.nearest_changes(cfg, failed[0], across, plan["slices"])
        for (words, changed), _ in zip(changes, range(_MOST_CHANGES), strict=False):
            say(f"trying {words}")
            again = tuple(name for name in kind if name in plan["programs"])
            if make_plan(changed, planned, machine, again, say)["fits"]:
                found.append(words)
                break
        else:
            found.append(f"none of up to {_MOST_CHANGES} changes makes {failed[0]} fit")
    return "; ".join(found)


def search(
    cfg: RunConfig,
    planned: PlannedModel,
    machine: Machine,
    most: int,
    say: Callable[[str], None],
) -> list[tuple[str, dict[str, Any]]]:
    """Ranks the candidates by formula, compiles the first `most`; the best that fits first."""
    ranked = []
    for words, changed in plan_search.candidates(cfg, machine.chips, machine.slices):
        run = plan_programs.abstract_run(changed, planned, machine.chips, machine.devices)
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
        plan = make_plan(changed, planned, machine, plan_programs.TRAINING, say)
        if "step" in plan:
            tried.append((words, plan))
    tried.sort(key=lambda entry: (not entry[1]["fits"], -entry[1]["step"]["tokens_per_s"]))
    return tried
