"""Names of keys as models write them, converted to the spelling that `kinds` uses."""

from collections.abc import Iterable

_SPELLINGS = {
    **{"return": "enter", "escape": "esc", "control": "ctrl", "option": "alt", "del": "delete"},
    **{"command": "cmd", "super": "win", "meta": "win", "windows": "win", "ins": "insert"},
    **{"page_up": "pageup", "pgup": "pageup", "page_down": "pagedown", "pgdn": "pagedown"},
    **{f"arrow{way}": way for way in ("up", "down", "left", "right")},
    **{f"arrow_{way}": way for way in ("up", "down", "left", "right")},
    **{" ": "space", "back": "backspace"},
}


def join_keys(names: Iterable[str]) -> str:
    """ "ctrl+c" of ["Control", "C"]; unknown names stay; `kinds.validate` refuses them."""
    lowered = [name if name == " " else name.strip().lower() for name in names]
    return "+".join(_SPELLINGS.get(name, name) for name in lowered)
