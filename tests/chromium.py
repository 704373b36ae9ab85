"""What tests with a real browser share: the mark, and one pool and event loop for a module."""

import asyncio
import contextlib
import importlib.util
import re

import pytest

from uirl_jax.verifiers.browser import BrowserError

HTML = "text/html; charset=utf-8"


def why_there_is_none() -> str:
    """Why no browser can be had on this machine; "" where one can."""
    if importlib.util.find_spec("miniwob") is None:
        return "needs the extra `browser`: pip install 'miniwob>=1.1,<2'"
    from uirl_jax.verifiers.browser.pool import find_chromium

    try:
        find_chromium()
    except BrowserError as error:
        return str(error)
    return ""


REASON = why_there_is_none()
needs_chromium = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(REASON), reason=REASON or "there is one"),
]


@contextlib.contextmanager
def pool_and_runner(**options):
    """(pool, runner) that live as long as the block: starting them takes a second."""
    from uirl_jax.verifiers.browser.pool import BrowserPool

    with asyncio.Runner() as runner:
        pool = BrowserPool(**options)
        runner.run(pool.__aenter__())
        try:
            yield pool, runner
        finally:
            runner.run(pool.__aexit__())


async def waits_again(pool, tab):
    """Until a tab that was released is ready for the next session; fails if it was replaced."""
    async with asyncio.timeout(60):
        while tab not in pool._waiting:
            assert tab in pool._tabs, "the tab was replaced"
            await asyncio.sleep(0.01)


def scripted_tasks() -> tuple[str, ...]:
    """MiniWoB++ tasks that the demonstrator can play: the entries of `experts` in its script."""
    from uirl_jax.verifiers.browser import MINIWOB_PREFIX, miniwob

    entries = set(re.findall(r'^  "([a-z0-9-]+)": ', miniwob._read_script(), re.MULTILINE))
    return tuple(t for t in miniwob.task_names() if t.removeprefix(MINIWOB_PREFIX) in entries)


def one_page(html: str):
    """Files of a page that is alone."""
    return lambda url: (html.encode(), HTML) if url == "https://test.invalid/" else None


async def open_page(pool, html: str, screen_px=(320, 200), **options):
    """A tab that shows a page; the caller releases it."""
    tab = await pool.acquire()
    await tab.load("https://test.invalid/", one_page(html), screen_px=screen_px, **options)
    await tab.settle()
    return tab
