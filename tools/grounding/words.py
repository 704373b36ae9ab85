"""Words of composed pages. Names are drawn from them without repetition within a page."""

from collections.abc import Callable

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ACTIONS = _words(
    "Save Cancel Delete Edit Submit Apply Reset Close Open Print Share Export Import Upload "
    "Download Search Filter Refresh Next Back Continue Finish Send Reply Forward Archive "
    "Copy Paste Undo Redo Confirm Accept Decline Publish Preview Subscribe Follow Join Leave "
    "Pause Resume Start Stop Retry Update Install Remove Enable Disable Connect Sync Restore "
    "Duplicate Rename Move Merge Split Lock Unlock Approve Reject Assign Schedule Checkout "
    "Order Pay Donate Vote Rate Login Logout Register Help More OK Yes No Done Skip Add "
    "Clear Browse View Play Record Mute Zoom Scan Backup Test Deploy Build Run"
)
NOUNS = _words(
    "Account Address Album Answer Article Basket Billing Booking Branch Budget Calendar "
    "Camera Campaign Card Category Chart Client Comment Company Contact Contract Country "
    "Course Customer Dashboard Database Device Discount Document Domain Draft Email Event "
    "Expense Family Feedback File Folder Forecast Gallery Garden Group Guide History Holiday "
    "Hotel House Image Inbox Invoice Item Journal Kitchen Language Lesson Letter Library "
    "License Location Manager Market Meeting Member Memo Menu Message Mobile Model Music "
    "Network News Notes Number Office Option Order Owner Package Page Parcel Partner "
    "Password Payment People Phone Photo Plan Player Policy Portal Price Printer Product "
    "Profile Project Queue Quote Rating Receipt Recipe Region Report Request Review Room "
    "Route Sales Sample School Season Seller Server Service Session Settings Shipping Shop "
    "Station Status Store Stream Student Style Subject Summary Supplier Support Survey Table "
    "Task Team Template Theme Ticket Title Topic Tour Traffic Training Travel User Vendor "
    "Version Video Village Visit Voucher Wallet Warranty Website Window Workshop"
)
ADJECTIVES = _words(
    "Active Annual Basic Blank Brief Bright Broken Central Common Compact Current Custom "
    "Daily Default Digital Direct Early Empty Exact Express External Extra Final First "
    "Flexible Foreign Free Fresh Full General Global Hidden Hourly Internal Large Late "
    "Latest Legal Light Linked Local Long Main Major Manual Medium Minor Mixed Modern "
    "Monthly National New Next Normal Old Online Open Other Outdoor Personal Plain Premium "
    "Primary Private Public Quick Quiet Rapid Recent Regular Remote Secure Short Simple "
    "Single Small Smart Solid Special Standard Static Strong Total Urgent Used Valid Visual "
    "Weekly Whole Wide Yearly"
)
LATIN = _words(
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt "
    "ut labore et dolore magna aliqua enim minim veniam quis nostrud ullamco laboris nisi "
    "aliquip ex commodo consequat duis aute irure reprehenderit voluptate velit esse cillum "
    "fugiat nulla pariatur excepteur sint occaecat cupidatat non proident sunt culpa officia "
    "mollit"
)


class Words:
    """Draws names of a page; a name is given out once."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def action(self) -> str:
        """Of a button: "Save", or "Save draft" once in three."""

        def draw() -> str:
            word = self._pick(ACTIONS)
            return f"{word} {self._pick(NOUNS).lower()}" if self._rng.random() < 0.33 else word

        return self._new(draw)

    def name(self) -> str:
        """Of anything else: "Invoice", "Weekly report"."""

        def draw() -> str:
            noun = self._pick(NOUNS)
            return f"{self._pick(ADJECTIVES)} {noun.lower()}" if self._rng.random() < 0.4 else noun

        return self._new(draw)

    def value(self) -> str:
        """Of a cell: a word, a number, a date or an amount."""

        def draw() -> str:
            kind = int(self._rng.integers(4))
            if kind == 0:
                return str(self._rng.integers(1, 10_000))
            if kind == 1:
                month, day = self._rng.integers(1, 13), self._rng.integers(1, 29)
                return f"{self._rng.integers(2001, 2031)}-{month:02}-{day:02}"
            if kind == 2:
                return f"{self._rng.integers(1, 1000)}.{self._rng.integers(100):02}"
            return self._pick(NOUNS)

        return self._new(draw)

    def latin(self, count: int) -> list[str]:
        return [self._pick(LATIN) for _ in range(count)]

    def _pick(self, words: tuple[str, ...]) -> str:
        return words[int(self._rng.integers(len(words)))]

    def _new(self, draw: Callable[[], str]) -> str:
        word = ""
        for _ in range(100):
            word = draw()
            if word.casefold() not in self._used:
                break
        self._used.add(word.casefold())
        return word
