"""Qwen's tool calls: `mobile_use` (Qwen3-VL) and `computer_use` (Qwen2.5-VL and Qwen3-VL).

    Thought: The search bar is at the top.
    Action: Tap the search bar.
    <tool_call>
    {"name": "mobile_use", "arguments": {"action": "click", "coordinate": [447, 81]}}
    </tool_call>

Whatever stands before the call is the model's thinking and is skipped. Source: QwenLM/Qwen3-VL,
cookbooks/utils/agent_function_call.py and cookbooks/mobile_agent.ipynb.
"""

import json
from typing import Any

from uirl_jax.actions.json_object import number, parse_object
from uirl_jax.actions.key_names import join_keys
from uirl_jax.actions.kinds import quote
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

OPEN, CLOSE = "<tool_call>", "</tool_call>"

# The tool's word -> the kind; what else the call must hold follows from the kind.
_MOBILE = {
    "click": "click",
    "long_press": "long_press",
    "swipe": "drag",
    "type": "type",
    "answer": "answer",
    "system_button": "system_button",
    "wait": "wait",
    "terminate": "terminate",
}
_COMPUTER = {
    "key": "keys",
    "type": "type",
    "mouse_move": "move",
    "left_click": "click",
    "left_click_drag": "drag",
    "right_click": "right_click",
    "middle_click": "middle_click",
    "double_click": "double_click",
    "triple_click": "triple_click",
    "scroll": "scroll",
    "hscroll": "scroll",
    "wait": "wait",
    "terminate": "terminate",
    "answer": "answer",
}
_BUTTONS = {
    "Back": Action("navigate_back"),
    "Home": Action("system_button", text="home"),
    "Menu": Action("system_button", text="menu"),
    "Enter": Action("keys", keys="enter"),
}
MOBILE_KINDS = frozenset({*_MOBILE.values(), *(action.kind for action in _BUTTONS.values())})
COMPUTER_KINDS = frozenset(_COMPUTER.values())


def read_mobile(text: str) -> Action:
    return _read(text, "mobile_use", _MOBILE)


def read_computer(text: str) -> Action:
    return _read(text, "computer_use", _COMPUTER)


def write_mobile(action: Action) -> str:
    button = next((name for name, meant in _BUTTONS.items() if meant == action), None)
    if button:
        return _call("mobile_use", {"action": "system_button", "button": button})
    if action.kind == "keys":
        raise ActionError(f"mobile_use has no key {quote(action.keys)}, only enter")
    word = next(word for word, kind in _MOBILE.items() if kind == action.kind)
    arguments: dict[str, Any] = {"action": word, **_points(action)}
    if action.kind == "terminate":
        arguments["status"] = action.text
    elif action.text is not None:
        arguments["text"] = action.text
    if action.seconds is not None:
        arguments["time"] = number(action.seconds)
    return _call("mobile_use", arguments)


def write_computer(action: Action) -> str:
    if action.kind == "scroll":
        assert action.amount is not None  # a scroll has one
        up_or_right = action.direction in ("up", "right")
        return _call(
            "computer_use",
            {
                "action": "scroll" if action.direction in ("up", "down") else "hscroll",
                **_points(action),
                "pixels": action.amount if up_or_right else -action.amount,
            },
        )
    word = next(word for word, kind in _COMPUTER.items() if kind == action.kind)
    if action.kind == "drag":  # from where the cursor is
        return _call("computer_use", {"action": word, "coordinate": [action.x2, action.y2]})
    arguments: dict[str, Any] = {"action": word, **_points(action)}
    if action.keys is not None:
        arguments["keys"] = action.keys.split("+")
    elif action.kind == "terminate":
        arguments["status"] = action.text
    elif action.text is not None:
        arguments["text"] = action.text
    elif action.seconds is not None:
        arguments["time"] = number(action.seconds)
    return _call("computer_use", arguments)


