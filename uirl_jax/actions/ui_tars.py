"""UI-TARS: `Thought: ... Action: click(start_box='<|box_start|>(x,y)<|box_end|>')`.

Before the action may stand `Thought:`, `Reflection:` and `Action_Summary:`, over as many lines as
the model likes. Parsed by the grammar below; the reference implementation uses Python's `ast` and
`eval`. Source: bytedance/UI-TARS, codes/ui_tars/action_parser.py and prompts.py (1.5).
"""

import re
from typing import Any

from uirl_jax.actions.arguments import plain_number
from uirl_jax.actions.key_names import join_keys
from uirl_jax.actions.kinds import SECONDS_DECIMALS, quote
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

BOX_START, BOX_END = "<|box_start|>", "<|box_end|>"
WAIT_S = 5.0  # "wait() #Sleep for 5s"
SCROLL_PX = 300  # a scroll says no amount; three notches, as verifiers take it

_WORDS = {
    **{"click": "click", "left_single": "click", "left_double": "double_click"},
    **{"right_single": "right_click", "hover": "move", "long_press": "long_press"},
    **{"drag": "drag", "select": "drag", "hotkey": "keys", "type": "type", "scroll": "scroll"},
    **{"wait": "wait", "finished": "terminate", "call_user": "terminate"},
    **{"press_back": "navigate_back", "press_home": "system_button"},
}
KINDS = frozenset(_WORDS.values())

_ACTION_LINE = re.compile(r"^Action:", re.MULTILINE)
_CALL = re.compile(r"([a-z_]{1,32})\((.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([a-z_]{1,32})\s*=\s*(?:'([^']*)'|\"([^\"]*)\")\s*(,|$)")
# One argument alone may hold unescaped quotes of its own kind: type(content='it's').
_CONTENT = re.compile(r"\s*(content|key|hotkey)\s*=\s*(?:'(.*)'|\"(.*)\")\s*", re.DOTALL)
_NUMBER = r"(-?[0-9]{1,6}(?:\.[0-9]{1,6})?)"
_COMMA = r"\s*,\s*"
_POINT = re.compile(rf"\(\s*{_NUMBER}{_COMMA}{_NUMBER}\s*\)|<point>{_NUMBER}\s+{_NUMBER}</point>")
_BOX = re.compile(rf"[(\[]\s*{_COMMA.join([_NUMBER] * 4)}\s*[)\]]")
_ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def read(text: str) -> Action:
    starts = [match.end() for match in _ACTION_LINE.finditer(text)]
    body = (text[starts[-1] :] if starts else text.rpartition("Action:")[2]).strip()
    match = _CALL.fullmatch(body)
    if match is None:
        raise ActionError(
            f"{quote(body)} is not an action: expected Action: click(start_box='(x,y)')"
        )
    word, inside = match.groups()
    kind = _WORDS.get(word)
    if kind is None:
        raise ActionError(f"unknown action {word!r}, known ones: {', '.join(_WORDS)}")
    if word in ("type", "finished", "hotkey") and inside.strip():
        content = _CONTENT.fullmatch(inside)
        if content is None or (content[1] == "content") != (word != "hotkey"):
            name = "key" if word == "hotkey" else "content"
            raise ActionError(f"{word}: {quote(inside)} is not {name}='...'")
        typed = _unescape(content[2] if content[2] is not None else content[3])
        if word == "hotkey":
            return Action(kind, keys=join_keys(re.split(r"[\s+]+", typed.strip())))
        return Action(kind, text=typed if word == "type" else "success")
    return _action(kind, word, _arguments(word, inside))


def write(action: Action) -> str:
    return f"Action: {_written(action)}"


