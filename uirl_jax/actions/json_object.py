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
from uirl_jax.untrusted import json as untrusted_json

_NAMES = ("type", "action", "action_type")


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
    """One JSON object out of a model's text; its values are checked by `kinds`.

    Raises:
      ActionError: `untrusted.json` refuses it.
    """
    try:
        return untrusted_json.parse_text(text)
    except ValueError as error:
        raise ActionError(f"{quote(text)} {error}") from error
