"""Writes report.html, one self-contained page, from the files that `gather` has read.

It has curves (see `charts`), the table of held-out success and a few episodes. Text from models and
verifiers is untrusted: the template escapes it, invisible characters are shown as escapes, and the
page's content security policy forbids scripts and requests.
"""

import base64
import dataclasses
import hashlib
import io
import json
import os
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from PIL import Image, UnidentifiedImageError

from uirl_jax import evaluation
from uirl_jax.metrics import format_duration
from uirl_jax.store.files import write_atomically
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.watch import charts, gather
from uirl_jax.watch.diagnosis import read_findings

REPORT_FILE = "report.html"
MAX_PAIRS = 6
MAX_TURNS = 24
MAX_TEXT_CHARS = 600
FRAME_WIDTH_PX = 448  # small screens are enlarged by an integer factor up to this width

_TEMPLATES = Path(__file__).parents[1] / "templates"
_IMAGE_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
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
_COLD_PANELS = (_Panel("Loss on demonstrations", {"sft/loss": "cross-entropy per token"}),)


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The point of the screen that an action touches, in screen pixels."""

    x: float
    y: float
    x2: float | None  # the end of a drag
    y2: float | None
    off_screen: bool  # drawn at the nearest edge


@dataclasses.dataclass(frozen=True)
class _Frame:
    """A turn as shown on the page. Without a screenshot `source` is "" and `alt` has the reason."""

    number: int
    source: str  # data URI
    width_px: int
    height_px: int
    shown_px: int  # width on the page
    alt: str
    mark: _Mark | None
    text: str
    error: str


@dataclasses.dataclass(frozen=True)
class _Episode:
    stage: str
    outcome: str  # "success", or the stop reason
    good: bool
    reward: str
    turns: int
    frames: tuple[_Frame, ...]
    hidden_turns: int


@dataclasses.dataclass(frozen=True)
class _Pair:
    """One held-out instance, with its episode at each stage."""

    task: str
    seed: int
    instruction: str
    episodes: tuple[_Episode, ...]


def write_report(workdir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into the workdir, atomically, and returns its path.

    Sections of missing files are left out; unreadable files are listed on the page.

    Raises: UirlError: the workdir is not a directory or cannot be written.
    """
    run = gather.read_run(workdir)
    css = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": lambda share: charts.format_value(share, "%") if share < 1 else "100\xa0%",
        "stage": evaluation.stage_label,
        "duration": format_duration,
    }
    page = environment.get_template("report.html.j2").render(
        css=markupsafe.Markup(css),
        # The policy allows this style sheet by its hash, and no other style or script.
        css_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        name=run.root.resolve().name,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        status=_status(run),
        headline=_headline(run.played),
        results=run.results,
        tasks=sorted({label for result in run.results for label in result.per_task}),
        sections=_curves(run.rows, run.cold_rows),
        chart=charts,
        pairs=_pairs(run.episodes),
        max_turns=MAX_TURNS,
        accounting=gather.accounting(run),
        facts={key: visible(value) for key, value in gather.run_facts(run).items()},
        config=json.dumps(run.config, indent=2) if run.config else "",
        notes=[visible(note) for note in run.notes],
        findings=[
            {"since": found.get("since_step", "?"), "text": visible(str(found.get("text", "")))}
            for found in read_findings(run.root).values()
        ],
    )
    path = run.root / REPORT_FILE
    write_atomically(path, page.encode())
    return path


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


# ---------------------------------------------------------------- curves


