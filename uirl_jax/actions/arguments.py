"""The two formats that write arguments one after the other.

    text         click(100, 200)    type("hello")    scroll(down, 100)
    coordinates  100 200 click      "hello" type     down 100 scroll

An untuned model writes more than the action, so `text` may have a sentence before it and a fence of
``` around it; what follows the first call must be the rest of that call, so that an answer with two
actions is refused. Words may stand in quotes, and quotes may be single ones.

Readers give the action in the model's own numbers; `formats` converts and checks them.
"""

import json
import re
from typing import Any

from uirl_jax.actions.kinds import AXES, KINDS, SECONDS_DECIMALS, field_of, quote, usage, value_of
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

_CALL = re.compile(r"([a-z_]{1,32})\((.*)\)", re.DOTALL)
_LAST_WORD = re.compile(r"(?:(.*)[ \n])?([a-z_]{1,32})", re.DOTALL)
_WHOLE = re.compile(r"-?[0-9]{1,6}")
_NUMBER = re.compile(r"-?[0-9]{1,6}(?:\.[0-9]{1,6})?")
_DECIMAL = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")
_JSON_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_SINGLE_QUOTED = re.compile(r"'(?:[^'\\\x00-\x1f]|\\(?:['\"\\/bfnrt]|u[0-9a-fA-F]{4}))*'")
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"')
_START = re.compile(rf"(?<![a-z_])(?:{'|'.join(KINDS)})\(")  # of the first call


def read_text(text: str) -> Action:
    text = without_fence(text)
    start = _START.search(text)
    match = _CALL.fullmatch(text, start.start() if start else 0)
    if match is None:
        raise ActionError(f"{quote(text)} is not an action: expected one like click(100, 200)")
    return _read(match[1], match[2], ",", text)


def write_text(action: Action) -> str:
    return f"{action.kind}({', '.join(_written(action))})"


def read_coordinates(text: str) -> Action:
    match = _LAST_WORD.fullmatch(text)
    if match is None:
        raise ActionError(f"{quote(text)} is not an action: expected one like 100 200 click")
    return _read(match[2], match[1] or "", " ", text)


def write_coordinates(action: Action) -> str:
    return " ".join([*_written(action), action.kind])


def usage_coordinates(kind: str) -> str:
    """`direction amount [x y] scroll`: how this format writes a kind, as for a prompt."""
    spec = KINDS[kind]
    required = ['"text"' if argument == "text" else argument for argument in spec.required]
    optional = [f"[{' '.join(spec.optional)}]"] if spec.optional else []
    return " ".join([*required, *optional, kind])


def _read(name: str, body: str, separator: str, text: str) -> Action:
    kind = KINDS.get(name)
    if kind is None:
        raise ActionError(f"unknown action {name!r}, known ones: {', '.join(KINDS)}")
    names = kind.required + kind.optional
    body = body.strip(" ")
    # A single argument may itself hold the separator: type("a, b"), keys(ctrl+,).
    parts = [body] if len(names) == 1 else body.split(separator)
    parts = [part.strip(" ") for part in parts] if body else []
    if len(parts) not in (len(kind.required), len(names)):
        raise ActionError(f"{quote(text)} has {len(parts)} arguments, expected {usage(name)}")
    fields: dict[str, Any] = {  # of the types that `kinds` checks
        field_of(argument): _value(name, argument, part)
        for argument, part in zip(names, parts, strict=False)
    }
    return Action(kind=name, **fields)


def _value(name: str, argument: str, part: str) -> int | float | str:
    """The value that an argument's text stands for; its bounds are checked by `kinds`."""
    if argument in AXES:
        if not _NUMBER.fullmatch(part):
            raise ActionError(f"{name}: {argument}={quote(part)} is not a whole number or decimal")
        return float(part) if "." in part else int(part)
    if argument == "amount":
        if not _WHOLE.fullmatch(part):
            raise ActionError(f"{name}: {argument}={quote(part)} is not a whole number")
        return int(part)
    if argument == "seconds":
        if not _DECIMAL.fullmatch(part):
            raise ActionError(f"{name}: seconds={quote(part)} is not a number like 2 or 0.5")
        return float(part)
    if argument == "text":
        quoted = _unquoted(part)
        if quoted is None:
            raise ActionError(f'{name}: {quote(part)} is not text in quotes, as in "a\\n"')
        return quoted
    if len(part) < 2:
        return part  # keys(') presses the apostrophe
    return _unquoted(part) or part


def _unquoted(part: str) -> str | None:
    """The text that a string in double or single quotes stands for; None if it is not one."""
    if _SINGLE_QUOTED.fullmatch(part):
        part = f'"{_ESCAPE_OR_QUOTE.sub(_in_double_quotes, part[1:-1])}"'
    return json.loads(part) if _JSON_STRING.fullmatch(part) else None


def _in_double_quotes(match: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(match[0], match[0])


def without_fence(text: str) -> str:
    """The text without the ``` that closes a fenced block at its end."""
    before, fence, _ = text.rpartition("```") if text.endswith("```") else (text, "", "")
    return before.rstrip() if fence and "```" in before else text


def _written(action: Action) -> list[str]:
    kind = KINDS[action.kind]
    parts = []
    for argument in kind.required + kind.optional:
        value = value_of(action, argument)
        if value is None:
            break
        if argument == "text":
            value = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, float):  # str() would write 1e-05
            value = plain_number(value, SECONDS_DECIMALS if argument == "seconds" else 6)
        parts.append(str(value))
    return parts


def plain_number(value: float, decimals: int) -> str:
    """2, 0.5: a number without exponent and trailing zeros."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")