def _action(kind: str, word: str, given: dict[str, str]) -> Action:
    if kind == "terminate":
        return Action(kind, text="success" if word == "finished" else "failure")
    if kind == "wait":
        return Action(kind, seconds=WAIT_S)
    if kind == "system_button":
        return Action(kind, text="home")
    if kind == "navigate_back":
        return Action(kind)
    if kind in ("type", "keys"):
        raise ActionError(f"{word}() lacks {'content' if kind == 'type' else 'key'}='...'")
    if kind == "scroll":
        direction = _given(word, given, "direction").strip().lower()
        point = _point(word, given, "start_box", "point") if len(given) > 1 else (None, None)
        return Action(kind, x=point[0], y=point[1], direction=direction, amount=SCROLL_PX)
    if kind == "drag":
        x, y = _point(word, given, "start_box", "start_point")
        x2, y2 = _point(word, given, "end_box", "end_point")
        return Action(kind, x=x, y=y, x2=x2, y2=y2)
    x, y = _point(word, given, "start_box", "point")
    seconds = None
    if kind == "long_press" and given.get("time"):
        if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,3})?", given["time"]):
            raise ActionError(f"long_press: time={quote(given['time'])} is not a number of seconds")
        seconds = float(given["time"])
    return Action(kind, x=x, y=y, seconds=seconds)


def _written(action: Action) -> str:
    word = next(word for word, kind in _WORDS.items() if kind == action.kind)
    if action.kind == "terminate":
        return "finished()" if action.text == "success" else "call_user()"
    if action.kind == "wait":
        if action.seconds != WAIT_S:
            raise ActionError(f"UI-TARS always waits {WAIT_S:g} s, this is {action.seconds:g} s")
        return "wait()"
    if action.kind == "system_button":
        if action.text != "home":
            raise ActionError(f"UI-TARS has no button {quote(action.text)}")
        return "press_home()"
    if action.kind == "navigate_back":
        return "press_back()"
    if action.kind == "type":
        return f"type(content='{_escape(action.text or '')}')"
    if action.kind == "keys":
        return f"hotkey(key='{_escape((action.keys or '').replace('+', ' '))}')"
    box = f"start_box='{_box(action.x, action.y)}'"
    if action.kind == "drag":
        return f"drag({box}, end_box='{_box(action.x2, action.y2)}')"
    if action.kind == "scroll":
        if action.amount != SCROLL_PX:
            raise ActionError(f"UI-TARS scrolls {SCROLL_PX} px, this is {action.amount} px")
        start = "" if action.x is None else f"{box}, "
        return f"scroll({start}direction='{action.direction}')"
    if action.seconds is not None:
        box += f", time='{plain_number(action.seconds, SECONDS_DECIMALS)}'"
    return f"{word}({box})"


def _arguments(word: str, inside: str) -> dict[str, str]:
    given: dict[str, str] = {}
    at = 0
    while inside[at:].strip():
        match = _ARGUMENT.match(inside, at)
        if match is None or match[1] in given:
            raise ActionError(f"{word}: {quote(inside)} is not a list of name='value'")
        given[match[1]] = match[2] if match[2] is not None else match[3]
        at = match.end()
    return given


def _given(word: str, given: dict[str, str], *names: str) -> str:
    for name in names:
        if name in given:
            return given[name]
    raise ActionError(f"{word} lacks {names[0]}='...'")


def _point(word: str, given: dict[str, str], *names: str) -> tuple[Any, Any]:
    """A point, or the middle of a box."""
    text = _given(word, given, *names).replace(BOX_START, "").replace(BOX_END, "").strip()
    box = _BOX.fullmatch(text)
    if box is not None:
        x0, y0, x1, y1 = (_number(digits) for digits in box.groups())
        return _middle(x0, x1), _middle(y0, y1)
    point = _POINT.fullmatch(text)
    if point is None:
        raise ActionError(f"{word}: {quote(text)} is not a point like (100,200)")
    x, y = (digits for digits in point.groups() if digits is not None)
    return _number(x), _number(y)


def _number(digits: str) -> int | float:
    return float(digits) if "." in digits else int(digits)


def _middle(low: int | float, high: int | float) -> int | float:
    whole = isinstance(low, int) and isinstance(high, int)
    return (low + high) // 2 if whole else (low + high) / 2


def _box(x: float | None, y: float | None) -> str:
    shown = (plain_number(v, 6) if isinstance(v, float) else v for v in (x, y))
    return f"{BOX_START}({','.join(map(str, shown))}){BOX_END}"


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
    return escaped.replace("\n", "\\n").replace("\t", "\\t")


def _unescape(text: str) -> str:
    """What Python would read between quotes, of the escapes that the prompt names; any other
    backslash stands for itself."""
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text, flags=re.DOTALL)
