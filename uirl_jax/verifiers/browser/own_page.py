"""`own/<name>` with a page: a user's own_tasks.PageTask, played in a real browser."""

import urllib.parse
from typing import Any

import numpy as np

from uirl_jax import user_code
from uirl_jax.types import Action
from uirl_jax.verifiers.browser.pool import BrowserPool
from uirl_jax.verifiers.browser.tab import Tab
from uirl_jax.verifiers.own_tasks import OwnTask, PageTask, check_progress

_URL = "https://own.invalid/"


class OwnPage:
    """A running session (server.session_types.RunningTask).

    Calls raise UserCodeError where the task's own code raises.
    """

    renderer = ""  # the server sets it
    judges_every_action = False
    is_still = False

    def __init__(self, pool: BrowserPool, tab: Tab, own: OwnTask, instance: PageTask) -> None:
        self._pool = pool
        self._tab = tab
        self._own = own
        self._task = instance
        self._done = False
        self.instruction = instance.instruction
        self.width_px, self.height_px = instance.width_px, instance.height_px
        self.delay_s = 0.0  # `act` returns when the page has settled

    @classmethod
    async def open(cls, pool: BrowserPool, own: OwnTask, instance: PageTask) -> "OwnPage":
        """Raises VerifierError: its page does not say its state."""
        tab = await pool.acquire()
        try:
            session = cls(pool, tab, own, instance)
            await tab.load(_URL, session._files, screen_px=(instance.width_px, instance.height_px))
            await tab.settle()
            await session.progress()
        except BaseException:
            await pool.release(tab)
            raise
        return session

    async def act(self, action: Action) -> None:
        """Applies an action, unless the episode has ended."""
        if not self._done:
            # Not after the action: where the judge fails, an action that failed was not applied.
            await self.progress()
        if not self._done:
            await self._tab.act(action)

    async def screenshot(self, image_format: str) -> bytes:
        return await self._tab.screenshot(image_format)

    async def progress(self) -> dict[str, Any]:
        state = await self._tab.evaluate("state()")
        with user_code.blamed(self._own.name):
            counts = self._task.progress(state)
        progress = check_progress(self._own.name, counts)
        self._done = self._done or bool(progress["done"])
        return progress

    async def close(self) -> None:
        await self._pool.release(self._tab)

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        """The task's own demonstrator; None where it has none."""
        wrong = bool(rng.random() >= quality)
        state = await self._tab.evaluate("state()")
        with user_code.blamed(self._own.name):
            return self._task.script(state, rng, wrong)

    def _files(self, url: str) -> tuple[bytes, str] | None:
        if not url.startswith(_URL):
            return None
        path = urllib.parse.unquote(url.removeprefix(_URL).partition("?")[0].partition("#")[0])
        return self._own.page_file(path, self._task)
