"""What a person did on the recorder's page -> the action that the agent would have to take.

The page (page.js) decides where one gesture ends: clicks that belong together, a drag, the wheel at
rest, a text that is finished, a key with its modifiers. Here each is named, as one action in pixels
of the session's screen. Nothing is performed here.
"""

from collections.abc import Mapping

from uirl_jax import actions
from uirl_jax.actions.key_names import join_keys
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

LONG_PRESS_S = 0.8  # held shorter it was a click by a slow hand
NOTCH_PX = 100  # amounts in whole notches: wheels and touchpads give any number
_CLICKS = {1: "click", 2: "double_click", 3: "triple_click"}
_MODIFIERS = ("ctrl", "alt", "shift", "meta")
# The keys of a US keyboard by their place: an action names a key by what it types without shift.
_PLACES = {
    **{f"Digit{n}": str(n) for n in range(10)},
    **{"Backquote": "`", "Minus": "-", "Equal": "=", "BracketLeft": "[", "BracketRight": "]"},
    **{"Backslash": "\\", "Semicolon": ";", "Quote": "'", "Comma": ",", "Period": "."},
    **{"Slash": "/", "Space": "space"},
}


def read(gesture: Mapping[str, object], screen_size: tuple[int, int]) -> Action:
    """The action of a gesture, checked.

    Args:
      gesture: JSON from the page; `kind` says which fields there are:
        mouse   button ("left", "right"), clicks, held_s, x, y, x2, y2 (where it was let go)
        wheel   x, y, dx, dy: pixels, positive is right and down
        text    text
        key     key, code (as KeyboardEvent has them), modifiers
        words   text: an action as the format `text` writes it, such as wait(1)
      screen_size: (width, height) in pixels.

    Raises:
      ActionError: with the reason, for anything else.
    """
    kind = gesture.get("kind")
    if kind == "words":
        return actions.parse(_text(gesture, "text"), screen_size)
    readers = {"mouse": _mouse, "wheel": _wheel, "key": _key}
    if kind == "text":
        action = Action("type", text=_text(gesture, "text"))
    elif isinstance(kind, str) and kind in readers:
        action = readers[kind](gesture)
    else:
        raise ActionError(f"a gesture of kind {str(kind)[:40]!r}, expected mouse, wheel, key, ...")
    actions.validate(action, screen_size)
    return action


def _mouse(gesture: Mapping[str, object]) -> Action:
    x, y, x2, y2, clicks = (_whole(gesture, name) for name in ("x", "y", "x2", "y2", "clicks"))
    if gesture.get("button") == "right":
        return Action("right_click", x=x, y=y)
    if (x, y) != (x2, y2):
        return Action("drag", x=x, y=y, x2=x2, y2=y2)
    held_s = gesture.get("held_s")
    if isinstance(held_s, int | float) and held_s >= LONG_PRESS_S and clicks == 1:
        return Action("long_press", x=x, y=y, seconds=round(float(held_s), 1))
    if clicks not in _CLICKS:
        raise ActionError(f"{clicks} clicks at once, at most {max(_CLICKS)} are one action")
    return Action(_CLICKS[clicks], x=x, y=y)


def _wheel(gesture: Mapping[str, object]) -> Action:
    x, y, dx, dy = (_whole(gesture, name) for name in ("x", "y", "dx", "dy"))
    if dx == dy == 0:
        raise ActionError("the wheel went as far back as it had gone: nothing was scrolled")
    if abs(dy) >= abs(dx):
        direction, distance_px = ("down" if dy > 0 else "up"), abs(dy)
    else:
        direction, distance_px = ("right" if dx > 0 else "left"), abs(dx)
    notches = max(1, round(distance_px / NOTCH_PX))
    return Action("scroll", direction=direction, amount=notches * NOTCH_PX, x=x, y=y)


def _key(gesture: Mapping[str, object]) -> Action:
    key, code = _text(gesture, "key"), _text(gesture, "code")
    given = gesture.get("modifiers")
    if not isinstance(given, list) or not set(_MODIFIERS).issuperset(map(str, given)):
        raise ActionError(f"modifiers are {str(given)[:40]}, expected some of {_MODIFIERS}")
    if len(key) == 1 and key.lower() not in actions.CHARACTER_KEYS:
        key = _PLACES.get(code, key)  # shift and 1 is "!", which is not a key
    held = [name for name in _MODIFIERS if name in given]
    return Action("keys", keys=join_keys([*held, key]))


def _whole(gesture: Mapping[str, object], name: str) -> int:
    value = gesture.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ActionError(f"{name} is {str(value)[:40]!r}, expected a whole number")
    return value


def _text(gesture: Mapping[str, object], name: str) -> str:
    value = gesture.get(name)
    if not isinstance(value, str) or not value:
        raise ActionError(f"{name} is {str(value)[:40]!r}, expected some text")
    return value
