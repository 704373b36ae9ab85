"""Results as plain text: the table at the end of a run, and its episodes by outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from uirl_jax.evaluation.results import FATES
from uirl_jax.evaluation.statistics import EvalResult


def format_table(results: Sequence[EvalResult]) -> str:
    """The table at the end of a run: aligned plain text without trailing blanks or newline."""
    rows = [("stage", "success", "95 % interval", "episodes")]
    for result in results:
        rows.append(
            (
                stage_label(result.stage),
                f"{result.rate:.1%}" if result.attempts else "-",
                f"{result.low:.1%} to {result.high:.1%}",
                f"{result.successes}/{result.attempts}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    for result in results:
        if result.env_errors or result.missing:
            lines.append(
                f"{stage_label(result.stage)}: {result.env_errors} episodes broken by the "
                f"environment (not counted), {result.missing} tasks without an attempt"
            )
    return "\n".join(lines)


def stage_label(stage: str) -> str:
    return stage.replace("_", " ")


def format_episodes(episodes: Mapping[str, Any]) -> str:
    """`published 960 = 940 trained + 12 stale + ...`; "IS NOT" for "=" if the sum differs."""
    terms = " + ".join(f"{episodes[name]} {name}" for name in FATES)
    sign = "=" if episodes["identity_holds"] else "IS NOT"
    return (
        f"published {episodes['published']} {sign} {terms}; never published: "
        f"{episodes['lost']} lost, {episodes['env_error']} env_error"
    )
