"""The tasks of the hermetic desktop: start state, rule of success and scripted demonstrator.

A task lays out widgets from a seeded generator, gets the `Event` that an input caused, counts, and
says done and reward. `desktop.Session` drives it. Tasks do not draw and know no HTTP.

Rewards (a policy's own claim of success pays nothing):
  click_button  1.0 when the click that ends the episode is on the right button, else 0.0
  enter_text    1.0 when the field holds exactly the text at the moment of submission, else 0.0
  data_entry    max(0, right rows - wrong - duplicate submissions) / rows, a running value
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from uirl_jax.types import Action
from uirl_jax.verifiers.tasks import drawing
from uirl_jax.verifiers.tasks.drawing import Box, Widget
from uirl_jax.verifiers.tasks.window import Event, Window

SCREEN_PX = (224, 168)
SHEET_SCREEN_PX = (448, 336)
EDGE_PX = 2  # nothing to click in the very corners: real servers trip over a fail-safe there
GAP_PX = 5
PLATE_HEIGHT_PX = 14
PLATE_GAP_PX = 1

CAPTIONS = ("Save", "Open", "Send", "Print", "Copy", "Edit", "Help", "Find", "Next", "Back")
WORDS = (
    *("kiwi", "lime", "plum", "pear", "fig", "mango", "grape", "melon", "apple", "olive"),
    *("bread", "cheese", "pepper", "carrot", "onion", "rice", "bean", "corn", "mint", "sage"),
)
COLUMNS: dict[str, tuple[str, ...]] = {
    "Name": ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jon"),
    "City": ("Oslo", "Rome", "Lima", "Bern", "Kyiv", "Riga", "Nice", "Cork", "Baku", "Doha"),
    "Code": ("A17", "B42", "C08", "D63", "E91", "F25", "G34", "H76", "J50", "K89"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """A parsed variant. All fields but popup and shift are one task's (see desktop.VARIANTS)."""

    buttons: int = 4  # click_button: how many
    colors: int = 8  # click_button: how many colours they are taken from, the easiest first
    by: str = "color"  # click_button: what the instruction names, color or label
    misses: int = 0  # click_button: clicks beside every button that do not end the episode
    words: int = len(WORDS)  # enter_text: of how many the one to type is
    rows: int = 3  # data_entry
    columns: int = 2  # data_entry
    popup: int = 0  # 1: a modal dialog covers part of the screen and has to be closed first
    shift: int = 0  # 1: the layout moves once, after the first action


def _integer(rng: np.random.Generator, low: int, high: int) -> int:
    """Uniform in low..high, both included."""
    return int(rng.integers(low, high + 1))


def _place(
    rng: np.random.Generator, sizes: Sequence[tuple[int, int]], screen: tuple[int, int]
) -> list[tuple[int, int]]:
    """Upper left corners for boxes of these (width, height), anywhere on the screen, apart.

    Rejection: uniform places, so that the whole screen is used; a jam starts the layout anew.
    """
    while True:
        placed: list[Box] = []
        for width, height in sizes:
            for _ in range(40):
                x0 = _integer(rng, EDGE_PX, screen[0] - width - EDGE_PX)
                y0 = _integer(rng, EDGE_PX, screen[1] - height - EDGE_PX)
                x1, y1 = x0 + width, y0 + height
                if all(
                    x1 + GAP_PX <= a0 or a1 + GAP_PX <= x0 or y1 + GAP_PX <= b0 or b1 + GAP_PX <= y0
                    for a0, b0, a1, b1 in placed
                ):
                    placed.append((x0, y0, x1, y1))
                    break
            else:
                break
        if len(placed) == len(sizes):
            return [(box[0], box[1]) for box in placed]


def _plate_below(box: Box, name: str, text: str) -> Widget:
    """The caption of a widget: a rectangle just below it that does nothing when clicked."""
    x0, _, x1, y1 = box
    top = y1 + PLATE_GAP_PX
    return Widget(f"{name}_plate", "plate", (x0, top, x1, top + PLATE_HEIGHT_PX), text)


