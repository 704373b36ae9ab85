"""The instruction of a recorded step: the row's, and in words what was done before (the teacher's).

    Search for Musk in X
    Done so far: 1. tap the search bar 2. type "Musk"

Places are left out: every model has coordinates of its own. A set that says what each step does
(AndroidControl) is quoted, else the action's kind, its text and its direction are named.
"""

from collections.abc import Sequence

from uirl_jax.types import Action
from uirl_jax.untrusted.text import readable
from uirl_jax.verifiers.recorded.row import Row, Step

SHOWN_STEPS = 8  # the latest
SHOWN_CHARS = 80  # of a step
MAX_CHARS = 4096  # of an instruction: what the client reads


def instruction(row: Row, step: int | None, *, low: bool = False) -> str:
    """What the policy is told.

    Args:
      step: the one that is shown; None: a walk, whose history is the policy's own.
      low: also what this step shall do, where the set says it (AndroidControl's low level).
    """
    lines = [readable(row.instruction).strip()]
    if step:
        first = max(0, step - SHOWN_STEPS)
        told = [f"{n + 1}. {in_words(row.steps[n])}" for n in range(first, step)]
        lines.append(f"Done so far: {'... ' if first else ''}{' '.join(told)}")
    if low and step is not None and row.steps[step].instruction:
        lines.append(f"Now: {_short(row.steps[step].instruction)}")
    # Of a long task the end is cut, never the history.
    rest = "\n".join(["", *lines[1:]]) if len(lines) > 1 else ""
    return lines[0][: MAX_CHARS - len(rest)] + rest


def in_words(step: Step) -> str:
    """A step that was done: 'click', 'type "Musk"', 'scroll down'."""
    if step.instruction.strip():
        return _short(step.instruction)
    action = step.action
    words: Sequence[str | None] = (
        action.kind.replace("_", " "),
        _quoted(action),
        action.keys,
        action.direction,
    )
    return " ".join(word for word in words if word)


def _quoted(action: Action) -> str | None:
    if action.text is None:
        return None
    return f'"{_short(action.text)}"' if action.kind in ("type", "answer") else action.text


def _short(text: str) -> str:
    line = " ".join(readable(text).split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 3] + "..."
