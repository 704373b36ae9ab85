"""Results as plain text: the table that ends a run and the account of its episodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from uirl_jax.evaluation.results import FATES
from uirl_jax.evaluation.statistics import EvalResult


def format_table(results: Sequence[EvalResult]) -> str:
    """The table that ends a run: plain text, aligned, no trailing blanks or newline."""
    rows = [("stage", "success", "95 % interval", "episodes")]
    for one in results:
        rows.append(
            (
                stage_label(one.stage),
                f"{one.rate:.1%}" if one.attempts else "-",
                f"{one.low:.1%} to {one.high:.1%}",
                f"{one.successes}/{one.attempts}",
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
    for one in results:
        if one.env_errors or one.missing:
            lines.append(
                f"{stage_label(one.stage)}: {one.env_errors} episodes broken by the environment "
                f"(not counted), {one.missing} tasks without an attempt"
            )
    return "\n".join(lines)


def stage_label(stage: str) -> str:
    return stage.replace("_", " ")


def format_episodes(episodes: Mapping[str, Any]) -> str:
    """`published 960 = 940 trained + 12 stale + ...`, and says so where that is false."""
    terms = " + ".join(f"{episodes[name]} {name}" for name in FATES)
    sign = "=" if episodes["identity_holds"] else "IS NOT"
    return (
        f"published {episodes['published']} {sign} {terms}; never published: "
        f"{episodes['lost']} lost, {episodes['env_error']} env_error"
    )
