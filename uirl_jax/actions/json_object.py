"""The format `json`: {"type": "click", "x": 100, "y": 200}, and JSON of models read with limits.

`action` and `action_type` are taken for `type`. A sentence before the object and a fence of ```
around it are accepted, two objects are not. Names of arguments are those of `kinds`.
"""

import json
from typing import Any

from uirl_jax.actions.arguments import without_fence
from uirl_jax.actions.kinds import KINDS, field_of, quote, usage, value_of
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

_NAMES = ("type", "action", "action_type")
_MAX_INTEGER_CHARS = 20


def read_json(text: str) -> Action:
    text = without_fence(text)
    given = parse_object(text[max(text.find("{"), 0) :])
    names = [name for name in _NAMES if name in given]
    if len(names) != 1:
        raise ActionError(f'{quote(text)} has {len(names)} of "type", "action", "action_type"')
    name = given.pop(names[0])
    if not isinstance(name, str) or name not in KINDS:
        raise ActionError(f"unknown action {quote(name)}, known ones: {', '.join(KINDS)}")
    kind = KINDS[name]
    fields = {}
    for argument, value in given.items():
        if argument not in kind.required + kind.optional:
            raise ActionError(f"{name} takes no {quote(argument)}: {usage(name)}")
        fields[field_of(argument)] = value
    return Action(kind=name, **fields)


def write_json(action: Action) -> str:
    kind = KINDS[action.kind]
    fields: dict[str, Any] = {"type": action.kind}
    for argument in kind.required + kind.optional:
        value = value_of(action, argument)
        if value is not None:
            fields[argument] = number(value) if isinstance(value, float) else value
    return json.dumps(fields, ensure_ascii=False)


def usage_json(kind: str) -> str:
    """{"type": "wait", "seconds": ...}: how this format writes a kind, as for a prompt."""
    spec = KINDS[kind]
    fields = ", ".join(f'"{argument}": ...' for argument in spec.required + spec.optional)
    return f'{{"type": "{kind}", {fields}}}'.replace(", }", "}")


def number(value: float) -> int | float:
    """2 for 2.0: models write whole numbers without a point."""
    return int(value) if value == int(value) else value


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object out of a model's text.

    Raises:
      ActionError: it is none, or holds what Python's parser takes and JSON does not have (NaN,
        numbers of any length), a key twice, or half a surrogate pair.
    """
    try:
        value = json.loads(
            text,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_short,
            object_pairs_hook=_unique,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else _reason(error)
        raise ActionError(f"{quote(text)} is not a JSON object: {reason}") from error
    if not isinstance(value, dict):
        raise ActionError(f"{quote(text)} is a JSON {type(value).__name__}, expected an object")
    return value


def _reason(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _refuse(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _finite(digits: str) -> float:
    if abs(float(digits)) > 1e9:  # infinity too
        raise ValueError("it holds a number beyond all bounds")
    return float(digits)


def _short(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_CHARS:
        raise ValueError(f"it holds an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError("it holds a key twice")
    return dict(pairs)
