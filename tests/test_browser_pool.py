"""The pool of browsers: how many it starts, and that none is left behind."""

import asyncio
from pathlib import Path

import pytest

from tests.chromium import needs_chromium, pool_and_runner, waits_again
from uirl_jax.verifiers.browser import BrowserError, PoolFullError

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def world():
    with pool_and_runner(warm=1, max_browsers=8) as (pool, runner):
        yield pool, runner


def test_two_calls_at_once_start_no_tab_twice():
    from uirl_jax.verifiers.browser.pool import BrowserPool

    async def run():
        async with BrowserPool(warm=1, max_browsers=4) as pool:
            await pool.acquire()
            pool._refill()  # as another acquire does that goes on in the same round of the loop
            async with asyncio.timeout(60):
                while pool._num_preparing:
                    await asyncio.sleep(0.02)
            return pool.num_waiting

    assert asyncio.run(run()) == 1


def test_pool_that_cannot_start_leaves_no_process(monkeypatch):
    from uirl_jax.verifiers.browser.cdp import Chromium
    from uirl_jax.verifiers.browser.pool import BrowserPool

    launch, launched = Chromium.launch, []

    async def launch_all_but_the_first(*args):
        if not launched:
            launched.append(None)
            raise OSError("no memory")
        launched.append(await launch(*args))
        return launched[-1]

    monkeypatch.setattr(Chromium, "launch", launch_all_but_the_first)

    async def run():
        with pytest.raises(BrowserError, match="does not start: no memory"):
            await BrowserPool(warm=2).__aenter__()
        await asyncio.sleep(1.0)  # for what would start after the error

    asyncio.run(run())
    pids = [browser._pid for browser in launched if browser]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_pool_that_ends_while_it_ends_a_browser_leaves_no_folder():
    from uirl_jax.verifiers.browser.pool import BrowserPool

    async def run():
        pool = await BrowserPool(warm=0).__aenter__()
        tab = await pool.acquire()
        folder = tab.browser._profile.path
        assert folder.is_dir()
        tab.broken = "for a test"
        await pool.release(tab)
        while not tab.browser._ended:
            await asyncio.sleep(0)
        await pool.__aexit__()
        return folder

    assert not asyncio.run(run()).exists()


def test_tab_whose_caller_is_cancelled_is_not_lost(world, monkeypatch):
    pool, runner = world

    async def run():
        tab = await pool.acquire()
        await pool.release(tab)
        await waits_again(pool, tab)
        asked, never = asyncio.Event(), asyncio.Event()

        async def check(self):
            asked.set()
            await never.wait()

        monkeypatch.setattr(type(tab), "check", check)
        acquiring = asyncio.create_task(pool.acquire())
        await asked.wait()
        acquiring.cancel()
        await asyncio.gather(acquiring, return_exceptions=True)
        monkeypatch.undo()
        async with asyncio.timeout(20):
            while tab in pool._tabs:  # its process is ended
                await asyncio.sleep(0.01)

    runner.run(run())


def test_sessions_beyond_the_limit_are_refused(world):
    pool, runner = world

    async def run():
        tabs = await asyncio.gather(*(pool.acquire() for _ in range(8)))
        with pytest.raises(PoolFullError, match="8 browser sessions"):
            await pool.acquire()
        for tab in tabs:
            await pool.release(tab)

    runner.run(run())
