"""Action text <-> Action, and the coordinate spaces of models. The first reader of sampled text.

The text is untrusted: whatever it holds, `parse` returns a checked Action or raises ActionError
with the reason. It is a grammar of `re` patterns over a table; nothing is evaluated. This file does
not perform actions (verifiers), and does not decide what a wrong one costs (actor).
"""

import dataclasses
import json
import numbers
import re
import reprlib
from collections.abc import Mapping

from uirl_jax.errors import ActionError, ConfigError
from uirl_jax.types import Action

MAX_TEXT_CHARS = 4096  # what one `type` may send to a verifier
MAX_ACTION_CHARS = 6 * MAX_TEXT_CHARS + 64  # the same text with every character as \uXXXX
MAX_SCROLL_PX = 10_000
MAX_SECONDS = 60.0
MAX_KEYS = 4  # three modifiers and a key
SECONDS_DECIMALS = 3

COORDINATES = ("pixels", "0-1000")
DIRECTIONS = ("up", "down", "left", "right")
STATUSES = ("success", "failure")
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


# Arguments are named after the field of Action that holds them, but for the status of `terminate`,
# which is kept in `text`.
KINDS: Mapping[str, Kind] = {
    "click": Kind(("x", "y")),
    "double_click": Kind(("x", "y")),
    "triple_click": Kind(("x", "y")),
    "right_click": Kind(("x", "y")),
    "move": Kind(("x", "y")),
    "long_press": Kind(("x", "y"), ("seconds",)),
    "drag": Kind(("x", "y", "x2", "y2")),
    "type": Kind(("text",)),
    "keys": Kind(("keys",)),
    "scroll": Kind(("direction", "amount"), ("x", "y")),
    "wait": Kind(("seconds",)),
    "navigate_back": Kind(),
    "terminate": Kind(("status",)),
}
_FIELDS = tuple(f.name for f in dataclasses.fields(Action) if f.name != "kind")
_AXES = {"x": 0, "y": 1, "x2": 0, "y2": 1}  # argument -> index into screen_size

_CALL = re.compile(r"([a-z_]{1,32})\((.*)\)", re.DOTALL)
_WHOLE = re.compile(r"-?[0-9]{1,6}")
_DECIMAL = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")
_JSON_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
# Control characters have no key of their own, and a lone surrogate cannot be sent as UTF-8.
_NOT_TYPEABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SHORT = reprlib.Repr()  # messages quote what was got: on one line, and not all of a long text
_SHORT.maxstring = 60


def parse(text: str, screen_size: tuple[int, int], coordinates: str = "pixels") -> Action:
    """Reads the one action that a model's text consists of.

    Args:
      text: what the policy sampled, decoded. White space around the action is fine, nothing else.
      screen_size: (width, height) of the verifier's screen in pixels.
      coordinates: space of the coordinates in the text, one of COORDINATES.

    Returns:
      The action, in real pixels of the verifier's screen.

    Raises:
      ActionError: with the reason, for any other text.
      ConfigError: for unknown `coordinates`.
    """
    _check_space(coordinates)
    if len(text) > MAX_ACTION_CHARS:
        raise ActionError(f"{len(text)} characters, an action has at most {MAX_ACTION_CHARS}")
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise ActionError(f"{_quote(text)} is no action: expected one like click(100, 200)")
    name, body = match.groups()
    kind = KINDS.get(name)
    if kind is None:
        raise ActionError(f"unknown action {name!r}, known ones: {', '.join(KINDS)}")
    names = kind.required + kind.optional
    # A single argument may itself hold commas: type("a, b"), keys(ctrl+,).
    parts = [body] if len(names) == 1 else body.split(",")
    parts = [part.strip(" ") for part in parts] if body.strip(" ") else []
    if len(parts) not in (len(kind.required), len(names)):
        raise ActionError(f"{_quote(text)} has {len(parts)} arguments, expected {usage(name)}")
    fields = {}
    for argument, part in zip(names, parts, strict=False):
        value = _read(name, argument, part)
        if argument in _AXES:
            extent_px = screen_size[_AXES[argument]]
            if coordinates != "pixels" and not 0 <= value <= 1000:
                raise ActionError(f"{name}: {argument}={value} is off the screen, allowed: 0-1000")
            value = convert_coordinate(value, extent_px, source=coordinates, target="pixels")
        fields["text" if argument == "status" else argument] = value
    action = Action(kind=name, **fields)
    validate(action, screen_size)
    return action


def format_action(action: Action, screen_size: tuple[int, int], coordinates: str = "pixels") -> str:
    """Writes an action as the text that `parse` reads back.

    In pixels the round trip is exact. In 0-1000 it is exact on an axis of up to 1000 pixels; on a
    longer one it is off by at most half a unit.

    Args:
      action: in real pixels of the verifier's screen.
      screen_size: (width, height) of that screen in pixels.
      coordinates: space of the coordinates in the text, one of COORDINATES.

    Raises:
      ActionError: the action is not valid on this screen.
      ConfigError: for unknown `coordinates`.
    """
    _check_space(coordinates)
    validate(action, screen_size)
    kind = KINDS[action.kind]
    parts = []
    for argument in kind.required + kind.optional:
        value = _value(action, argument)
        if value is None:
            break
        if argument in _AXES:
            extent_px = screen_size[_AXES[argument]]
            value = convert_coordinate(value, extent_px, source="pixels", target=coordinates)
        if argument == "seconds":
            value = f"{value:.{SECONDS_DECIMALS}f}".rstrip("0").rstrip(".")
        elif argument == "text":
            value = json.dumps(value, ensure_ascii=False)
        parts.append(str(value))
    return f"{action.kind}({', '.join(parts)})"


