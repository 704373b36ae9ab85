"""Results as plain text: the table at the end of a run, and its episodes by outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from uirl_jax.evaluation.paired import Comparison
from uirl_jax.evaluation.results import FATES
from uirl_jax.evaluation.scores import Scores
from uirl_jax.evaluation.statistics import EvalResult


def format_table(results: Sequence[EvalResult]) -> str:
    """The table at the end of a run: aligned plain text without trailing blanks or newline.

    The mean reward is in it where anything but successes was paid.
    """
    paid = any(abs(result.mean_reward - result.rate) > 0.005 for result in results)
    rows = [("stage", "success", "95 % interval", "episodes", *(["reward"] if paid else []))]
    for result in results:
        rows.append(
            (
                stage_label(result.stage),
                f"{result.rate:.1%}" if result.attempts else "-",
                f"{result.low:.1%} to {result.high:.1%}",
                f"{result.successes}/{result.attempts}",
                *([f"{result.mean_reward:.3f}" if result.attempts else "-"] if paid else []),
            )
        )
    lines = _ruled(rows)
    for result in results:
        if result.env_errors or result.missing:
            lines.append(
                f"{stage_label(result.stage)}: {result.env_errors} episodes broken by the "
                f"environment (not counted), {result.missing} tasks without an attempt"
            )
    return "\n".join(lines)


def format_scores(scores: Mapping[str, Scores]) -> str:
    """A row for every contender; Pix2Act's score where a verifier reports raw rewards."""
    rescaled = any(one.rescaled is not None for one in scores.values())
    rows = [
        (
            *("", "success", "95 % interval", "episodes"),
            *(("score", "95 % interval") if rescaled else ()),
            *("pass@k", "pass^k", "reward", "turns"),
            *("wrong", "twice", "false claims", "missing", "s/success", "tokens/success"),
        )
    ]
    for name, one in scores.items():
        most = max(one.pass_at, default=1)
        rows.append(
            (
                name,
                f"{one.success.rate:.1%}" if one.success.attempts else "-",
                f"{one.success.low:.1%} to {one.success.high:.1%}",
                f"{one.success.successes}/{one.success.attempts}",
                *(_rescaled(one) if rescaled else ()),
                f"{one.pass_at[most]:.1%} (k={most})" if one.pass_at else "-",
                f"{one.pass_all[most]:.1%}" if one.pass_all else "-",
                f"{one.mean_reward:.3f}",
                f"{one.mean_turns:.1f}",
                str(one.wrong_submissions),
                str(one.duplicate_submissions),
                str(one.false_claims),
                str(one.missing),
                _amount(one.seconds_per_success),
                _amount(one.tokens_per_success),
            )
        )
    return "\n".join(_ruled(rows))


def _rescaled(scores: Scores) -> tuple[str, str]:
    one = scores.rescaled
    return ("-", "-") if one is None else (f"{one.score:.1%}", f"{one.low:.1%} to {one.high:.1%}")


def format_tasks(scores: Mapping[str, Mapping[str, Scores]]) -> str:
    """A row for every task: each contender's successes and, where there is one, Pix2Act's score.

    Args: scores: contender -> task -> its scores.
    """
    tasks = sorted({task for by_task in scores.values() for task in by_task})
    header = [""]
    cells = [[task] for task in tasks]
    for name, by_task in scores.items():
        rescaled = any(one.rescaled is not None for one in by_task.values())
        header += [name, "score"] if rescaled else [name]
        for row in cells:
            success = by_task[row[0]].success
            row.append(f"{success.successes}/{success.attempts}")
            if rescaled:
                row.append(_rescaled(by_task[row[0]])[0])
    return "\n".join(_ruled([tuple(header), *map(tuple, cells)]))


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """A line for every pair."""
    return "\n".join(
        f"{one.second} against {one.first}: {one.difference:+.1%} (95 % interval {one.low:+.1%} to "
        f"{one.high:+.1%}, {one.instances} instances); solved by it alone {one.second_only}, by "
        f"the other alone {one.first_only}, McNemar's exact p = {one.p_value:.2g}"
        for one in comparisons
    )


def _ruled(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of `aligned`, with a rule below the header."""
    lines = aligned(rows)
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for every row: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


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
