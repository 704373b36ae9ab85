"""Chromium processes, some of them started in advance, so that an episode need not wait for one.

A session takes a tab and gives it back. The pool then closes what the session left and prepares an
empty page in the same process. Processes that crashed, hang or served long enough are replaced.
A process ends when the socket to it closes (`cdp`): with this process, however that ends.
"""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path

from uirl_jax.log_lines import key_values
from uirl_jax.store.temporary import remove_abandoned
from uirl_jax.verifiers.browser import BrowserError, PoolFullError, rendering
from uirl_jax.verifiers.browser.cdp import PROFILES, Chromium
from uirl_jax.verifiers.browser.tab import Tab

logger = logging.getLogger(__name__)

# The programs themselves: what Debian has in /usr/bin are shell scripts that start them as a child,
# and ending the script would leave the browser behind.
EXECUTABLES = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium")
SESSIONS_PER_PROCESS = 1000  # then it is replaced: a leak of its own cannot grow without end
_START_S = 30.0
_IDLE_S = 600.0  # a tab beyond the number asked for waits so long: longer than a step is learnt

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # as root there is none; a page reaches no network and no file
    # What Chromium does beside showing a page, and what would interrupt or slow down one.
    *("--disable-background-networking", "--disable-breakpad", "--disable-component-update"),
    *("--disable-default-apps", "--disable-extensions", "--disable-sync", "--mute-audio"),
    *("--disable-field-trial-config", "--metrics-recording-only", "--no-first-run"),
    *("--no-default-browser-check", "--no-service-autorun", "--no-startup-window"),
    *("--password-store=basic", "--disable-search-engine-choice-screen", "--disable-infobars"),
    *("--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows"),
    *("--disable-renderer-backgrounding", "--disable-back-forward-cache", "--disable-hang-monitor"),
    *("--disable-ipc-flooding-protection", "--disable-popup-blocking", "--disable-dev-shm-usage"),
    *("--disable-prompt-on-repost", "--allow-pre-commit-input", "--disable-stack-profiler"),
    "--disable-features=HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,PaintHolding,MediaRouter,"
    "OptimizationHints,AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose",
    # Pixels: colours as they are, a mouse without touch, software for WebGL.
    *("--force-color-profile=srgb", "--enable-unsafe-swiftshader", "--lang=en-US"),
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,"
    "availablePointerTypes=4",
    # One renderer for the pages that rest: they are of one site.
    "--renderer-process-limit=1",
    # Fewer processes: with eight sessions 81 MiB each and not 103, and 0.33 s to start, not 0.54.
    *("--in-process-gpu", "--no-zygote", "--enable-features=NetworkServiceInProcess2"),
    "--disable-smooth-scrolling",
    "--font-render-hinting=none",
    # No way out of the machine, nor to it: every request is answered before it gets here (Tab), and
    # what has no request (WebSocket, WebRTC) finds no name, a proxy that is none, and no UDP.
    *("--proxy-server=http://127.0.0.1:0", "--proxy-bypass-list=<-loopback>"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
)


def find_chromium() -> Path:
    """The program to start: $UIRL_CHROMIUM, or where Debian and Ubuntu put it.

    Raises:
      BrowserError: there is none.
    """
    for path in (os.environ.get("UIRL_CHROMIUM"), *EXECUTABLES):
        if path and os.access(path, os.X_OK):
            return Path(path)
    raise BrowserError(
        "no Chromium to run browser sessions in: apt-get install chromium-headless-shell, or set "
        f"UIRL_CHROMIUM to the program (looked for {', '.join(EXECUTABLES)})"
    )


