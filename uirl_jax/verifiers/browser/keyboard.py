"""A US keyboard: what Chromium is told when a key goes down and up (`Input.dispatchKeyEvent`).

A key has a code (where it is), a virtual key code (Windows' number of it) and what it prints.
Source: the layout and the fields are those of Playwright's `usKeyboardLayout` and `RawKeyboardImpl`
(Apache-2.0), which drove these pages before; so shift+a prints a.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

Event = dict[str, Any]


class _Key(NamedTuple):
    code: str
    key: str
    virtual_code: int
    text: str = ""
    location: int = 0


_ROWS = (  # code, number, unshifted, shifted
    *(("Backquote", 192, "`~"), ("Minus", 189, "-_"), ("Equal", 187, "=+"), ("Slash", 191, "/?")),
    *(("Backslash", 220, "\\|"), ("BracketLeft", 219, "[{"), ("BracketRight", 221, "]}")),
    *(("Semicolon", 186, ";:"), ("Quote", 222, "'\""), ("Comma", 188, ",<"), ("Period", 190, ".>")),
    *(
        (f"Digit{n}", ord(n), n + above)
        for n, above in zip("0123456789", ")!@#$%^&*(", strict=True)
    ),
    *((f"Key{c.upper()}", ord(c.upper()), c + c.upper()) for c in "abcdefghijklmnopqrstuvwxyz"),
)
_KEYS = {  # by what it prints, or the name of an action (actions.NAMED_KEYS)
    **{c: _Key(code, c, number, c) for code, number, pair in _ROWS for c in pair},
    **{f"f{n}": _Key(f"F{n}", f"F{n}", 111 + n) for n in range(1, 13)},
    **{
        name: _Key(key, key, number)
        for name, key, number in (
            *(("tab", "Tab", 9), ("backspace", "Backspace", 8), ("delete", "Delete", 46)),
            *(("insert", "Insert", 45), ("esc", "Escape", 27), ("home", "Home", 36)),
            *(("end", "End", 35), ("pageup", "PageUp", 33), ("pagedown", "PageDown", 34)),
            *(("up", "ArrowUp", 38), ("down", "ArrowDown", 40)),
            *(("left", "ArrowLeft", 37), ("right", "ArrowRight", 39)),
        )
    },
    **dict.fromkeys(("enter", "\n", "\r"), _Key("Enter", "Enter", 13, "\r")),
    **dict.fromkeys(("space", " "), _Key("Space", " ", 32, " ")),
    "ctrl": _Key("ControlLeft", "Control", 17, location=1),
    "alt": _Key("AltLeft", "Alt", 18, location=1),
    "shift": _Key("ShiftLeft", "Shift", 16, location=1),
    **dict.fromkeys(("win", "cmd"), _Key("MetaLeft", "Meta", 91, location=1)),
}
_MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


def prints(character: str) -> bool:
    """Whether a key of this keyboard prints the character."""
    return len(character) == 1 and character in _KEYS


def press(names: Sequence[str]) -> list[Event]:
    """The events of keys that go down in this order, and up in the other.

    Args:
      names: of actions.NAMED_KEYS or characters. A character is what is printed, also with shift;
        nothing is with another modifier.
    """
    down: list[str] = []  # the modifiers that are held
    events = [_event(name, down, goes_down=True) for name in names]
    return events + [_event(name, down, goes_down=False) for name in reversed(names)]


def _event(name: str, down: list[str], *, goes_down: bool) -> Event:
    key = _KEYS[name]
    is_held = key.key in _MODIFIERS
    if is_held and goes_down:
        down.append(key.key)
    text = key.text if down in ([], ["Shift"]) else ""  # a shortcut prints nothing
    if is_held and not goes_down:
        down.remove(key.key)
    event: Event = {
        "type": "keyUp",
        "modifiers": sum(_MODIFIERS[held] for held in down),
        "windowsVirtualKeyCode": key.virtual_code,
        "code": key.code,
        "key": key.key,
        "location": key.location,
    }
    if goes_down:
        event |= {"type": "keyDown" if text else "rawKeyDown", "text": text, "unmodifiedText": text}
    return event