def summary(text: str) -> str:
    """A turn in a line, for the history of a later prompt: what stands after `Action:`, or the
    call. Line breaks and quotes go, as in the cookbook."""
    before, _, call = text.partition(OPEN)
    said = before.rpartition("Action:")[2] if "Action:" in before else call.replace(CLOSE, "")
    return said.strip().replace("\n", "").replace('"', "")


def _read(text: str, tool: str, words: dict[str, str]) -> Action:
    # The first opening and the last closing mark: what is typed may hold either.
    _, opened, rest = text.partition(OPEN)
    body, closed, after = rest.rpartition(CLOSE)
    if not opened or not closed or after.strip():
        raise ActionError(f"{quote(text)} does not end in {OPEN}...{CLOSE}")
    call = parse_object(body)
    arguments = call.get("arguments")
    if set(call) != {"name", "arguments"} or not isinstance(arguments, dict):
        raise ActionError(f'{quote(body)} is not a call: expected "name" and "arguments"')
    if call["name"] != tool:
        raise ActionError(f"a call of {quote(call['name'])}, expected {tool}")
    word = arguments.get("action")
    kind = words.get(word) if isinstance(word, str) else None
    if not isinstance(word, str) or kind is None:
        raise ActionError(f"{tool} knows no action {quote(word)}: it has {', '.join(words)}")
    return _action(kind, word, arguments)


def _action(kind: str, word: str, arguments: dict[str, Any]) -> Action:
    """The action in the model's own numbers; other arguments than the action's are ignored, as the
    tool's own implementation does."""
    if kind == "system_button":
        button = arguments.get("button")
        if not isinstance(button, str) or button not in _BUTTONS:
            raise ActionError(f"system_button: {quote(button)} is none of {', '.join(_BUTTONS)}")
        return _BUTTONS[button]
    if kind == "terminate":
        return Action(kind, text=_text(word, arguments, "status"))
    if kind in ("type", "answer"):
        return Action(kind, text=_text(word, arguments, "text"))
    if kind == "keys":
        keys = arguments.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ActionError(f"{word}: keys={quote(keys)} is not a list of key names")
        return Action(kind, keys=join_keys(keys))
    if kind == "wait":
        return Action(kind, seconds=arguments.get("time"))
    x, y = _point(word, arguments, "coordinate")
    if kind == "drag" and word == "swipe":
        x2, y2 = _point(word, arguments, "coordinate2")
        return Action(kind, x=x, y=y, x2=x2, y2=y2)
    if kind == "drag":
        return Action(kind, x2=x, y2=y)
    if kind == "scroll":
        pixels = arguments.get("pixels")
        if isinstance(pixels, bool) or not isinstance(pixels, int | float) or not pixels:
            raise ActionError(f"{word}: pixels={quote(pixels)} is 0 or not a number")
        names = ("up", "down") if word == "scroll" else ("right", "left")
        return Action(kind, x=x, y=y, direction=names[pixels < 0], amount=_amount(pixels))
    seconds = arguments.get("time") if kind == "long_press" else None
    return Action(kind, x=x, y=y, seconds=seconds)


def _amount(pixels: float) -> Any:
    """A whole number where the model wrote one; `kinds` refuses a fraction."""
    return number(abs(pixels))


def _text(word: str, arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ActionError(f"{word}: {name}={quote(value)} is not text")
    return value


def _point(word: str, arguments: dict[str, Any], name: str) -> tuple[Any, Any]:
    """(x, y), or (None, None) where the call has none."""
    value = arguments.get(name)
    if value is None:
        return None, None
    if not isinstance(value, list) or len(value) != 2:
        raise ActionError(f"{word}: {name}={quote(value)} is no [x, y]")
    return value[0], value[1]


def _points(action: Action) -> dict[str, Any]:
    points: dict[str, Any] = {}
    if action.x is not None:
        points["coordinate"] = [action.x, action.y]
    if action.x2 is not None:
        points["coordinate2"] = [action.x2, action.y2]
    return points


def _call(tool: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"
