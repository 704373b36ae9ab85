"""Instruction and reward of tasks whose server has neither: simple_data_entry in g1, g2 and g3.

A user's own function may decide them for any task of any server (`own_rule`). The built-in rule:
the server counts submissions; this module turns the counts into a reward. The rule is part of the
task's variant, and so of every record, beside the raw counts: a run can be scored again under
another rule. What the policy says about itself has no effect.

    TaskConfig(name="simple_data_entry", variant="rows=2-101,count=1,wrong=0.25,duplicate=0.25")

    rows       the rows of the sheet from which the task's seed draws those to submit
    count      how many rows are to be submitted
    partial    1: each right row pays its share; 0: nothing is paid before all are submitted
    wrong      cost of each wrong submission, or of a right one that was not asked for (0.25)
    duplicate  cost of each submission of a row that was submitted before (0.25)
    turn       cost of each action (0)
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from uirl_jax import user_code
from uirl_jax.errors import InvalidRequestError, VerifierError
from uirl_jax.types import Judgement, Rule, TaskSpec
from uirl_jax.verifiers.dialects import CORRECT, DATA_ENTRY, ROWS, WRONG

FindOwnRule = Callable[[TaskSpec], Rule | None]

FIRST_ROW = 2  # of the sheet, below its head; the server counts it as 0
LAST_ROW = 101
_MAX_SUBMISSIONS = 100_000
_ROWS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_COST = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?")

# Source: TobiasNorlund/ui-rl, examples/simple_data_entry/simple_data_entry.py: what their models
# were trained on.
_INSTRUCTION = (
    "Your task is to submit data from a spreadsheet (seen on the left) into a form (seen on the "
    "right). Specifically, the following rows (as numbered in the left margin) from the "
    "spreadsheet are to be submitted: {rows}.\n"
    "Note: You may need to scroll to make the row visible in the sheet.\n"
    "The form has to be submitted separately for each row. When the form has been submitted, "
    "return to the form to submit the next row. \n"
    "Submit a row by selecting each cell individually, copy its content by sending keys "
    '"ctrl+c", select the target form text input and paste using "ctrl+v".\n'
    "Finally, submit the form and continue with the next row. Only finish when all rows have been "
    "successfully submitted"
)


@dataclasses.dataclass(frozen=True)
class DataEntryRule:
    """One instance of the task."""

    rows: tuple[int, ...]  # of the sheet
    partial: bool = False
    wrong: float = 0.0
    duplicate: float = 0.0
    turn: float = 0.0

    @property
    def instruction(self) -> str:
        return _INSTRUCTION.replace("{rows}", ", ".join(map(str, self.rows)))

    def judge(self, progress: Mapping[str, Any], turns: int) -> Judgement:
        """What the counts of a server are worth after some turns.

        Success is that exactly the rows asked for were submitted, each once, and nothing wrong. A
        server of g2a says how many were right and not which: there a duplicate, or a right row
        that was not asked for, counts as one of those asked for.

        Raises:
          VerifierError: the progress is not what such a server counts.
        """
        wrong = _count(progress, WRONG)
        duplicates = 0
        if ROWS in progress:
            submitted = _rows(progress)
            asked = {row - FIRST_ROW for row in self.rows}
            right = len(asked.intersection(submitted))
            duplicates = len(submitted) - len(set(submitted))
            wrong += len(set(submitted) - asked)
        else:
            correct = _count(progress, CORRECT)
            right = min(correct, len(self.rows))
            duplicates = correct - right
        done = right == len(self.rows)
        worth = right / len(self.rows) if self.partial or done else 0.0
        cost = self.wrong * wrong + self.duplicate * duplicates + self.turn * turns
        return Judgement(done, worth - cost, done and not wrong and not duplicates)


def find_rule(task: TaskSpec) -> Rule:
    """The built-in rule of a task instance.

    Raises:
      InvalidRequestError: there is none for such a task, or its variant is not as above.
    """
    if task.name != DATA_ENTRY:
        raise InvalidRequestError(
            f"task {task.name!r}: a server of this dialect says neither what it asks for nor what "
            f"it pays; name a function that does in the task's `rule` (docs/own_code.md). Only "
            f"{DATA_ENTRY} has a built-in rule"
        )
    rule = data_entry_rule(task)
    return Rule(rule.instruction, rule.judge)


def no_own_rule(task: TaskSpec) -> None:
    """Of a run without rules of its own."""


def own_rules(references: Mapping[str, str]) -> FindOwnRule:
    """The user's own rules by task name: "module:function" of TaskSpec -> Rule.

    Raises: ConfigError: there is no such function.
    """
    if not references:
        return no_own_rule
    functions = {
        name: user_code.load(reference, f"the rule of task {name!r}")
        for name, reference in references.items()
    }

    def find(task: TaskSpec) -> Rule | None:
        if task.name not in functions:
            return None
        return own_rule(task, references[task.name], functions[task.name])

    return find


def own_rule(task: TaskSpec, reference: str, find: Callable[[TaskSpec], Rule]) -> Rule:
    """The rule that the user's own function gives for a task instance, with its answers checked.

    Raises: UserCodeError: the function raised, or returned something else than a Rule.
    """
    with user_code.blamed(reference):
        rule = find(task)
        if not isinstance(rule, Rule):
            raise TypeError(f"returned {type(rule).__name__}, expected uirl_jax.types.Rule")

    def judge(progress: Mapping[str, Any], turns: int) -> Judgement:
        with user_code.blamed(reference):
            try:
                done, reward, success = rule.judge(progress, turns)
            except VerifierError as error:
                return_error = error
            else:
                if not isinstance(done, bool) or not isinstance(success, bool):
                    raise TypeError(f"done={done!r}, success={success!r}: expected bool")
                if not math.isfinite(reward):
                    raise ValueError(f"reward={reward!r} is not finite")
                return Judgement(done, float(reward), success)
        raise return_error

    return Rule(rule.instruction, judge)


def data_entry_rule(task: TaskSpec) -> DataEntryRule:
    """The rule of simple_data_entry for one instance.

    Raises: InvalidRequestError: its variant.
    """
    given = {"rows": f"{FIRST_ROW}-{LAST_ROW}", "count": "1", "partial": "0"}
    # Not free unless somebody says so: three wrong submissions and a right one must not pay like
    # the right one alone.
    given |= {"wrong": "0.25", "duplicate": "0.25", "turn": "0"}
    for part in filter(None, (part.strip() for part in task.variant.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        pattern = _ROWS if key == "rows" else _COST
        if key not in given or not pattern.fullmatch(value):
            raise InvalidRequestError(
                f"variant {task.variant!r} of {task.name}: {part!r} is none of "
                f"{', '.join(given)} with a number (rows: two, as in 2-101)"
            )
        given[key] = value
    low, _, high = given["rows"].partition("-")
    pool = range(int(low), int(high or low) + 1)
    count = float(given["count"])
    if not pool or pool[0] < FIRST_ROW or not 1 <= count <= len(pool) or count != int(count):
        raise InvalidRequestError(
            f"variant {task.variant!r} of {task.name}: {given['count']} of rows {given['rows']}, "
            f"expected at least one of the rows from {FIRST_ROW} on"
        )
    picked = np.random.default_rng(task.seed).choice(len(pool), int(count), replace=False)
    return DataEntryRule(
        tuple(sorted(pool[int(index)] for index in picked)),
        partial=float(given["partial"]) != 0.0,
        **{name: float(given[name]) for name in ("wrong", "duplicate", "turn")},
    )


def _count(progress: Mapping[str, Any], key: str) -> int:
    value = progress.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_SUBMISSIONS:
        raise VerifierError(f"progress has {key}={str(value)[:40]!r}: expected a count")
    return value


def _rows(progress: Mapping[str, Any]) -> list[int]:
    value = progress[ROWS]
    if (
        not isinstance(value, list)
        or len(value) > _MAX_SUBMISSIONS
        or any(isinstance(row, bool) or not isinstance(row, int) for row in value)
    ):
        raise VerifierError(f"progress has {ROWS}={str(value)[:40]!r}: expected row numbers")
    return value
