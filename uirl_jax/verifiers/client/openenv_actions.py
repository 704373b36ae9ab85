"""Action -> the action of an OpenEnv environment: a table for each kind of environment.

    browsergym   {"action_str": "mouse_click(12, 34)"}; places need its action set `coord`
    openapp      {"action_type": "send_keys", ...}; it clicks elements by their id, never a place
    uirl_jax     the fields of `wire`: the bundled server, and whoever takes the same fields

The kind is told by the fields of the action in `GET /schema`. `openenv` sends what this makes.
Source: huggingface/OpenEnv (385de5e), envs/browsergym_env/models.py and envs/openapp_env/models.py;
ServiceNow/BrowserGym 0.14.3, core/action/functions.py and core/action/highlevel.py (the action
sets), core/action/parsers.py (strings are Python's).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from uirl_jax.errors import ActionError, VerifierError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers import wire

PLACES_HINT = "start it with the action set `coord`: docs/openenv.md"
KindName = Literal["browsergym", "openapp", "uirl_jax"]

# Playwright's names of keys, which BrowserGym and OpenApp hand on.
_KEYS = {
    **{"ctrl": "Control", "alt": "Alt", "shift": "Shift", "win": "Meta", "cmd": "Meta"},
    **{"enter": "Enter", "tab": "Tab", "space": "Space", "backspace": "Backspace"},
    **{"delete": "Delete", "insert": "Insert", "esc": "Escape", "home": "Home", "end": "End"},
    **{"up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight"},
    **{"pageup": "PageUp", "pagedown": "PageDown", **{f"f{n}": f"F{n}" for n in range(1, 13)}},
}
_BUTTONS = {"click": "left", "right_click": "right", "middle_click": "middle"}
_SCROLL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one kind of environment is spoken to."""

    name: KindName
    fields: frozenset[str]  # that tell it: all of them are in the schema of its action
    kinds: frozenset[str] | None  # actions that it takes; None: all that can be sent
    # The action, (x, y) of the pointer -> the `data` of a step message.
    payload: Callable[[Action, tuple[int, int], float], dict[str, Any]]
    hint: str = ""  # why it takes no others


def find_kind(schema: Mapping[str, Any], where: str) -> Kind:
    """The kind of environment that the schema of an action tells.

    Raises:
      VerifierError: none that is known.
    """
    properties = schema.get("properties")
    names = set(properties) if isinstance(properties, dict) else set()
    for kind in _ALL:
        if kind.fields <= names:
            return kind
    shown = printable(", ".join(sorted(names - {"metadata"})), 120) or "nothing"
    known = "; ".join(f"{', '.join(sorted(kind.fields))} ({kind.name})" for kind in _ALL)
    raise VerifierError(
        f"{where}: an action of this environment has the fields {shown}; known are {known}. "
        "Others need a bridge: docs/openenv.md"
    )


def check_action(kind: Kind, action: Action) -> None:
    """Raises ActionError for an action that no call of the environment stands for."""
    if kind.kinds is not None and action.kind not in kind.kinds:
        known = ", ".join(sorted(kind.kinds))
        raise ActionError(
            f"this environment ({kind.name}) has no {action.kind}: {known}{kind.hint}"
        )


def _browsergym(action: Action, pointer: tuple[int, int], delay_s: float) -> dict[str, Any]:
    """Floats are written without an exponent: BrowserGym's parser reads none in them."""
    x, y = pointer
    match action.kind:
        case "click" | "right_click" | "middle_click":
            text = f"mouse_click({x}, {y}, {_BUTTONS[action.kind]!r})"
        case "double_click":
            text = f"mouse_dblclick({x}, {y})"
        case "move":
            text = f"mouse_move({x}, {y})"
        case "drag":
            text = f"mouse_drag_and_drop({x}, {y}, {action.x2}, {action.y2})"
        case "scroll":
            dx, dy = (sign * (action.amount or 0) for sign in _SCROLL[action.direction or "down"])
            text = f"scroll_at({x}, {y}, {dx}, {dy})"
        case "type":
            text = f"keyboard_type({action.text!r})"
        case "keys":
            text = f"keyboard_press({_chord(action.keys or '')!r})"
        case "wait":
            text = f"noop({round(1000 * (action.seconds or 0.0))})"
        case _:
            text = "go_back()"
    return {"action_str": text}


def _openapp(action: Action, pointer: tuple[int, int], delay_s: float) -> dict[str, Any]:
    match action.kind:
        case "type":
            return {"action_type": "send_keys", "text": action.text}
        case "keys":
            return {"action_type": "send_keys", "text": _chord(action.keys or "")}
        case "scroll":
            return {"action_type": "scroll", "direction": action.direction}
        case _:
            return {"action_type": "noop"}


def _own(action: Action, pointer: tuple[int, int], delay_s: float) -> dict[str, Any]:
    return {**wire.action_fields(action, said=True), "delay": delay_s}  # `act` knows the session


def _chord(keys: str) -> str:
    return "+".join(_KEYS.get(name, name) for name in keys.lower().split("+"))


_ALL = (
    Kind(
        "browsergym",
        frozenset({"action_str"}),
        frozenset({*_BUTTONS, "double_click", "move", "drag", "scroll", "type", "keys", "wait"})
        | {"navigate_back"},
        _browsergym,
    ),
    Kind(
        "openapp",
        frozenset({"action_type", "bid"}),
        frozenset({"type", "keys", "scroll", "wait"}),
        _openapp,
        hint="; it clicks elements by their id, which a policy of pixels cannot name",
    ),
    Kind("uirl_jax", frozenset({"action_type", "x", "y"}), None, _own),
)
