"""Writes report.html, one self-contained page, from the files that `gather` has read.

It has curves (see `panels`), the table of held-out success and a few episodes (see `frames`). Text
from models and verifiers is untrusted: the templates escape it, invisible characters are shown as
escapes, and the page's content security policy forbids scripts and requests.
"""

import base64
import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import markupsafe

from uirl_jax.store.files import write_atomically
from uirl_jax.types import TaskSpec, Trajectory
from uirl_jax.watch import charts, frames, gather, panels
from uirl_jax.watch.frames import visible

REPORT_FILE = "report.html"
MAX_PAIRS = 6
MAX_TURNS = 24


@dataclasses.dataclass(frozen=True)
class _Episode:
    stage: str
    outcome: str  # "success", or the stop reason
    good: bool
    reward: str
    turns: int
    frames: tuple[frames.Frame, ...]
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
    css = (panels.TEMPLATES / "report.css").read_text(encoding="utf-8")
    page = (
        panels.environment()
        .get_template("report.html.j2")
        .render(
            css=markupsafe.Markup(css),
            # The policy allows this style sheet by its hash, and no other style or script.
            css_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
            written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            pairs=_pairs(run.episodes),
            max_turns=MAX_TURNS,
            **panels.run_panels(run, run.root.resolve().name),
        )
    )
    path = run.root / REPORT_FILE
    write_atomically(path, page.encode())
    return path


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
            task=task.label,
            seed=task.seed,
            instruction=visible(by_stage[stages[0]][task].instruction),
            episodes=tuple(_episode(stage, by_stage[stage][task]) for stage in stages),
        )
        for task in tasks[:MAX_PAIRS]
    ]


def _episode(stage: str, trajectory: Trajectory) -> _Episode:
    return _Episode(
        stage=stage,
        outcome=frames.outcome_text(trajectory.success, trajectory.stop_reason),
        good=trajectory.success,
        reward=charts.format_value(trajectory.reward),
        turns=len(trajectory.turns),
        frames=tuple(
            frames.frame(number, turn, trajectory)
            for number, turn in enumerate(trajectory.turns[:MAX_TURNS], start=1)
        ),
        hidden_turns=max(0, len(trajectory.turns) - MAX_TURNS),
    )