def _curves(
    rows: Sequence[Mapping[str, Any]], cold_rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A section of charts for each phase that has metrics."""
    sections = []
    for title, lines, panels in (
        ("Learning", rows, _PANELS),
        ("Cold start", cold_rows, _COLD_PANELS),
    ):
        names = {name: None for row in lines for name in row if "/" in name}
        main = [chart for panel in panels if (chart := _panel(panel, lines))]
        drawn = {name for panel in panels for name in panel.series}
        rest = [_Panel(name, {name: name}, from_zero=False) for name in names if name not in drawn]
        more = [chart for panel in rest if (chart := _panel(panel, lines))]
        if main or more:
            smoothed_over = max(chart.smoothed_over for chart in (*main, *more))
            sections.append(
                {"title": title, "charts": main, "more": more, "smoothed_over": smoothed_over}
            )
    return sections


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


# ---------------------------------------------------------------- episodes


def _pairs(by_stage: Mapping[str, Mapping[TaskSpec, Trajectory]]) -> list[_Pair]:
    """The first held-out instances in order, independent of their outcome."""
    if not by_stage:
        return []
    stages = list(dict.fromkeys((next(iter(by_stage)), list(by_stage)[-1])))
    tasks = [
        task for task in by_stage[stages[-1]] if all(task in by_stage[stage] for stage in stages)
    ]
    return [
        _Pair(
            task=evaluation.task_label(task),
            seed=task.seed,
            instruction=visible(by_stage[stages[0]][task].instruction),
            episodes=tuple(_episode(stage, by_stage[stage][task]) for stage in stages),
        )
        for task in tasks[:MAX_PAIRS]
    ]


def _episode(stage: str, trajectory: Trajectory) -> _Episode:
    reason = str(trajectory.stop_reason).replace("_", " ")
    done = trajectory.stop_reason is StopReason.COMPLETED
    return _Episode(
        stage=stage,
        outcome="success" if trajectory.success and done else reason,
        good=trajectory.success,
        reward=charts.format_value(trajectory.reward),
        turns=len(trajectory.turns),
        frames=tuple(
            _frame(number, turn, trajectory)
            for number, turn in enumerate(trajectory.turns[:MAX_TURNS], start=1)
        ),
        hidden_turns=max(0, len(trajectory.turns) - MAX_TURNS),
    )


def _frame(number: int, turn: Turn, trajectory: Trajectory) -> _Frame:
    data = trajectory.images.get(turn.image_keys[-1], b"") if turn.image_keys else b""
    source, width_px, height_px = _picture(data)
    error = visible(turn.error)
    if turn.action is None and not error:
        error = "no action"
    mark = _mark(turn.action, width_px, height_px) if source else None
    if not source:
        alt = "no screenshot was recorded for this turn"
    elif mark is None:
        alt = f"Screenshot before action {number}, which has no screen position"
    else:
        alt = f"Screenshot before action {number}, which is at x {mark.x:.0f}, y {mark.y:.0f}"
    return _Frame(
        number=number,
        source=source,
        width_px=width_px,
        height_px=height_px,
        shown_px=_shown_width(width_px),
        alt=alt,
        mark=mark,
        text=visible(turn.text),
        error=error,
    )


def _picture(data: bytes) -> tuple[str, int, int]:
    """(data URI, width, height); ("", 0, 0) if the bytes are not a screenshot. Reads the header
    only; the browser decodes the pixels."""
    try:
        with Image.open(io.BytesIO(data), formats=tuple(_IMAGE_TYPES)) as image:
            kind, (width_px, height_px) = _IMAGE_TYPES[str(image.format)], image.size
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        return "", 0, 0
    return f"data:{kind};base64,{base64.b64encode(data).decode()}", width_px, height_px


def _shown_width(width_px: int) -> int:
    """Width on the page; small screens are enlarged by an integer factor to keep pixels square."""
    return width_px * max(1, FRAME_WIDTH_PX // width_px) if width_px else FRAME_WIDTH_PX


def _mark(action: Action | None, width_px: int, height_px: int) -> _Mark | None:
    if action is None or action.x is None or action.y is None:
        return None

    def inside(value: int, size_px: int) -> float:
        return min(max(value, 0), size_px - 1) + 0.5  # the middle of the pixel

    pairs = ((action.x, action.y), (action.x2, action.y2))
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    off_screen = not all(0 <= x < width_px and 0 <= y < height_px for x, y in points)
    (x, y), *end = [(inside(x, width_px), inside(y, height_px)) for x, y in points]
    x2, y2 = end[0] if end else (None, None)
    return _Mark(x=x, y=y, x2=x2, y2=y2, off_screen=off_screen)


def visible(text: str) -> str:
    """At most MAX_TEXT_CHARS of untrusted text, with invisible characters as \\u escapes.

    HTML escaping removes markup; this prevents control characters, such as a right-to-left
    override, from changing how the text is displayed.
    """
    cut = text[:MAX_TEXT_CHARS]
    escaped = "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else f"\\u{ord(char):04x}"
        for char in cut
    )
    left = len(text) - len(cut)
    return f"{escaped} … and {left} more characters" if left else escaped
