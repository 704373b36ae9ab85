"""What the report and the viewer both show of a run: curves, status, findings, counts.

`gather` has read the files; `charts` computes the geometry. Here is which metrics are drawn and in
which order, and the environment of the templates, which escapes all text.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from uirl_jax import evaluation
from uirl_jax.console import format_duration
from uirl_jax.watch import charts, frames, gather
from uirl_jax.watch.findings import read_findings
from uirl_jax.watch.frames import visible

TEMPLATES = Path(__file__).parents[1] / "templates"
_REASONS = ("completed", "failed", "format_error", "max_turns", "max_tokens", "timeout")


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A chart of the page; `series` maps metric name -> legend."""

    title: str
    series: Mapping[str, str]
    unit: str = ""
    stacked: bool = False
    from_zero: bool = True
    full_share: bool = False


# All other metrics are drawn at the end of the section, smaller.
_PANELS = (
    _Panel("Reward", {"reward/mean": "mean of a step's episodes"}),
    _Panel("Success in training", {"success/mean": "share of episodes"}, "%", full_share=True),
    _Panel(
        "Success on held-out tasks",
        {"eval/success": "share of episodes", "eval/success_low": "lower bound, 95 %"},
        "%",
        full_share=True,
    ),
    _Panel("KL to the base model", {"actor/kl_loss": "per token"}),
    _Panel("Entropy", {"actor/entropy": "nats per token"}),
    _Panel("Clipped tokens", {"actor/clip_fraction": "share"}, "%"),
    _Panel("Policy loss", {"actor/policy_loss": "per token"}, from_zero=False),
    _Panel("Gradient norm", {"learner/grad_norm": "before clipping"}),
    _Panel("Speed", {"learner/tokens_per_s": "tokens per second"}),
    _Panel(
        "Seconds per step",
        {
            "time/learn_s": "learning",
            "time/wait_for_records_s": "waiting for episodes",
            "time/save_and_publish_s": "saving and publishing",
        },
        "s",
        stacked=True,
    ),
    _Panel(
        "How episodes ended",
        {f"stop_reason/{reason}": reason.replace("_", " ") for reason in _REASONS},
        "%",
        stacked=True,
        full_share=True,
    ),
    _Panel("Groups with a signal", {"groups/with_signal": "share"}, "%", full_share=True),
    _Panel("Staleness", {"offpolicy/staleness": "policy versions, mean"}),
    _Panel("Drift, actor to learner", {"offpolicy/drift": "mean |difference of logprobs|"}),
)
# task/<task>/<name>: a chart for each kind of task, in a section of its own.
_TASK = "task/"
_OF_A_TASK = {"success": "successes", "signal": "groups with a signal"}
_COLD_PANELS = (_Panel("Loss on demonstrations", {"sft/loss": "cross-entropy per token"}),)


@functools.cache
def environment() -> jinja2.Environment:
    """The templates of the report and the viewer: every value is escaped, and made visible."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # No value that a template shows can reorder or hide text, wherever it comes from.
        finalize=lambda value: (
            frames.without_invisible(value)
            if isinstance(value, str) and not isinstance(value, markupsafe.Markup)
            else value
        ),
    )
    made.filters |= {
        "percent": lambda share: charts.format_value(share, "%") if share < 1 else "100\xa0%",
        "stage": evaluation.stage_label,
        "duration": format_duration,
        "number": charts.format_value,
        "count": lambda number: f"{number:,.0f}",
    }
    made.globals["chart"] = charts
    return made


def run_panels(run: gather.RunFiles, name: str, *, on_its_machine: bool = True) -> dict[str, Any]:
    """What the templates of both pages show of a run, by the names that they use.

    Args:
      name: of the run, for the title.
      on_its_machine: see `gather.run_facts`.
    """
    facts = gather.run_facts(run, on_its_machine=on_its_machine)
    return {
        "name": name,
        "status": _status(run),
        "headline": _headline(run.played),
        "results": run.results,
        "tasks": sorted({label for result in run.results for label in result.per_task}),
        "suites": run.suites,
        "sections": _curves(run.rows, run.cold_rows),
        "accounting": gather.accounting(run),
        "facts": {key: visible(value) for key, value in facts.items()},
        "config": json.dumps(run.config, indent=2) if run.config else "",
        "notes": [visible(note) for note in run.notes],
        "findings": [
            {"since": found.get("since_step", "?"), "text": visible(str(found.get("text", "")))}
            for found in read_findings(run.root).values()
        ],
    }


def _status(run: gather.RunFiles) -> str:
    if run.summary:
        return "finished"
    return f"in progress, {run.rows[-1]['step']} steps done" if run.rows else "no step taken yet"


def _headline(results: Sequence[evaluation.EvalResult]) -> dict[str, Any] | None:
    """The first and the last stage, or the only one."""
    measured = [result for result in results if result.attempts]
    if not measured:
        return None
    return {"first": measured[0] if len(measured) > 1 else None, "last": measured[-1]}


def _curves(
    rows: Sequence[Mapping[str, Any]], cold_rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A section of charts for each phase that has metrics, and one of the kinds of tasks."""
    sections = []
    tasks = _task_panels(rows)
    for title, lines, panels in (
        ("Learning", rows, _PANELS),
        ("Tasks in training", rows, tasks),
        ("Cold start", cold_rows, _COLD_PANELS),
    ):
        names = {name: None for row in lines for name in row if "/" in name}
        names = [name for name in names if name.startswith(_TASK) == (panels is tasks)]
        main = [chart for panel in panels if (chart := _panel(panel, lines))]
        drawn = {name for panel in panels for name in panel.series}
        if panels is tasks:  # a reward that is not drawn is that of the successes
            drawn |= {name for name in names if name.endswith("/reward")}
        rest = [_Panel(name, {name: name}, from_zero=False) for name in names if name not in drawn]
        more = [chart for panel in rest if (chart := _panel(panel, lines))]
        if main or more:
            smoothed_over = max(chart.smoothed_over for chart in (*main, *more))
            sections.append(
                {"title": title, "charts": main, "more": more, "smoothed_over": smoothed_over}
            )
    return sections


def _task_panels(rows: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    names = {name: None for row in rows for name in row if name.startswith(_TASK)}
    tasks = {name.removeprefix(_TASK).rpartition("/")[0]: None for name in names}
    panels = []
    for task in tasks:
        shares = {f"{_TASK}{task}/{name}": legend for name, legend in _OF_A_TASK.items()}
        panels.append(_Panel(task, shares, "%", full_share=True))
        success, reward = (f"{_TASK}{task}/{name}" for name in ("success", "reward"))
        known = [row for row in rows if reward in row]
        if any(abs(row[reward] - row.get(success, 0.0)) > 0.005 for row in known):
            panels.append(_Panel(f"{task}, reward", {reward: "mean"}, from_zero=True))
    return panels


def _panel(panel: _Panel, rows: Sequence[Mapping[str, Any]]) -> charts.Chart | None:
    used = [row for row in rows if any(name in row for name in panel.series)]
    series = []
    for name, label in panel.series.items():
        if panel.stacked:  # a stop reason that is missing in a step has the share 0
            points = [(row["step"], row.get(name, 0.0)) for row in used]
            points = points if any(value for _, value in points) else []
        else:
            points = [(row["step"], row[name]) for row in used if name in row]
        if points:
            series.append(charts.Series(label, tuple(points)))
    if not series:
        return None
    return charts.line_chart(
        panel.title,
        series,
        unit=panel.unit,
        stacked=panel.stacked,
        from_zero=panel.from_zero,
        full_share=panel.full_share,
    )
