"""The desktop's input side: what a click hits, where typed text goes, copy and paste, the popup.

A task (`desktop_tasks`) lays out the widgets and judges; `drawing` draws them. An action goes in,
at most one `Event` comes out; what a real desktop would ignore is ignored.
"""

import dataclasses

from PIL import Image

from uirl_jax.types import Action
from uirl_jax.verifiers.tasks.drawing import Box, Widget, draw_screen

MAX_FIELD_CHARS = 64  # as the maxlength of a form's field: what is typed beyond it is lost
_CLICK_KINDS = frozenset({"click", "double_click", "triple_click", "long_press"})
_WALLPAPER = ""


@dataclasses.dataclass(frozen=True)
class Event:
    """What an action did that a task may care about."""

    kind: str  # "click" (a primary click on `name`, "" the wallpaper) or "enter" (in field `name`)
    name: str


class Window:
    """Widgets, keyboard focus, clipboard and an optional modal popup of one session."""

    def __init__(
        self, width_px: int, height_px: int, widgets: list[Widget], popup: list[Widget]
    ) -> None:
        self.width_px = width_px
        self.height_px = height_px
        self.widgets = widgets
        self.popup = popup  # drawn on top; while there is one, nothing below it can be reached
        self.texts = {widget.name: "" for widget in widgets if widget.kind == "field"}
        self.clipboard = ""
        self.focus: str | None = None
        self.selected = False

    def boxes(self) -> dict[str, Box]:
        return {widget.name: widget.box for widget in (*self.widgets, *self.popup)}

    def image(self) -> Image.Image:
        """The screen as it stands, RGB."""
        return draw_screen(
            self.width_px,
            self.height_px,
            [*self.widgets, *self.popup],
            self.texts,
            self.focus,
            self.selected,
        )

    def clear_fields(self) -> None:
        self.texts = dict.fromkeys(self.texts, "")
        self.focus, self.selected = None, False

    def apply(self, action: Action) -> Event | None:
        """Does what the action does on a desktop. Kinds without a meaning here change nothing."""
        if action.kind in _CLICK_KINDS:
            return self._click(action)
        if self.popup:
            if action.kind == "keys" and _chord(action.keys) == "escape":
                self.popup = []
            return None
        if action.kind == "type":
            line, newline, _ = (action.text or "").partition("\n")
            self._insert(line)
            if newline:  # pressed like Enter; every task's form is submitted and unfocused by it
                return self._press("enter")
        elif action.kind == "keys":
            return self._press(_chord(action.keys))
        return None

    def _click(self, action: Action) -> Event | None:
        if action.x is None or action.y is None:
            return None
        if self.popup:
            if any(w.name == "popup_close" and w.contains(action.x, action.y) for w in self.popup):
                self.popup = []
            return None
        hit = next((w for w in reversed(self.widgets) if w.contains(action.x, action.y)), None)
        if hit is not None and hit.kind in ("field", "cell"):
            self.focus = hit.name
            self.selected = hit.kind == "field" and action.kind in ("double_click", "triple_click")
        elif hit is None or hit.kind != "button":  # a button leaves the keyboard where it is
            self.focus, self.selected = None, False
        return Event("click", _WALLPAPER if hit is None else hit.name)

    def _insert(self, text: str) -> None:
        if self.focus not in self.texts:
            return
        before = "" if self.selected else self.texts[self.focus]
        printable = "".join(char for char in text if char.isprintable())
        self.texts[self.focus] = (before + printable)[:MAX_FIELD_CHARS]
        self.selected = False

    def _press(self, chord: str) -> Event | None:
        field = self.focus if self.focus in self.texts else None
        in_field = field is not None
        if chord == "ctrl+c":
            self._copy()
        elif chord == "ctrl+v":
            self._insert(self.clipboard)
        elif chord == "ctrl+x" and in_field and self.selected:
            self._copy()
            self._insert("")
        elif chord == "ctrl+a" and in_field:
            self.selected = True
        elif chord == "backspace" and field is not None:
            self.texts[field] = "" if self.selected else self.texts[field][:-1]
            self.selected = False
        elif chord == "delete" and in_field and self.selected:
            self._insert("")
        elif chord == "tab" and self.texts:
            names = list(self.texts)
            at = names.index(field) if field is not None else -1
            self.focus, self.selected = names[(at + 1) % len(names)], False
        elif chord == "enter" and field is not None:
            return Event("enter", field)
        return None

    def _copy(self) -> None:
        """Copies the focused cell, or the focused field's text where all of it is selected."""
        cell = next((w for w in self.widgets if w.kind == "cell" and w.name == self.focus), None)
        if cell is not None:
            self.clipboard = cell.text
        elif self.selected and self.focus in self.texts:
            self.clipboard = self.texts[self.focus]


def _chord(keys: str | None) -> str:
    """One spelling for a chord: "Control + C" and "ctrl+c" are the same key press."""
    names = {"control": "ctrl", "return": "enter", "kp_enter": "enter", "esc": "escape"}
    parts = [part.strip().lower() for part in (keys or "").split("+")]
    return "+".join(names.get(part, part) for part in parts)
