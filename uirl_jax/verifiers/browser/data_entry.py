"""`simple_data_entry`: copy rows of a sheet into a form, in a real browser.

The page is assets/pages/simple_data_entry.html. This module has its data, its judge and a scripted
demonstrator. As in ui-verifiers' servers, a submission that equals a row of the sheet counts as
that row (index from 0, each time), any other as incorrect.

Reward: max(0, right - bad) / rows, over the rows that the instruction names; a running value.
`right` is how many of them were submitted, `bad` the submissions beyond one right submission of
each: incorrect ones, repeated ones, and rows that were not asked for. Three wrong submissions and a
right one therefore pay nothing. The episode is done when all rows are submitted, or when `bad`
reaches the number of rows.
"""

import dataclasses
import hashlib
import importlib.resources
import json
from typing import Any

import numpy as np

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.browser.pool import BrowserPool
from uirl_jax.verifiers.browser.tab import Tab
from uirl_jax.verifiers.dialects import DATA_ENTRY
from uirl_jax.verifiers.tasks import variants
from uirl_jax.verifiers.tasks.desktop_tasks import click_middle

NUM_ROWS = 100
_FIRST_ROW = 2  # as the sheet counts: its row 1 holds the names of the columns
SCREENS_PX = {"full": (1280, 800), "small": (224, 168)}
VARIANTS = {
    "rows": tuple("12345678"),  # how many the instruction names
    "within": ("8", "25", "50", "100"),  # they are among the first so many rows of the sheet
    "row": tuple(str(n) for n in range(_FIRST_ROW, _FIRST_ROW + NUM_ROWS)),  # the first of them
    "size": tuple(SCREENS_PX),  # small: a smaller screen with two columns and larger type on it
}
_URL = "https://verifier.invalid/"

_FIRST = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jon", "Kaya", "Leo"),
    *("Mona", "Nils", "Olga", "Paul", "Quinn", "Rosa", "Sven", "Tara", "Uma", "Vera", "Wim", "Zoe"),
)
_LAST = (
    *("Abel", "Berg", "Costa", "Dahl", "Evans", "Falk", "Gupta", "Hall", "Ito", "Jansen", "Kim"),
    *("Lopez", "Meyer", "Novak", "Okoye", "Patel", "Rossi", "Silva", "Tanaka", "Weber"),
)
_CITIES = (
    *("Oslo", "Rome", "Lima", "Bern", "Kyiv", "Riga", "Nice", "Cork", "Baku", "Doha", "Graz"),
    *("Turin", "Porto", "Ghent", "Delhi", "Osaka", "Quito", "Accra"),
)
_ITEMS = ("Chair", "Desk", "Lamp", "Shelf", "Monitor", "Keyboard", "Printer", "Cable", "Scanner")


@dataclasses.dataclass(frozen=True)
class Options:
    """A parsed variant."""

    rows: int = 1
    within: int = NUM_ROWS
    size: str = "full"
    row: int | None = None  # None: the seed says which comes first


def parse_variant(variant: str) -> Options:
    """Reads "rows=3,within=25,size=small".

    Raises: VerifierError as `variants.read` does, and for a row that is not among those `within`.
    """
    options = Options(**variants.read(DATA_ENTRY, variant, VARIANTS))
    last = options.within + _FIRST_ROW - 1
    if options.row is not None and options.row > last:
        raise VerifierError(
            f"variant {variant!r} of {DATA_ENTRY}: row={options.row}, expected at most {last}, the "
            f"last of within={options.within}"
        )
    return options


