"""Screenshots on their way into an engine: decoded and cut in threads, each once while needed.

Between an engine's `sample`, on the event loop, and what it does with the pixels: 22 ms of CPU for
a 1280x800 screen, which neither the loop nor the device should wait for. Pillow and numpy release
the interpreter's lock for nearly all of it. Which screenshots have to be read is the engine's to
know.
"""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.screens import decode_planned, read_planned

MAX_THREADS = 16


class PixelReader:
    """Threads, and the screens that some request still holds.

    cpu_s and screens count what was read since the start.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.cpu_s = 0.0
        self.screens = 0
        self._counting = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._reading: dict[str, asyncio.Future[Any]] = {}
        # Members of a group begin with one screenshot: a request that asks while another holds it
        # gets the same arrays.
        self._held: weakref.WeakValueDictionary[str, Screen] = weakref.WeakValueDictionary()

    def open(self) -> None:
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pixels")
        self._reading = {}  # what an ended event loop left

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    async def read(self, screen: Screen) -> Screen:
        """The screen with its arrays.

        Raises:
          ImageError: the screenshot cannot be decoded.
          RuntimeError: the reader was closed before its turn came.
        """
        found = self._held.get(screen.key)
        if found is None:
            found = await self._once(screen.key, lambda: read_planned(self._inputs, screen))
            self._held[screen.key] = found
        return found

    async def check(self, screen: Screen) -> None:
        """For an engine whose server cuts images itself. Raises: as read."""
        await self._once(screen.key, lambda: decode_planned(screen))

    def read_all(self, screens: Iterable[Screen]) -> list[Screen]:
        """Planned screens are read side by side; not for the event loop."""

        def read(screen: Screen) -> Screen:
            if screen.arrays is not None:
                return screen
            return self._timed(lambda: read_planned(self._inputs, screen))

        assert self._threads is not None  # a round of an engine that is open
        return list(self._threads.map(read, screens))

    async def _once(self, key: str, work: Callable[[], Any]) -> Any:
        if key not in self._reading:
            loop = asyncio.get_running_loop()
            reading = self._reading[key] = loop.run_in_executor(self._threads, self._timed, work)
            reading.add_done_callback(lambda done: self._forget(key, done))
        reading = self._reading[key]
        try:
            return await asyncio.shield(reading)  # others may wait for it, too
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if reading.cancelled() and not (task is not None and task.cancelling()):
                raise RuntimeError("the engine closed as a request waited") from None
            raise

    def _forget(self, key: str, done: asyncio.Future[Any]) -> None:
        if self._reading.get(key) is done:
            del self._reading[key]
        if not done.cancelled():
            done.exception()  # or asyncio complains where everybody who waited was cancelled

    def _timed(self, work: Callable[[], Any]) -> Any:
        started_s = time.thread_time()
        try:
            return work()
        finally:
            with self._counting:
                self.cpu_s += time.thread_time() - started_s
                self.screens += 1
