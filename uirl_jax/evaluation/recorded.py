"""Tables of recorded sets: ScreenSpot's, by platform and icon or text, and AITW's action matching.

Counted from what the recorded session told after an episode (`verifiers.recorded.task`): the parts,
a rule's value each, and the row's labels. An invalid action is an attempt with 0 in every part.
Pure functions.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from uirl_jax.evaluation.rates import Rate, rate
from uirl_jax.types import Trajectory
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded import rules
from uirl_jax.verifiers.recorded.rewards import parts_of

PLATFORM, UI_TYPE = "platform", "ui_type"  # labels
HIT = "point_in_box"
_MOST_CELLS = 200  # labels are a set's own words


@dataclasses.dataclass(frozen=True)
class Cell:
    """Touches in the box among attempts with these labels; "" where the set has none."""

    platform: str
    ui_type: str
    hits: Rate


@dataclasses.dataclass(frozen=True)
class RecordedResult:
    """Of one set.

    Attributes:
      parts: the mean of every rule over the attempts, `aitw` AITW's action matching.
      cells: by platform and kind of element; empty where the set has neither label.
      rows: how many rows of the set were played.
    """

    attempts: int
    rows: int
    parts: dict[str, float]
    cells: list[Cell]


def recorded_results(attempts: Iterable[Trajectory]) -> dict[str, RecordedResult]:
    """By name of the task; empty without recorded tasks. Args: attempts: no env_errors."""
    by_set: dict[str, list[tuple[Mapping[str, float], Mapping[str, Any]]]] = {}
    for attempt in attempts:
        if (parts := parts_of(attempt)) is not None:
            told = (parts, attempt.turns[-1].progress)
            by_set.setdefault(attempt.task.name, []).append(told)
    return {name: _result(told) for name, told in sorted(by_set.items())}


def _result(told: list[tuple[Mapping[str, float], Mapping[str, Any]]]) -> RecordedResult:
    by_labels: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
    for parts, progress in told:
        found = progress.get("labels")
        labels = found if isinstance(found, Mapping) else {}
        key = (
            printable(str(labels.get(PLATFORM, "")), 40),
            printable(str(labels.get(UI_TYPE, "")), 40),
        )
        if key not in by_labels and len(by_labels) >= _MOST_CELLS:
            key = ("others", "")
        by_labels[key].append(parts[HIT] == 1.0)
    has_labels = any(key != ("", "") for key in by_labels)
    return RecordedResult(
        attempts=len(told),
        rows=len({str(progress.get("row")) for _, progress in told}),
        parts={name: statistics.fmean(parts[name] for parts, _ in told) for name in rules.NAMES},
        cells=[
            Cell(*key, rate(sum(hits), len(hits)))
            for key, hits in sorted(by_labels.items())
            if has_labels
        ],
    )


def from_json(flat: Mapping[str, Any]) -> RecordedResult:
    """What `dataclasses.asdict` made these values of. Raises: TypeError, KeyError: others."""
    cells = [Cell(one["platform"], one["ui_type"], Rate(**one["hits"])) for one in flat["cells"]]
    return RecordedResult(**{**flat, "cells": cells})


def format_recorded(results: Mapping[str, RecordedResult]) -> str:
    """A table of each set: its cells if it has labels, and the mean of every rule."""
    return "\n\n".join(_format(name, result) for name, result in results.items())


def _format(name: str, result: RecordedResult) -> str:
    lines = [f"{name}: {result.attempts} episodes on {result.rows} rows"]
    if result.cells:
        lines += ["", *_cells_table(result.cells), ""]
    lines += [f"{rule:<16}{value:>8.1%}" for rule, value in result.parts.items()]
    return "\n".join(lines)


def _cells_table(cells: list[Cell]) -> list[str]:
    """Rows are platforms, columns kinds of element; the last ones count all attempts alike."""
    counted: dict[tuple[str, str], Rate] = {(c.platform, c.ui_type): c.hits for c in cells}
    platforms = sorted({cell.platform for cell in cells})
    kinds = sorted({cell.ui_type for cell in cells}, reverse=True)  # text before icon

    def shown(rates: list[Rate]) -> str:
        attempts = sum(one.attempts for one in rates)
        hits = sum(one.successes for one in rates)
        return f"{hits / attempts:.1%} ({hits}/{attempts})" if attempts else "-"

    def line(label: str, chosen: list[str]) -> str:
        by_kind = [
            shown([counted[p, kind] for p in chosen if (p, kind) in counted]) for kind in kinds
        ]
        everything = shown([r for (p, _), r in counted.items() if p in chosen])
        return f"{label:<16}" + "".join(f"{text:>20}" for text in (*by_kind, everything))

    header = f"{HIT:<16}" + "".join(f"{kind or 'no kind':>20}" for kind in (*kinds, "all"))
    mean = statistics.fmean(cell.hits.rate for cell in cells)
    return [
        header,
        "-" * len(header),
        *(line(platform or "no platform", [platform]) for platform in platforms),
        line("all", platforms),
        f"mean of the {len(cells)} cells: {mean:.1%}",
    ]
