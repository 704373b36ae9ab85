"""The types of session that the server offers, behind one interface.

`sessions`, which knows HTTP, opens a task here: a drawn desktop, which is computed in this process,
or a page in a browser, whose processes are started when they are needed. The tasks are elsewhere.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from uirl_jax import user_code
from uirl_jax.errors import VerifierError
from uirl_jax.log_lines import key_values
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import own_tasks, wire
from uirl_jax.verifiers.browser import MINIWOB_PREFIX
from uirl_jax.verifiers.dialects import DATA_ENTRY
from uirl_jax.verifiers.recorded import rewards
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.screenshots import encode_image
from uirl_jax.verifiers.tasks import desktop, variants


class RunningTask(Protocol):
    """What a session type implements. One call at a time."""

    instruction: str
    width_px: int
    height_px: int
    delay_s: float  # between an action and its screenshot, where the caller names none
    renderer: str  # fingerprint of how its pages are drawn; empty: nothing depends on the machine
    judges_every_action: bool  # `terminate` and `answer` too, which else the actor alone is told
    is_still: bool  # its screen changes by actions alone: no wait, nor a delay, shows anything new

    async def act(self, action: Action) -> None:
        """Applies an action. It need not be done when this returns: that is what delays are for."""
        ...

    async def screenshot(self, image_format: str) -> bytes:
        """The screen, encoded as one of wire.IMAGE_FORMATS."""
        ...

    async def progress(self) -> dict[str, Any]:
        """What the task counts, done: bool, reward: float or None while nothing is decided."""
        ...

    async def close(self) -> None:
        """Gives back what the session holds."""
        ...

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        """A demonstrator's next action, wrong with probability 1 - quality; None: it has none."""
        ...


class DesktopTask:
    """The hermetic desktop: everything is there at once."""

    renderer = ""
    judges_every_action = False
    is_still = False

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

    async def progress(self) -> dict[str, Any]:
        return self._session.progress()

    async def close(self) -> None:
        pass

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        return desktop.scripted_action(self._session, rng, quality)


class OwnDrawing:
    """`own/<name>` without a page: what somebody wrote (own_tasks.DrawnTask).

    Every call raises UserCodeError where the task's own code raises.
    """

    renderer = ""
    judges_every_action = False
    is_still = False

    def __init__(self, own: own_tasks.OwnTask, instance: own_tasks.DrawnTask) -> None:
        self._name = own.name
        self._task = instance
        self.instruction = self._task.instruction
        self.width_px, self.height_px = self._task.width_px, self._task.height_px
        self.delay_s = 0.0  # everything is there at once

    async def act(self, action: Action) -> None:
        if not self._progress()["done"]:
            with user_code.blamed(self._name):
                self._task.act(action)

    async def screenshot(self, image_format: str) -> bytes:
        return encode_image(own_tasks.check_screen(self._name, self._task), image_format)

    async def progress(self) -> dict[str, Any]:
        return self._progress()

    async def close(self) -> None:
        pass

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        """The task's own demonstrator; None where it has none."""
        wrong = bool(rng.random() >= quality)
        with user_code.blamed(self._name):
            return self._task.script(rng, wrong)

    def _progress(self) -> dict[str, Any]:
        with user_code.blamed(self._name):
            progress = self._task.progress()
        return own_tasks.check_progress(self._name, progress)


class SessionTypes:
    """Opens tasks by name. Owns the browsers, which start with the first task that needs one.

    Args:
      own: tasks that people wrote themselves, by name (own_tasks.load).
      recorded: recorded sets (recorded.sets.load).
    """

    example = "desktop/click_button"  # a task for who only wants to see whether the server works

    def __init__(
        self,
        *,
        warm_browsers: int,
        max_browsers: int,
        own: Mapping[str, own_tasks.OwnTask] | None = None,
        recorded: RecordedSets | None = None,
    ) -> None:
        self._own = own or {}
        self._recorded = recorded or RecordedSets({})
        self._warm_browsers = warm_browsers
        self._max_browsers = max_browsers
        self._exit_stack = contextlib.AsyncExitStack()
        self._pool: Any = None
        self.renderer = ""  # fingerprint of how pages are drawn, once a browser runs
        self._pool_lock = asyncio.Lock()

    def names(self) -> tuple[str, ...]:
        """Tasks that can be opened here, the hermetic desktop's first."""
        from uirl_jax.verifiers.browser import BrowserError, miniwob, pool

        names = [*desktop.TASKS, *self._own, *self._recorded.names]
        with contextlib.suppress(BrowserError):
            pool.find_chromium()
            names.append(DATA_ENTRY)
            names += miniwob.task_names()
        return tuple(names)

    async def open(self, task: TaskSpec) -> RunningTask:
        """Starts a task.

        Raises:
          VerifierError: no such task or variant.
          UserCodeError: a task of the user's own raised.
          browser.PoolFullError: no more browser sessions are allowed.
          browser.BrowserError: a browser is needed, and cannot be had.
        """
        if task.name in desktop.TASKS:
            return DesktopTask(task)
        if task.name.startswith(rewards.PREFIX):
            return await self._recorded.open(task)
        own = self._own.get(task.name)
        instance = own.make(task) if own is not None else None
        if own is not None and isinstance(instance, own_tasks.DrawnTask):
            return OwnDrawing(own, instance)
        in_browser = task.name == DATA_ENTRY or task.name.startswith(MINIWOB_PREFIX)
        if own is None and not in_browser:
            known = (*desktop.TASKS, DATA_ENTRY, f"{MINIWOB_PREFIX}<task>", *self._own)
            known += self._recorded.names
            hint = ""
            if task.name.startswith(own_tasks.PREFIX):
                hint = "; a server has the tasks of your own that its --task-dir names"
            near = variants.nearest(task.name, known)
            raise VerifierError(f"unknown task {task.name!r}{near}{hint}")
        from uirl_jax.verifiers.browser import data_entry, miniwob, own_page, pool, rendering

        # Checked before a browser is started for nothing.
        if task.name == DATA_ENTRY:
            data_entry.parse_variant(task.variant)
        elif own is None:
            miniwob.parse_variant(task.name, task.variant)
        async with self._pool_lock:
            if self._pool is None:
                self._pool = await self._exit_stack.enter_async_context(
                    pool.BrowserPool(warm=self._warm_browsers, max_browsers=self._max_browsers)
                )
            if not self.renderer:
                tab = await self._pool.acquire()
                try:
                    self.renderer = await rendering.fingerprint(tab)
                finally:
                    await self._pool.release(tab)
                line = key_values(
                    "renderer", fingerprint=self.renderer, chromium=tab.browser.version
                )
                print(line, flush=True)
        opened: RunningTask
        if own is not None and isinstance(instance, own_tasks.PageTask):
            opened = await own_page.OwnPage.open(self._pool, own, instance)
        elif task.name == DATA_ENTRY:
            opened = await data_entry.DataEntry.open(self._pool, task)
        else:
            opened = await miniwob.MiniWob.open(self._pool, task)
        opened.renderer = self.renderer
        return opened

    async def close(self) -> None:
        """Ends every browser."""
        await self._exit_stack.aclose()
