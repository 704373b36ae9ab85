"""The types of session that the server offers, behind one interface.

Between `sessions`, which knows HTTP, and what shows a screen: the hermetic desktop, which is a
computation, and the browser, which is processes that are started when somebody asks for them.
Not here: the tasks themselves.
"""

import asyncio
import contextlib
import io
from typing import Protocol

from PIL import Image

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import browser, desktop, variants, wire

SIMPLE_DATA_ENTRY = "simple_data_entry"
MINIWOB = "miniwob/"


class RunningTask(Protocol):
    """What a session type implements. One call at a time."""

    instruction: str
    width_px: int
    height_px: int
    delay_s: float  # between an action and its screenshot, where the caller names none

    async def act(self, action: Action) -> None:
        """Applies an action. It need not be done when this returns: that is what delays are for."""

    async def screenshot(self, image_format: str) -> bytes:
        """The screen, encoded as one of wire.IMAGE_FORMATS."""

    async def progress(self) -> dict[str, object]:
        """What the task counts, done: bool, reward: float or None while nothing is decided."""

    async def close(self) -> None:
        """Gives back what the session holds."""


class DesktopTask:
    """The hermetic desktop: everything is there at once."""

    def __init__(self, task: TaskSpec) -> None:
        self._session = desktop.open_session(task)
        self.instruction = self._session.instruction
        self.width_px = self._session.width_px
        self.height_px = self._session.height_px
        self.delay_s = wire.DEFAULT_DELAY_S

    async def act(self, action: Action) -> None:
        self._session.act(action)

    async def screenshot(self, image_format: str) -> bytes:
        return encode_image(self._session.screenshot(), image_format)

    async def progress(self) -> dict[str, object]:
        return self._session.progress()

    async def close(self) -> None:
        pass


class SessionTypes:
    """Opens tasks by name. Owns the browsers, which start with the first task that needs one."""

    def __init__(self, *, warm_browsers: int, max_browsers: int) -> None:
        self._warm_browsers = warm_browsers
        self._max_browsers = max_browsers
        self._exit_stack = contextlib.AsyncExitStack()
        self._pool: object = None
        self._pool_lock = asyncio.Lock()

    async def open(self, task: TaskSpec) -> RunningTask:
        """Starts a task.

        Raises:
          VerifierError: no such task or variant.
          browser.PoolFullError: no more browser sessions are allowed.
          browser.BrowserError: a browser is needed, and cannot be had.
        """
        if task.name in desktop.TASKS:
            return DesktopTask(task)
        if task.name != SIMPLE_DATA_ENTRY and not task.name.startswith(MINIWOB):
            known = (*desktop.TASKS, SIMPLE_DATA_ENTRY, f"{MINIWOB}<task>")
            raise VerifierError(f"unknown task {task.name!r}{variants.nearest(task.name, known)}")
        try:
            from uirl_jax.verifiers.browser import data_entry, miniwob, pool
        except ModuleNotFoundError as error:
            raise browser.BrowserError(
                f"{task.name} runs in a browser, and {error.name} is not installed: "
                "pip install 'uirl_jax[browser]'"
            ) from error
        # Checked before a browser is started for nothing.
        if task.name == SIMPLE_DATA_ENTRY:
            data_entry.parse_variant(task.variant)
            kind = data_entry.DataEntry
        else:
            miniwob.parse_variant(task.name, task.variant)
            kind = miniwob.MiniWob
        async with self._pool_lock:
            if self._pool is None:
                self._pool = await self._exit_stack.enter_async_context(
                    pool.BrowserPool(warm=self._warm_browsers, max_browsers=self._max_browsers)
                )
        return await kind.open(self._pool, task)

    async def close(self) -> None:
        """Ends every browser."""
        await self._exit_stack.aclose()


def encode_image(image: Image.Image, image_format: str) -> bytes:
    """A screenshot as bytes, one of wire.IMAGE_FORMATS.

    Quick rather than small. PNG takes 1 ms for 224x168 and 3 ms for 448x336, short enough to stay
    on the event loop: a hop to a thread and back is no shorter.
    """
    buffer = io.BytesIO()
    if image_format == "png":
        image.save(buffer, "PNG", compress_level=1)
    elif image_format == "jpeg":
        image.save(buffer, "JPEG", quality=90)
    else:
        image.save(buffer, "WEBP", quality=90, method=0)
    return buffer.getvalue()
