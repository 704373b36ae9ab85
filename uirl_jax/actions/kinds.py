"""The kinds of action, their arguments, and the bounds of every value.

Every action format reads into this table and writes from it, and the bundled server checks requests
with `validate`. How a model writes an action is in the other modules of this package.
"""

import dataclasses
import numbers
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from uirl_jax.errors import ActionError
from uirl_jax.types import Action

MAX_TEXT_CHARS = 4096  # what one `type` may send to a verifier
MAX_ACTION_CHARS = 6 * MAX_TEXT_CHARS + 64  # the same text with every character as \uXXXX
MAX_SCROLL_PX = 10_000
MAX_SECONDS = 60.0
MAX_KEYS = 4  # three modifiers and a key
SECONDS_DECIMALS = 3

DIRECTIONS = ("up", "down", "left", "right")
STATUSES = ("success", "failure")
BUTTONS = ("home", "menu")  # of a phone; its back button is navigate_back
MODIFIERS = frozenset({"ctrl", "alt", "shift", "win", "cmd"})
NAMED_KEYS = MODIFIERS | {
    *("enter", "tab", "space", "backspace", "delete", "insert", "esc", "home", "end"),
    *("up", "down", "left", "right", "pageup", "pagedown"),
    *(f"f{n}" for n in range(1, 13)),
}
# Single keys are named by what they print without shift; "+" joins keys and is none itself.
CHARACTER_KEYS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789`-=[]\\;',./")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The arguments of one kind of action, in the order in which the text names them."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # all of them, or none


# Arguments are named after the field of Action that holds them, but for the status of `terminate`
# and the button of `system_button`, which are kept in `text`.
KINDS: Mapping[str, Kind] = {
    "click": Kind(("x", "y")),
    "double_click": Kind(("x", "y")),
    "triple_click": Kind(("x", "y")),
    "right_click": Kind(("x", "y")),
    "middle_click": Kind(("x", "y")),
    "move": Kind(("x", "y")),
    "long_press": Kind(("x", "y"), ("seconds",)),
    "drag": Kind(("x", "y", "x2", "y2")),
    "type": Kind(("text",)),
    "keys": Kind(("keys",)),
    "scroll": Kind(("direction", "amount"), ("x", "y")),
    "wait": Kind(("seconds",)),
    "navigate_back": Kind(),
    "system_button": Kind(("button",)),
    "answer": Kind(("text",)),
    "terminate": Kind(("status",)),
}
_FIELDS = tuple(f.name for f in dataclasses.fields(Action) if f.name != "kind")
AXES = {"x": 0, "y": 1, "x2": 0, "y2": 1}  # argument -> index into screen_size

# Control characters have no key of their own, and a lone surrogate cannot be sent as UTF-8.
_NOT_TYPEABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SHORT = reprlib.Repr()  # messages quote what was got: on one line, and not all of a long text
_SHORT.maxstring = 60


def validate(action: Action, screen_size: tuple[int, int]) -> None:
    """Raises ActionError unless the action's fields are those of its kind, and within their bounds.

    Args:
      action: in real pixels of the verifier's screen.
      screen_size: (width, height) of that screen in pixels.
    """
    if not isinstance(action.kind, str) or action.kind not in KINDS:
        raise ActionError(f"unknown action {quote(action.kind)}, known ones: {', '.join(KINDS)}")
    kind = KINDS[action.kind]
    given = {a for a in kind.required + kind.optional if value_of(action, a) is not None}
    fields = {field_of(a) for a in given}
    extra = [f for f in _FIELDS if f not in fields and value_of(action, f) is not None]
    if extra:
        raise ActionError(f"{action.kind} takes no {', '.join(extra)}: {usage(action.kind)}")
    missing = [a for a in kind.required if a not in given]
    if missing or 0 < len(given & set(kind.optional)) < len(kind.optional):
        raise ActionError(f"{action.kind} lacks an argument: {usage(action.kind)}")
    for argument in kind.required + kind.optional:
        if argument in given:
            reason = _objection(argument, value_of(action, argument), screen_size)
            if reason:
                raise ActionError(f"{action.kind}: {reason}")


def usage(kind: str) -> str:
    """How a kind of action is written, as for a prompt: `scroll(direction, amount[, x, y])`."""
    spec = KINDS[kind]
    required = ", ".join('"text"' if a == "text" else a for a in spec.required)
    optional = f"[, {', '.join(spec.optional)}]" if spec.optional else ""
    return f"{kind}({required}{optional})"


def _objection(argument: str, value: Any, screen_size: tuple[int, int]) -> str:
    """Why a value is not acceptable for an argument; empty where it is."""
    if argument in AXES or argument == "amount":
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            return f"{argument}={quote(value)} is not a whole number"
        if argument == "amount":
            ok = 1 <= int(value) <= MAX_SCROLL_PX
            return "" if ok else f"amount={quote(value)} is outside 1-{MAX_SCROLL_PX} pixels"
        extent_px = screen_size[AXES[argument]]
        ok = 0 <= int(value) < extent_px
        shown = quote(value)
        return "" if ok else f"{argument}={shown} is off the screen, allowed: 0-{extent_px - 1}"
    if argument == "seconds":
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return f"seconds={quote(value)} is not a number"
        seconds: Any = value  # not float(value), which 10**400 overflows
        if not 0 <= seconds <= MAX_SECONDS:  # which NaN is not
            return f"seconds={quote(value)} is outside 0-{MAX_SECONDS:g}"
        exact = round(seconds, SECONDS_DECIMALS) == seconds
        return "" if exact else f"seconds={value} has more than {SECONDS_DECIMALS} decimals"
    if not isinstance(value, str):
        return f"{argument}={quote(value)} is not text"
    if argument == "text":
        if len(value) > MAX_TEXT_CHARS:
            return f"a text of {len(value)} characters, at most {MAX_TEXT_CHARS} are typed"
        bad = _NOT_TYPEABLE.search(value)
        return f"the text holds {bad.group()!r}, which no key types" if bad else ""
    if argument == "keys":
        return _keys_objection(value)
    allowed = {"direction": DIRECTIONS, "status": STATUSES, "button": BUTTONS}[argument]
    return "" if value in allowed else f"{quote(value)} is none of {', '.join(allowed)}"


def _keys_objection(keys: str) -> str:
    names = keys.split("+")
    if len(names) > MAX_KEYS:
        return f"{quote(keys)} joins {len(names)} keys, at most {MAX_KEYS} are pressed at once"
    for name in names:
        if name not in NAMED_KEYS and name not in CHARACTER_KEYS:
            return (
                f"{quote(name)} is not a key: expected one like enter, c or ctrl+c, in lower case"
            )
    if not MODIFIERS.issuperset(names[:-1]) or len(set(names)) < len(names):
        return f"{quote(keys)}: only distinct {', '.join(sorted(MODIFIERS))} stand before a key"
    return ""


def field_of(argument: str) -> str:
    """The field of Action that holds an argument."""
    return "text" if argument in ("status", "button") else argument


def value_of(action: Action, argument: str) -> Any:
    return vars(action)[field_of(argument)]


def quote(value: object) -> str:
    """A value as it may stand in a message: on one line, and short."""
    return _SHORT.repr(value)