def popup_widgets(rng: np.random.Generator, screen: tuple[int, int]) -> list[Widget]:
    """A modal dialog at a random place, from the bottom to the top, with its Close button."""
    width, height = 140, 66
    ((x0, y0),) = _place(rng, [(width, height)], screen)
    body = (x0, y0, x0 + width, y0 + height)
    close = (x0 + width // 2 - 26, y0 + 34, x0 + width // 2 + 26, y0 + 60)
    return [
        Widget("popup", "dialog", body, "", drawing.DIALOG_COLOR),
        Widget("popup_title", "title", (x0, y0, x0 + width, y0 + 16), "News", drawing.TITLE_COLOR),
        Widget("popup_close", "button", close, "Close", drawing.CLOSE_COLOR),
    ]


def click_inside(rng: np.random.Generator, box: Box) -> Action:
    """A click anywhere in a box."""
    x0, y0, x1, y1 = box
    return Action("click", x=_integer(rng, x0, x1 - 1), y=_integer(rng, y0, y1 - 1))


def click_middle(box: Box) -> Action:
    """A click in the middle of a box, to the nearest 10 pixels where that is inside still.

    What a demonstrator leaves to chance a policy has to learn as noise: clicks all over the middle
    half of a field are 6 nats each, and what there is to read was hardly learnt beside them.
    """
    x0, y0, x1, y1 = box

    def middle(low: int, high: int) -> int:
        exact = (low + high) // 2
        tens = round(exact / 10) * 10
        return tens if low <= tens < high else exact

    return Action("click", x=middle(x0, x1), y=middle(y0, y1))


class ClickButton:
    """One of several differently coloured buttons is to be clicked; its caption does not count."""

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self.width_px, self.height_px = SCREEN_PX
        count = options.buttons
        names = list(drawing.BUTTON_COLORS)[: options.colors]
        self._colors = [names[i] for i in rng.permutation(len(names))[:count]]
        self._captions = [CAPTIONS[i] for i in rng.permutation(len(CAPTIONS))[:count]]
        self._sizes = [(_integer(rng, 44, 58), _integer(rng, 26, 32)) for _ in range(count)]
        wanted = _integer(rng, 0, count - 1)
        self.goal = self._colors[wanted]
        named = self.goal if options.by == "color" else self._captions[wanted]
        self.instruction = f"Click the {named} button."
        self.done = False
        self.reward: float | None = None
        self._misses_left = options.misses
        self._clicked: str | None = None
        self._num_clicks = 0

    def layout(self, rng: np.random.Generator) -> list[Widget]:
        below = PLATE_GAP_PX + PLATE_HEIGHT_PX
        places = _place(rng, [(w, h + below) for w, h in self._sizes], SCREEN_PX)
        widgets = []
        for (x0, y0), (width, height), color, caption in zip(
            places, self._sizes, self._colors, self._captions, strict=True
        ):
            box = (x0, y0, x0 + width, y0 + height)
            widgets.append(Widget(color, "button", box, "", drawing.BUTTON_COLORS[color]))
            widgets.append(_plate_below(box, color, caption))
        return widgets

    def handle(self, event: Event, window: Window) -> None:
        if event.kind != "click":
            return
        self._num_clicks += 1
        self._clicked = event.name
        if event.name not in self._colors and self._misses_left > 0:
            self._misses_left -= 1
            return
        self.done = True
        self.reward = 1.0 if event.name == self.goal else 0.0

    def counts(self) -> dict[str, Any]:
        return {"num_clicks": self._num_clicks, "clicked": self._clicked}

    def script(self, window: Window, rng: np.random.Generator, wrong: bool) -> Action:
        """Clicks the button; the mistake is to click its caption."""
        boxes = window.boxes()
        if wrong:
            return click_inside(rng, boxes[f"{self.goal}_plate"])
        return click_middle(boxes[self.goal])


class EnterText:
    """A field is to be focused and filled, and the form submitted."""

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self.width_px, self.height_px = SCREEN_PX
        self.goal = WORDS[_integer(rng, 0, options.words - 1)]
        self.instruction = f"Type {self.goal} and press OK."
        names = list(drawing.BUTTON_COLORS)
        self._color = drawing.BUTTON_COLORS[names[_integer(rng, 0, len(names) - 1)]]
        self._field_size = (_integer(rng, 80, 104), _integer(rng, 26, 30))
        self._ok_size = (_integer(rng, 44, 58), _integer(rng, 26, 32))
        self.done = False
        self.reward: float | None = None

    def layout(self, rng: np.random.Generator) -> list[Widget]:
        width, height = self._field_size
        full_height = height + PLATE_GAP_PX + PLATE_HEIGHT_PX
        (x0, y0), (ok_x0, ok_y0) = _place(rng, [(width, full_height), self._ok_size], SCREEN_PX)
        field = (x0, y0, x0 + width, y0 + height)
        ok = (ok_x0, ok_y0, ok_x0 + self._ok_size[0], ok_y0 + self._ok_size[1])
        return [
            Widget("field", "field", field),
            _plate_below(field, "field", "Text"),
            Widget("ok", "button", ok, "OK", self._color),
        ]

    def handle(self, event: Event, window: Window) -> None:
        if event.kind == "enter" or event.name == "ok":
            self.done = True
            self.reward = 1.0 if window.texts["field"] == self.goal else 0.0

    def counts(self) -> dict[str, Any]:
        return {"submitted": self.done}

    def script(self, window: Window, rng: np.random.Generator, wrong: bool) -> Action:
        """Focus, type, press OK; the mistake is to click the field's caption, or beside OK."""
        boxes = window.boxes()
        typed = window.texts["field"]
        if typed == self.goal:
            return self._beside(rng, boxes["ok"]) if wrong else click_middle(boxes["ok"])
        if window.focus != "field":
            if wrong:
                return click_inside(rng, boxes["field_plate"])
            return click_middle(boxes["field"])
        if typed and not window.selected:
            return Action("keys", keys="ctrl+a")
        return Action("type", text=self.goal)

    def _beside(self, rng: np.random.Generator, box: Box) -> Action:
        """Up to 12 px above or below a box, whichever side the screen has room for."""
        x0, y0, x1, y1 = box
        off_px = _integer(rng, 1, 12)
        y = y1 - 1 + off_px if y1 + 12 < self.height_px else y0 - off_px
        return Action("click", x=_integer(rng, x0, x1 - 1), y=y)


class DataEntry:
    """Every row of a sheet is to be copied into a form and submitted once."""

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self.width_px, self.height_px = SHEET_SCREEN_PX
        self._columns = list(COLUMNS)[: options.columns]
        picks = [rng.permutation(len(COLUMNS[c]))[: options.rows] for c in self._columns]
        self.rows = [
            tuple(COLUMNS[c][pick[r]] for c, pick in zip(self._columns, picks, strict=True))
            for r in range(options.rows)
        ]
        self.goal = "submit"
        self.instruction = (
            "Copy every row of the sheet into the form and press Submit after each row."
        )
        self._submitted: list[int] = []
        self._num_incorrect = 0

    def layout(self, rng: np.random.Generator) -> list[Widget]:
        cell_w, cell_h, field_w, field_h, step_y = 62, 22, 130, 26, 54
        sheet_w, sheet_h = cell_w * len(self._columns), cell_h * (len(self.rows) + 1)
        left = _integer(rng, 8, 8 + 3 * cell_w - sheet_w)
        top = _integer(rng, 8, self.height_px - sheet_h - 8)
        widgets = []
        for c, column in enumerate(self._columns):
            x0 = left + c * cell_w
            box = (x0, top, x0 + cell_w, top + cell_h)
            widgets.append(Widget(f"head_{c}", "header", box, column, drawing.HEADER_COLOR))
            for r, row in enumerate(self.rows):
                y0 = top + (r + 1) * cell_h
                cell_box = (x0, y0, x0 + cell_w, y0 + cell_h)
                widgets.append(Widget(f"cell_{r}_{c}", "cell", cell_box, row[c]))
        form_h = step_y * len(self._columns) + 32
        x0 = _integer(rng, 226, self.width_px - field_w - 8)
        y0 = _integer(rng, 8, self.height_px - form_h - 8)
        for c, column in enumerate(self._columns):
            field = (x0, y0 + c * step_y, x0 + field_w, y0 + c * step_y + field_h)
            widgets.append(Widget(f"field_{c}", "field", field))
            widgets.append(_plate_below(field, f"field_{c}", column))
        y0 += step_y * len(self._columns)
        submit = (x0, y0, x0 + 70, y0 + 30)
        color = drawing.BUTTON_COLORS["blue"]
        widgets.append(Widget("submit", "button", submit, "Submit", color))
        return widgets

    @property
    def done(self) -> bool:
        """Every row has been submitted, or mistakes have made any reward impossible."""
        return len(set(self._submitted)) == len(self.rows) or self._num_bad >= len(self.rows)

    @property
    def reward(self) -> float:
        """Partial credit: wrong and duplicate submissions each cost what a right row earns.

        Three wrong ones and a right one pay nothing; a right one alone pays 1 / rows.
        """
        right = len(set(self._submitted))
        return max(0, right - self._num_bad) / len(self.rows)

    @property
    def _num_bad(self) -> int:
        return self._num_incorrect + len(self._submitted) - len(set(self._submitted))

    def handle(self, event: Event, window: Window) -> None:
        if event.kind != "enter" and event.name != "submit":
            return
        entered = tuple(window.texts[f"field_{c}"] for c in range(len(self._columns)))
        if entered in self.rows:
            self._submitted.append(self.rows.index(entered))
        else:
            self._num_incorrect += 1
        window.clear_fields()

    def counts(self) -> dict[str, Any]:
        return {
            "submitted_row_indices": list(self._submitted),
            "num_incorrect_submissions": self._num_incorrect,
        }

    def script(self, window: Window, rng: np.random.Generator, wrong: bool) -> Action:
        """Copies cell by cell; the mistake is to press Submit before the row is complete."""
        boxes = window.boxes()
        r = next(i for i in range(len(self.rows)) if i not in self._submitted)
        for c, value in enumerate(self.rows[r]):
            field, cell = f"field_{c}", f"cell_{r}_{c}"
            if window.texts[field] == value:
                continue
            if wrong:
                break
            if window.clipboard != value:
                if window.focus == cell:
                    return Action("keys", keys="ctrl+c")
                return click_middle(boxes[cell])
            if window.focus != field:
                return click_middle(boxes[field])
            if window.texts[field] and not window.selected:
                return Action("keys", keys="ctrl+a")
            return Action("keys", keys="ctrl+v")
        return click_middle(boxes["submit"])
