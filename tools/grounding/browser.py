"""Draws the screens of plans in Chromium and reads what they show.

Composed pages are put into an empty document that stays loaded, its style sheets parsed once: a
tenth of the time of another page. MiniWoB++ pages are sessions of the bundled server's.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.grounding.pages import Page, compose
from tools.grounding.screens import Box, Element, Screen, Word
from tools.grounding.sources import Plan, miniwob_scale
from tools.grounding.themes import THEMES
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.browser import (
    MINIWOB_PREFIX,
    BrowserError,
    data_entry,
    miniwob,
    rendering,
)
from uirl_jax.verifiers.browser.pool import BrowserPool
from uirl_jax.verifiers.browser.tab import Tab
from uirl_jax.verifiers.dialects import DATA_ENTRY

_URL = "https://grounding.invalid/"
_SCREENS_PER_TAB = 1000  # then another process: a leak cannot grow without end
_TRIES = 3  # of a screen whose browser is lost
_MIN_SIDE_PX = 6  # of what is asked about
_HTML = "text/html; charset=utf-8"
_SHELL = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>page</title></head>
<body></body><script>"use strict";
const parsed = Object.fromEntries(Object.entries(LIBRARIES).map(([name, css]) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(css);
  return [name, sheet];
}));
document.currentScript.remove();
const show = page => {
  const own = new CSSStyleSheet(), root = document.documentElement;
  own.replaceSync(page.style);
  document.adoptedStyleSheets = [...(parsed[page.theme] ? [parsed[page.theme]] : []), own];
  for (const name of root.getAttributeNames()) if (name !== "lang") root.removeAttribute(name);
  root.setAttribute(...page.attribute);
  document.body.innerHTML = page.body;
  scrollTo(0, 0);
};
</script></html>"""


@functools.cache
def _reader() -> str:
    return Path(__file__).with_name("read_page.js").read_text(encoding="utf-8")


def reading(size_px: tuple[int, int]) -> str:
    """The expression that reads so many of a page's CSS pixels: see `read_page.js`."""
    return f"(\n{_reader()}\n)({size_px[0]}, {size_px[1]})"


class Browsers:
    """Chromium processes for screens of one size. An async context manager.

    Args:
      size_px: of a page.
      css: style sheets of the libraries by the names of their themes.
      density: pixels of the screen along each side of one of the page.
      browsers: how many screens are drawn at once.
    """

    def __init__(
        self,
        size_px: tuple[int, int],
        css: Mapping[str, str],
        *,
        density: int = 1,
        browsers: int = 2,
    ) -> None:
        self._size_px, self._density = size_px, density
        # Apart: a tab that MiniWoB++ used has its mouse where another page might show a hover.
        self._composed = BrowserPool(warm=1, max_browsers=browsers)
        self._miniwob = BrowserPool(warm=1, max_browsers=browsers)
        self._idle: asyncio.Queue[_Shell] = asyncio.Queue()
        for _ in range(browsers):
            self._idle.put_nowait(_Shell(self._composed, size_px, css, density))
        self._stack = contextlib.AsyncExitStack()
        self.renderer = ""  # fingerprint of how pages are drawn (browser.rendering)

    async def __aenter__(self) -> "Browsers":
        await self._stack.enter_async_context(self._composed)
        await self._stack.enter_async_context(self._miniwob)
        tab = await self._miniwob.acquire()
        self.renderer = await rendering.fingerprint(tab)
        await self._miniwob.release(tab)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def draw(self, plan: Plan) -> Screen:
        """One screen; several at once where there are browsers.

        Raises: BrowserError: no browser, or three that were lost over this page.
        """
        shell = await self._idle.get()
        try:
            for tried in range(1, _TRIES + 1):
                try:
                    return await self._draw(plan, shell)
                except BrowserError:
                    await shell.leave()
                    if tried == _TRIES:
                        raise
            raise AssertionError("the loop returns or raises")
        finally:
            self._idle.put_nowait(shell)

    async def _draw(self, plan: Plan, shell: "_Shell") -> Screen:
        if plan.component.startswith(MINIWOB_PREFIX):
            return await self._draw_miniwob(plan)
        if plan.component == DATA_ENTRY:
            tab = await shell.other_page(_data_entry_page(plan, self._size_px))
        else:
            theme = THEMES[plan.component]
            tab = await shell.show(compose(plan.rng("page"), theme, self._size_px))
        await tab.settle()
        seen = await tab.evaluate(reading(self._size_px))
        return _screen(plan, await tab.screenshot("png"), seen, self._density)

    async def _draw_miniwob(self, plan: Plan) -> Screen:
        scale = miniwob_scale(self._size_px, self._density)
        assert scale is not None, self._size_px
        task = TaskSpec(plan.component, plan.seed, f"scale={scale}")
        session = await miniwob.MiniWob.open(self._miniwob, task)
        try:
            seen = await session.evaluate(reading(miniwob.AREA_PX))
            return _screen(plan, await session.screenshot("png"), seen, scale)
        finally:
            await session.close()