def validate(action: Action, screen_size: tuple[int, int]) -> None:
    """Raises ActionError unless the action's fields are those of its kind, and within their bounds.

    Args:
      action: in real pixels of the verifier's screen.
      screen_size: (width, height) of that screen in pixels.
    """
    if not isinstance(action.kind, str) or action.kind not in KINDS:
        raise ActionError(f"unknown action {_quote(action.kind)}, known ones: {', '.join(KINDS)}")
    kind = KINDS[action.kind]
    given = {a for a in kind.required + kind.optional if _value(action, a) is not None}
    fields = {"text" if a == "status" else a for a in given}
    extra = [f for f in _FIELDS if f not in fields and _value(action, f) is not None]
    if extra:
        raise ActionError(f"{action.kind} takes no {', '.join(extra)}: {usage(action.kind)}")
    missing = [a for a in kind.required if a not in given]
    if missing or 0 < len(given & set(kind.optional)) < len(kind.optional):
        raise ActionError(f"{action.kind} lacks an argument: {usage(action.kind)}")
    for argument in kind.required + kind.optional:
        if argument in given:
            reason = _objection(argument, _value(action, argument), screen_size)
            if reason:
                raise ActionError(f"{action.kind}: {reason}")


def convert_coordinate(value: int, extent_px: int, *, source: str, target: str) -> int:
    """Converts one coordinate between two spaces: the only place that knows what a space means.

    Args:
      value: coordinate in the source space.
      extent_px: the screen's width for an x, its height for a y.
      source: space of `value`, one of COORDINATES.
      target: space of the result, one of COORDINATES.

    Returns:
      The nearest whole coordinate. 0-1000 spans the whole screen, so that its upper end would lie
      one pixel outside: it means the last pixel.
    """
    if source == target:
        return value
    if target == "pixels":
        return min(extent_px - 1, (value * extent_px + 500) // 1000)
    return (2 * value * 1000 + extent_px) // (2 * extent_px)


def usage(kind: str) -> str:
    """How a kind of action is written, as for a prompt: `scroll(direction, amount[, x, y])`."""
    spec = KINDS[kind]
    required = ", ".join('"text"' if a == "text" else a for a in spec.required)
    optional = f"[, {', '.join(spec.optional)}]" if spec.optional else ""
    return f"{kind}({required}{optional})"


def _read(name: str, argument: str, part: str) -> int | float | str:
    """The value that an argument's text stands for; its bounds are `validate`'s business."""
    if argument in _AXES or argument == "amount":
        if not _WHOLE.fullmatch(part):
            raise ActionError(f"{name}: {argument}={_quote(part)} is no whole number")
        return int(part)
    if argument == "seconds":
        if not _DECIMAL.fullmatch(part):
            raise ActionError(f"{name}: seconds={_quote(part)} is no number like 2 or 0.5")
        return float(part)
    if argument == "text":
        if not _JSON_STRING.fullmatch(part):
            raise ActionError(f'{name}: {_quote(part)} is no text in double quotes, as in "a\\n"')
        return json.loads(part)
    return part


def _objection(argument: str, value: object, screen_size: tuple[int, int]) -> str:
    """Why a value is not acceptable for an argument; empty where it is."""
    if argument in _AXES or argument == "amount":
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            return f"{argument}={_quote(value)} is no whole number"
        if argument == "amount":
            ok = 1 <= value <= MAX_SCROLL_PX
            return "" if ok else f"amount={_quote(value)} is outside 1-{MAX_SCROLL_PX} pixels"
        extent_px = screen_size[_AXES[argument]]
        ok = 0 <= value < extent_px
        shown = _quote(value)
        return "" if ok else f"{argument}={shown} is off the screen, allowed: 0-{extent_px - 1}"
    if argument == "seconds":
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return f"seconds={_quote(value)} is no number"
        if not 0 <= value <= MAX_SECONDS:  # which NaN is not
            return f"seconds={_quote(value)} is outside 0-{MAX_SECONDS:g}"
        exact = round(value, SECONDS_DECIMALS) == value
        return "" if exact else f"seconds={value} has more than {SECONDS_DECIMALS} decimals"
    if not isinstance(value, str):
        return f"{argument}={_quote(value)} is no text"
    if argument == "text":
        if len(value) > MAX_TEXT_CHARS:
            return f"a text of {len(value)} characters, at most {MAX_TEXT_CHARS} are typed"
        bad = _NOT_TYPEABLE.search(value)
        return f"the text holds {bad.group()!r}, which no key types" if bad else ""
    if argument == "keys":
        return _keys_objection(value)
    allowed = DIRECTIONS if argument == "direction" else STATUSES
    return "" if value in allowed else f"{_quote(value)} is none of {', '.join(allowed)}"


def _keys_objection(keys: str) -> str:
    names = keys.split("+")
    if len(names) > MAX_KEYS:
        return f"{_quote(keys)} joins {len(names)} keys, at most {MAX_KEYS} are pressed at once"
    for name in names:
        if name not in NAMED_KEYS and name not in CHARACTER_KEYS:
            return f"{_quote(name)} is no key: expected one like enter, c or ctrl+c, in lower case"
    if not MODIFIERS.issuperset(names[:-1]) or len(set(names)) < len(names):
        return f"{_quote(keys)}: only distinct {', '.join(sorted(MODIFIERS))} stand before a key"
    return ""


def _value(action: Action, argument: str) -> object:
    return vars(action)["text" if argument == "status" else argument]


def _check_space(coordinates: str) -> None:
    if coordinates not in COORDINATES:
        raise ConfigError(f"coordinates={coordinates!r}, expected one of {', '.join(COORDINATES)}")


def _quote(value: object) -> str:
    return _SHORT.repr(value)