@dataclasses.dataclass(frozen=True)
class Sheet:
    """The data of an instance; everything follows from the seed and the variant."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wanted: tuple[int, ...]  # indices of the rows to submit, ascending

    @property
    def instruction(self) -> str:
        numbers = [str(index + _FIRST_ROW) for index in self.wanted]
        if len(numbers) == 1:
            return f"Copy row {numbers[0]} of the sheet into the form and submit it."
        listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        return f"Copy rows {listed} of the sheet into the form and submit each of them once."


def make_sheet(task: TaskSpec) -> Sheet:
    """Raises VerifierError for an unknown variant."""
    options = parse_variant(task.variant)
    text = f"{DATA_ENTRY}|{(options.rows, options.within, options.size)}|{task.seed}"
    rng = np.random.default_rng(
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    )
    names = rng.permutation(len(_FIRST) * len(_LAST))[:NUM_ROWS]  # all different, so rows are too
    rows = []
    for name in names:
        cents = int(rng.integers(100, 500_000))
        rows.append(
            (
                f"{_FIRST[name % len(_FIRST)]} {_LAST[name // len(_FIRST)]}",
                _CITIES[int(rng.integers(len(_CITIES)))],
                _ITEMS[int(rng.integers(len(_ITEMS)))],
                f"{cents // 100:,}.{cents % 100:02}",
            )
        )
    num_columns = 2 if options.size == "small" else 4
    # The first one by the seed itself: consecutive seeds ask for every row equally often.
    first = task.seed % options.within if options.row is None else options.row - _FIRST_ROW
    others = [int(index) for index in rng.permutation(options.within) if index != first]
    wanted = sorted([first, *others[: options.rows - 1]])
    return Sheet(
        ("Name", "City", "Item", "Amount")[:num_columns],
        tuple(row[:num_columns] for row in rows),
        tuple(wanted),
    )


class DataEntry:
    """A running session (server.session_types.RunningTask)."""

    renderer = ""  # the server sets it
    judges_every_action = False
    is_still = False

    def __init__(self, pool: BrowserPool, tab: Tab, task: TaskSpec) -> None:
        self._pool = pool
        self._tab = tab
        self._size = parse_variant(task.variant).size
        self.sheet = make_sheet(task)
        self.instruction = self.sheet.instruction
        self.width_px, self.height_px = SCREENS_PX[self._size]
        self.delay_s = 0.0  # `act` returns when the page has settled
        self._copies: dict[int, int] = {}  # by form: the row that the demonstrator takes it for

    @classmethod
    async def open(cls, pool: BrowserPool, task: TaskSpec) -> "DataEntry":
        tab = await pool.acquire()
        try:
            session = cls(pool, tab, task)
            screen_px = (session.width_px, session.height_px)
            await tab.load(_URL, session._files, screen_px=screen_px, trusted=True)
            await tab.settle()
        except BaseException:
            await pool.release(tab)
            raise
        return session

    async def act(self, action: Action) -> None:
        await self._tab.act(action)

    async def screenshot(self, image_format: str) -> bytes:
        return await self._tab.screenshot(image_format)

    async def progress(self) -> dict[str, Any]:
        """As PROTOCOL's G2b, and done and reward."""
        return judge(self.sheet, await self._tab.evaluate("submissions"))

    async def close(self) -> None:
        await self._pool.release(self._tab)

    def _files(self, url: str) -> tuple[bytes, str] | None:
        if url != _URL:
            return None
        return page_html(self.sheet, self._size), "text/html; charset=utf-8"

    async def scripted_action(self, rng: np.random.Generator, quality: float = 1.0) -> Action:
        """The next action of a demonstrator, which copies cell by cell.

        Args:
          rng: decides when a mistake is made, and which.
          quality: with probability 1 - quality it is one line off: what it copies until the next
            submission is the row above, or the one below.
        """
        wrong = bool(rng.random() >= quality)
        progress = await self.progress()
        submitted = progress["submitted_row_indices"]
        row = next(index for index in self.sheet.wanted if index not in submitted)
        form = len(submitted) + progress["num_incorrect_submissions"]
        if form not in self._copies:
            self._copies[form] = int(rng.choice(_neighbours(row))) if wrong else row
        row = self._copies[form]
        view = await self._tab.evaluate(f"look({row})")
        if view["another"] is not None:
            return _click(view["another"])
        for column, (field, value) in enumerate(
            zip(view["fields"], self.sheet.rows[row], strict=True)
        ):
            if field["value"] == value:
                continue
            if view["copied"] != value:
                if view["sheetFocused"] and view["selected"] == [row + 1, column]:
                    return Action("keys", keys="ctrl+c")
                return _reach(row + 1, view["cells"][column], view)
            if not field["focused"]:
                return _click(field["box"])
            if field["value"] and not field["allSelected"]:
                return Action("keys", keys="ctrl+a")
            return Action("keys", keys="ctrl+v")
        return _click(view["submit"])


def page_html(sheet: Sheet, size: str) -> bytes:
    """The page with its data in it."""
    page = importlib.resources.files("uirl_jax") / "assets/pages/simple_data_entry.html"
    data = {"size": size, "columns": sheet.columns, "rows": sheet.rows}
    return page.read_text(encoding="utf-8").replace('"TASK"', json.dumps(data)).encode()


def judge(sheet: Sheet, submissions: list[list[str]]) -> dict[str, Any]:
    """Counts, done and reward of what was submitted so far; see the top of this file."""
    index_of = {row: index for index, row in enumerate(sheet.rows)}
    entered = [tuple(text.strip() for text in texts) for texts in submissions]
    indices = [index_of[row] for row in entered if row in index_of]
    right = len(set(indices) & set(sheet.wanted))
    num_bad = len(entered) - right
    return {
        "submitted_row_indices": indices,
        "num_incorrect_submissions": len(entered) - len(indices),
        "done": right == len(sheet.wanted) or num_bad >= len(sheet.wanted),
        "reward": max(0, right - num_bad) / len(sheet.wanted),
    }


def _neighbours(row: int) -> list[int]:
    """The rows above and below, of the sheet."""
    return [near for near in (row - 1, row + 1) if 0 <= near < NUM_ROWS]


def _click(box: list[float]) -> Action:
    """A click in the middle of a box."""
    x0, y0, x1, y1 = (round(side) for side in box)
    return click_middle((x0, y0, x1, y1))


def _reach(row: int, cell: list[float], view: dict[str, Any]) -> Action:
    """A click on a cell of the sheet's row (from 0, the columns' names); before that, scrolling.

    By pages of ten rows, or as many tens as fit. Each begins with a round number, even where the
    row is in sight elsewhere: the number alone then says which page it is on, and where.
    """
    area = view["sheet"]
    height = cell[3] - cell[1]
    page_rows = max(1, int((area[3] - area[1]) / height) // 10 * 10)
    first = max(0, (row + 1) // page_rows * page_rows - 1)  # the sheet counts from 1
    amount = round(min(first * height, view["scrollable"]) - view["scrolled"])
    if amount == 0:
        return _click(cell)
    middle_x, middle_y = round((area[0] + area[2]) / 2), round((area[1] + area[3]) / 2)
    direction = "down" if amount > 0 else "up"
    return Action("scroll", x=middle_x, y=middle_y, direction=direction, amount=abs(amount))