class _Shell:
    """A tab with the empty document that composed pages are put into."""

    def __init__(
        self, pool: BrowserPool, size_px: tuple[int, int], css: Mapping[str, str], density: int
    ) -> None:
        self._pool, self._density = pool, density
        self._screen_px = size_px[0] * density, size_px[1] * density
        libraries = json.dumps(dict(css)).replace("</", "<\\/")
        self._html = _SHELL.replace("LIBRARIES", libraries).encode()
        self._tab: Tab | None = None
        self._ready = False  # the document is the empty one
        self._shown = 0

    async def show(self, page: Page) -> Tab:
        if self._shown >= _SCREENS_PER_TAB:
            await self.leave()
        if not self._ready:
            await self.other_page(self._html)
            self._ready = True
        assert self._tab is not None
        self._shown += 1
        await self._tab.evaluate(f"show({json.dumps(dataclasses.asdict(page))})")
        return self._tab

    async def other_page(self, html: bytes) -> Tab:
        """The tab with another document."""
        self._ready = False
        if self._tab is None:
            self._tab = await self._pool.acquire()
            self._shown = 0
        files = {_URL: (html, _HTML)}
        await self._tab.load(
            _URL, files.get, screen_px=self._screen_px, scale=self._density, trusted=True
        )
        return self._tab

    async def leave(self) -> None:
        tab, self._tab, self._ready = self._tab, None, False
        if tab is not None:
            tab.broken = tab.broken or "served long enough"  # the pool ends it
            await self._pool.release(tab)


def _data_entry_page(plan: Plan, size_px: tuple[int, int]) -> bytes:
    size = "small" if size_px[0] < 640 else "full"
    sheet = data_entry.make_sheet(TaskSpec(DATA_ENTRY, plan.seed, f"size={size}"))
    return data_entry.page_html(sheet, size)


def _screen(plan: Plan, png: bytes, seen: dict[str, Any], scale: int) -> Screen:
    return Screen(
        plan,
        png,
        elements_of(seen, scale),
        tuple(map(str, seen["texts"])),
        words_of(seen, scale),
        tuple(_pixels(box, scale) for box in seen["unread"]),
    )


def words_of(seen: dict[str, Any], scale: int = 1) -> tuple[Word, ...]:
    """As `elements_of`."""
    return tuple(
        Word(text, tuple((int(x * scale), int(y * scale)) for x, y in letters))
        for text, letters in seen["words"]
    )


def elements_of(seen: dict[str, Any], scale: int = 1) -> tuple[Element, ...]:
    """What `reading` gave, in pixels of a screen with so many for one of the page."""
    return tuple(_element(fields, scale) for fields in seen["elements"])


def _pixels(box: Sequence[float], scale: int) -> Box:
    left, top, right, bottom = (round(side * scale) for side in box)
    return left, top, right, bottom


def _element(fields: dict[str, Any], scale: int) -> Element:
    left, top, right, bottom = box = _pixels(fields["box"], scale)
    large = min(right - left, bottom - top) >= _MIN_SIDE_PX
    return Element(
        kind=fields["kind"],
        box=box,
        text=fields["text"],
        label=fields["label"],
        shape=fields["shape"],
        askable=bool(fields["whole"] and fields["top"] and not fields["disabled"] and large),
        cut=bool(fields["cut"]),
    )
