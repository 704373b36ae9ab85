"""Instruction and reward of a server's task by a rule of one's own: docs/own_code.md.

cfg.tasks = (ConfigDict({"name": "simple_data_entry", "max_turns": 12,
                         "rule": "examples.own_code.rules:first_rows"}),)
"""

from collections.abc import Mapping
from typing import Any

from uirl_jax.errors import VerifierError
from uirl_jax.types import Judgement, Rule, TaskSpec


def first_rows(task: TaskSpec) -> Rule:
    """Submit the first rows of the sheet in their order; an error ends the episode.

    The server (dialect g2b) counts rows from 0; the variant says how many are to be submitted.
    """
    rows = int(task.variant or 1)

    def judge(progress: Mapping[str, Any], turns: int) -> Judgement:
        submitted, wrong = (
            progress.get("submitted_row_indices"),
            progress.get("num_incorrect_submissions"),
        )
        if not isinstance(submitted, list) or not isinstance(wrong, int):
            raise VerifierError(f"progress {dict(progress)}: expected rows and a count")
        in_order = submitted == list(range(len(submitted)))
        if wrong or not in_order:
            return Judgement(done=True, reward=0.0, success=False)
        done = len(submitted) == rows
        return Judgement(done, len(submitted) / rows - 0.01 * turns, done)

    return Rule(f"Submit the first {rows} rows of the sheet, from the top down.", judge)