class BrowserPool:
    """Warm tabs. An async context manager; leaving it ends every process that it started."""

    def __init__(self, *, warm: int = 2, max_browsers: int = 16) -> None:
        """
        Args:
          warm: tabs that always wait for a session. More do for a while after more were in use.
          max_browsers: sessions at once, and tabs at once.
        """
        self._warm = min(warm, max_browsers)
        self._max_browsers = max_browsers
        self._environment = rendering.environment()
        self._tabs: set[Tab] = set()  # all of them
        self._waiting: list[Tab] = []  # the last one in goes out first, so that the rest can end
        self._in_use: set[Tab] = set()
        self._num_acquiring = 0  # of sessions
        self._num_hoping = 0  # of these: they wait for a tab that is made ready again
        self._num_preparing = 0  # in the background
        self._num_renewing = 0  # of these: used ones
        self._renewed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "BrowserPool":
        await asyncio.to_thread(remove_abandoned, PROFILES)
        self._num_preparing += self._warm
        tasks = [asyncio.create_task(self._prepare()) for _ in range(self._warm)]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await self.__aexit__()  # also of those that are still starting
            raise
        self._tasks.difference_update(tasks)
        self._in_background(self._end_idle())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(tab) for tab in list(self._tabs)))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, wanted: tuple[str, int] | None = None) -> Tab:
        """A tab with an empty page; the caller releases it.

        Args:
          wanted: (URL, scale) of a page that can begin anew. A tab where one rests (`Tab.resume`)
            comes before others.
        Raises:
          PoolFullError: max_browsers are in use.
          BrowserError: no browser can be started.
        """
        if len(self._in_use) + self._num_acquiring >= self._max_browsers:
            raise PoolFullError(
                f"{self._max_browsers} browser sessions are open, more are refused",
                self._max_browsers,
            )
        self._num_acquiring += 1
        try:
            tab = await self._take(wanted) or await self._start()
        finally:
            self._num_acquiring -= 1
        self._in_use.add(tab)
        tab.num_sessions += 1
        self._refill()
        return tab

    async def release(self, tab: Tab) -> None:
        """Takes a tab back, and readies it for another session in the background."""
        if tab in self._in_use:
            self._in_use.discard(tab)
            if tab.broken or tab.num_sessions >= SESSIONS_PER_PROCESS or self._room() <= 0:
                self._in_background(self._retire(tab))
            else:
                self._num_preparing += 1
                self._num_renewing += 1
                self._in_background(self._renew(tab))

    async def _take(self, wanted: tuple[str, int] | None) -> Tab | None:
        """One that waits, and answers; where none does, one that is nearly ready again."""
        while True:
            while self._waiting:
                fitting = (tab for tab in reversed(self._waiting) if wanted in tab.kept)
                tab = next(fitting, self._waiting[-1])
                self._waiting.remove(tab)
                try:
                    await tab.check()
                    return tab
                except BrowserError as error:
                    logger.warning(key_values("browser_replaced", reason=error))
                    self._in_background(self._end(tab))
                except BaseException:  # cancelled: nobody else has this tab
                    self._in_background(self._end(tab))
                    raise
            if self._num_hoping >= self._num_renewing:
                return None
            self._num_hoping += 1
            try:
                async with self._renewed:
                    await self._renewed.wait_for(
                        lambda: self._waiting or self._num_renewing < self._num_hoping
                    )
            finally:
                self._num_hoping -= 1

    def _refill(self) -> None:
        """Starts what is missing of the tabs that wait."""
        missing = self._warm - len(self._waiting) - self._num_preparing
        for _ in range(min(missing, self._room())):
            self._num_preparing += 1  # at once: the next call must not start the same ones
            self._in_background(self._prepare())

    def _room(self) -> int:
        """How many tabs more there may be."""
        num_tabs = len(self._waiting) + len(self._in_use) + self._num_preparing
        return self._max_browsers - num_tabs - (self._num_acquiring - self._num_hoping)

    async def _prepare(self) -> None:
        """Starts a tab that waits; the caller has counted it."""
        try:
            self._wait(await self._start())
        finally:
            self._num_preparing -= 1

    def _wait(self, tab: Tab) -> None:
        tab.waiting_since_s = time.monotonic()
        self._waiting.append(tab)

    async def _renew(self, tab: Tab) -> None:
        """Makes a used tab one that waits; ends it where that fails."""
        try:
            async with asyncio.timeout(_START_S):
                await tab.renew()
            self._wait(tab)
        except Exception as error:  # whatever it is, there are other processes
            logger.warning(key_values("browser_replaced", reason=_first_line(error)))
            self._in_background(self._retire(tab))
        finally:
            self._num_preparing -= 1
            self._num_renewing -= 1
        async with self._renewed:
            self._renewed.notify_all()

    async def _retire(self, tab: Tab) -> None:
        await self._end(tab)
        self._refill()

    async def _end_idle(self) -> None:
        """Ends tabs that nobody has come for. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_IDLE_S / 4)
            oldest_s = time.monotonic() - _IDLE_S
            while len(self._waiting) > self._warm and self._waiting[0].waiting_since_s < oldest_s:
                await self._end(self._waiting.pop(0))

    async def _start(self) -> Tab:
        """A new process, with its empty page."""
        executable = find_chromium()
        browser = None
        try:
            async with asyncio.timeout(_START_S):
                browser = await Chromium.launch(executable, _ARGUMENTS, self._environment)
                tab = Tab(browser)
                await tab.renew()
        except BaseException as error:
            if browser is not None:
                await browser.close()
            if not isinstance(error, Exception):
                raise
            raise BrowserError(f"{executable} does not start: {_first_line(error)}") from error
        self._tabs.add(tab)
        return tab

    async def _end(self, tab: Tab) -> None:
        await tab.browser.close()  # cancelled in it, `__aexit__` ends the tab again
        self._tabs.discard(tab)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # nobody waits for it; the next acquire tells its caller
            logger.warning(key_values("browser_pool_error", reason=_first_line(error)))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
