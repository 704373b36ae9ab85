"""The names of the dialect G1+: an action as the fields of an `act` call, and back.

The client writes the fields; the server reads them from a query or a JSON body and checks each.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from uirl_jax import actions
from uirl_jax.errors import ActionError, VerifierError
from uirl_jax.types import Action
from uirl_jax.untrusted import json as untrusted_json

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of request ids too; always with fullmatch
IMAGE_FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
DEFAULT_DELAY_S = 1.0
KEY_S = 0.01  # that a server may take for each character of a text, beside other work
MAX_BUNDLED_DELAY_S = 10.0  # that the bundled server takes of one action
DEFAULT_SCROLL_PX = 300  # what a scroll without an amount means: three notches

# Said to the actor, and nothing that happens on a screen: sent to a session only where that judges
# every action, as a recorded step does.
SAID = ("terminate", "answer")
# Where the wire's name differs from the one in `actions`.
_WIRE_NAMES = {"click": "left_click", "move": "mouse_move"}
_KINDS = {_WIRE_NAMES.get(kind, kind): kind for kind in actions.KINDS}
_ON_SCREEN = tuple(name for name in _KINDS if name not in SAID)
ACTION_TYPES = ("screenshot", *_ON_SCREEN, *SAID)
FIELD_TYPES: dict[str, tuple[type, ...]] = {  # of an `act`; the last one is what a message names
    **dict.fromkeys(("x", "y", "x2", "y2", "amount"), (int,)),
    **dict.fromkeys(("seconds", "delay"), (int, float)),
    **dict.fromkeys(("action_type", "text", "keys", "direction", "format", "request_id"), (str,)),
}
_WHOLE = re.compile(r"-?[0-9]{1,10}")
MAX_WHOLE = 10**10 - 1
_DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


@dataclasses.dataclass(frozen=True)
class ActCall:
    """A checked `act`."""

    action: Action | None  # None: only a screenshot is wanted
    delay_s: float  # between the action and the screenshot that answers it
    image_format: str
    request_id: str  # "": none


def action_fields(action: Action, *, said: bool = False) -> dict[str, str | int | float]:
    """The fields of an `act` call for this action.

    Args:
      said: whether the session takes SAID too.

    Raises:
      VerifierError: no call stands for it.
    """
    name = _WIRE_NAMES.get(action.kind, action.kind)
    if name not in _KINDS or (name in SAID and not said):
        raise VerifierError(f"an action {action.kind!r} cannot be sent to a verifier")
    fields = {k: v for k, v in vars(action).items() if v is not None and k != "kind"}
    return {"action_type": name, **fields}


def read_query(query: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an `act` by GET, with numbers as numbers; text that is none is refused.

    Raises:
      ValueError: with a printable reason.
    """
    fields: dict[str, Any] = {}
    for name, text in query.items():
        types = FIELD_TYPES.get(name, (str,))
        if types == (int,):
            fields[name] = whole_number(name, text)
        elif types == (str,):
            fields[name] = text
        elif _DECIMAL.fullmatch(text):
            fields[name] = float(text)
        else:
            raise ValueError(f"{name} is {untrusted_json.printable(text)!r}, expected seconds")
    return fields


def read_call(
    fields: Mapping[str, Any],
    screen_size: tuple[int, int],
    max_delay_s: float,
    default_delay_s: float = DEFAULT_DELAY_S,
    *,
    said: bool = False,
) -> ActCall:
    """Checks the fields of an `act`, whichever way they came.

    Args:
      fields: from a JSON body or `read_query`; null means that the field was not given.
      screen_size: (width, height) in pixels; coordinates outside are refused.
      max_delay_s: the longest delay that is accepted. A `wait` is cut to it: what is shown here
        hardly ever changes by itself, so that a longer one shows nothing else.
      default_delay_s: of a call that names none.
      said: whether the session takes SAID too.

    Raises:
      ValueError: with a printable reason.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name not in FIELD_TYPES:
            known = ", ".join(FIELD_TYPES)
            raise ValueError(f"unknown field {untrusted_json.printable(name)!r}, known: {known}")
        types = FIELD_TYPES[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{name} is a {type(value).__name__}, expected {types[-1].__name__}")
    request_id = given.pop("request_id", "")
    if request_id and not SESSION_ID.fullmatch(request_id):
        raise ValueError("request_id is not 1-64 letters, digits, _ or -")
    image_format = read_image_format(given.pop("format", "png"))
    delay_s = float(given.pop("delay", default_delay_s))
    if not 0.0 <= delay_s <= max_delay_s:
        raise ValueError(f"delay is {delay_s:g} s, allowed: 0-{max_delay_s:g}")
    action_type = given.pop("action_type", "")
    if action_type == "screenshot":
        if given:
            raise ValueError(f"a screenshot takes no {', '.join(given)}")
        return ActCall(None, 0.0, image_format, request_id)
    if action_type not in _KINDS or (action_type in SAID and not said):
        shown = untrusted_json.printable(action_type)
        known = ", ".join(("screenshot", *_ON_SCREEN, *(SAID if said else ())))
        raise ValueError(f"action_type is {shown!r}, known: {known}")
    if action_type == "scroll":
        given.setdefault("amount", DEFAULT_SCROLL_PX)
    action = Action(kind=_KINDS[action_type], **given)
    try:
        actions.validate(action, screen_size)
    except ActionError as error:
        raise ValueError(untrusted_json.printable(str(error), 200)) from error
    if action.kind == "wait":
        delay_s = min(max_delay_s, delay_s + (action.seconds or 0.0))
    return ActCall(action, delay_s, image_format, request_id)


def read_image_format(name: str) -> str:
    """Raises ValueError for a format that is not one of IMAGE_FORMATS."""
    if name not in IMAGE_FORMATS:
        shown = untrusted_json.printable(name)
        raise ValueError(f"format is {shown!r}, known: {', '.join(IMAGE_FORMATS)}")
    return name


def whole_number(name: str, text: str) -> int:
    """Raises ValueError for anything but a short decimal integer."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{name} is {untrusted_json.printable(text)!r}, expected a whole number")
    return int(text)
