"""What browser sessions cost: to start, a click, a screenshot, memory; beside Playwright by hand.

    python -m tools.bench verifiers --json=verifiers.json

Sessions of `simple_data_entry` (1280x800), all at work at once. A start is from the warm pool to
the settled page, for each session alone (`miniwob`: of miniwob/email-inbox); a turn is a click on a
cell of the sheet, which returns when the page has settled, and a screenshot as PNG. By hand: the
same page and as many of it in Chromium as Playwright starts it, one browser and a context each,
started when it is asked for; `mouse.click`, two frames (`page.evaluate`) and `page.screenshot`.
`apart` is by hand too, a browser each, so that no clipboard is shared. Times are medians over all
sessions. Memory is the proportional share (PSS) of the browsers' processes a session; Playwright's
driver is told apart.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from uirl_jax.types import Action, TaskSpec

MIB = 2**20
_TWO_FRAMES = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=40, help="of each session")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{"ours": {sessions: numbers}, "playwright": ..., "apart": ..., "ratio": ours to playwright}.

    The ratio is of turns a second.
    """
    counts, num_turns = args.sessions, args.turns
    ours = {str(count): asyncio.run(_ours(count, num_turns)) for count in counts}
    theirs = {str(count): asyncio.run(_by_hand(count, num_turns, 1)) for count in counts}
    apart = {str(count): asyncio.run(_by_hand(count, num_turns, count)) for count in counts}
    ratio = {count: ours[count]["turns_per_s"] / theirs[count]["turns_per_s"] for count in ours}
    return {"ours": ours, "playwright": theirs, "apart": apart, "ratio": ratio}


def format_table(result: dict[str, Any]) -> str:
    names = (
        "start_ms",
        "miniwob_ms",
        "click_ms",
        "screenshot_ms",
        "turns_per_s",
        "session_mib",
        "driver_mib",
    )
    lines = [f"{'':22}" + "".join(f"{name:>15}" for name in names)]
    for who in ("ours", "playwright", "apart"):
        for count, numbers in result[who].items():
            cells = (f"{numbers[name]:15.1f}" if name in numbers else f"{'':15}" for name in names)
            lines.append(f"{who + ', ' + count:22}" + "".join(cells))
    return "\n".join(lines)


def _place(turn: int) -> tuple[int, int]:
    return 140 + 180 * (turn % 4), 136 + 26 * (turn % 20)


async def _ours(count: int, num_turns: int) -> dict[str, float]:
    from uirl_jax.verifiers.browser.data_entry import DataEntry
    from uirl_jax.verifiers.browser.miniwob import MiniWob
    from uirl_jax.verifiers.browser.pool import BrowserPool

    async with BrowserPool(warm=count, max_browsers=2 * count) as pool:
        starts_ms, sessions = [], []
        for seed in range(count):
            start_s = time.perf_counter()
            sessions.append(await DataEntry.open(pool, TaskSpec("simple_data_entry", seed)))
            starts_ms.append(1e3 * (time.perf_counter() - start_s))
            while pool.num_waiting < count:  # what starts behind it would be measured too
                await asyncio.sleep(0.05)

        async def turn(session: DataEntry, number: int, times: dict[str, list[float]]) -> None:
            x, y = _place(number)
            await _timed(times["click"], session.act(Action("click", x=x, y=y)))
            await _timed(times["screenshot"], session.screenshot("png"))

        numbers = await _at_work(sessions, turn, num_turns)
        miniwob_ms = []
        for seed, session in enumerate(sessions):
            await session.close()
            while pool.num_waiting < count:
                await asyncio.sleep(0.05)
            start_s = time.perf_counter()
            other = await MiniWob.open(pool, TaskSpec("miniwob/email-inbox", seed))
            miniwob_ms.append(1e3 * (time.perf_counter() - start_s))
            await other.close()
    async with BrowserPool(warm=0, max_browsers=count) as pool:  # none that waits is counted
        for seed in range(count):
            session = await DataEntry.open(pool, TaskSpec("simple_data_entry", seed))
            for number in range(3):
                await turn(session, number, {"click": [], "screenshot": []})
        memory = _memory_mib()
    return {
        "start_ms": statistics.median(starts_ms),
        "miniwob_ms": statistics.median(miniwob_ms),
        **numbers,
        "session_mib": memory["browsers"] / count,
        "driver_mib": memory["driver"],
    }


async def _by_hand(count: int, num_turns: int, num_browsers: int) -> dict[str, float]:
    from playwright.async_api import Page, async_playwright

    from uirl_jax.verifiers.browser import data_entry
    from uirl_jax.verifiers.browser.pool import find_chromium

    html = data_entry.page_html(data_entry.make_sheet(TaskSpec("simple_data_entry", 0)), "full")
    async with async_playwright() as driver:
        browsers = [
            await driver.chromium.launch(executable_path=find_chromium())
            for _ in range(num_browsers)
        ]
        starts_ms: list[float] = []
        pages: list[Page] = []
        for number in range(count):
            start_s = time.perf_counter()
            context = await browsers[number % num_browsers].new_context(
                viewport={"width": 1280, "height": 800}
            )
            pages.append(await context.new_page())
            await pages[-1].set_content(html.decode())
            await pages[-1].evaluate(_TWO_FRAMES)
            starts_ms.append(1e3 * (time.perf_counter() - start_s))

        async def turn(page: Page, number: int, times: dict[str, list[float]]) -> None:
            await _timed(times["click"], _click_by_hand(page, *_place(number)))
            await _timed(times["screenshot"], page.screenshot())

        numbers = await _at_work(pages, turn, num_turns)
        memory = _memory_mib()
        for browser in browsers:
            await browser.close()
    return {
        "start_ms": statistics.median(starts_ms),
        **numbers,
        "session_mib": memory["browsers"] / count,
        "driver_mib": memory["driver"],
    }


async def _click_by_hand(page: Any, x: int, y: int) -> None:
    await page.mouse.click(x, y)
    await page.evaluate(_TWO_FRAMES)


async def _at_work(
    sessions: list[Any], turn: Callable[..., Awaitable[None]], num_turns: int
) -> dict[str, float]:
    """All sessions take their turns at once; the first three of each do not count."""

    async def work(session: Any, times: dict[str, list[float]], first: int, last: int) -> None:
        for number in range(first, last):
            await turn(session, number, times)

    warming: dict[str, list[float]] = {"click": [], "screenshot": []}
    await asyncio.gather(*(work(session, warming, 0, 3) for session in sessions))
    times: dict[str, list[float]] = {"click": [], "screenshot": []}
    start_s = time.perf_counter()
    await asyncio.gather(*(work(session, times, 3, 3 + num_turns) for session in sessions))
    elapsed_s = time.perf_counter() - start_s
    medians = {f"{kind}_ms": 1e3 * statistics.median(each) for kind, each in times.items()}
    return {**medians, "turns_per_s": num_turns * len(sessions) / elapsed_s}


async def _timed(into: list[float], work: Awaitable[object]) -> None:
    start_s = time.perf_counter()
    await work
    into.append(time.perf_counter() - start_s)


def _memory_mib() -> dict[str, float]:
    """PSS of all Chromium processes of this user's machine, and of Playwright's drivers."""
    totals = {"browsers": 0.0, "driver": 0.0}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            program = (path / "cmdline").read_bytes().split(b"\0")[0]
            kind = "browsers" if b"chromium" in program else "driver"
            if kind == "driver" and b"playwright" not in program:
                continue
            lines = (path / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile, or is not ours
        totals[kind] += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return {kind: kib * 1024 / MIB for kind, kib in totals.items()}
