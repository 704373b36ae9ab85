"""A stream of screens into a folder: shard by shard, no screen twice, from where it stopped.

Screens of a shard are drawn side by side and taken in their order. One that looks like an earlier
one of the stream, or of which nothing can be asked, is replaced by its next attempt: so a stream is
the same whatever was interrupted, and however many browsers drew it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from tools.grounding.dataset import SCREENS_PER_SHARD, Folder, screen_digest
from tools.grounding.questions import Question, ask
from tools.grounding.screens import Screen
from tools.grounding.sources import Plan, plan
from uirl_jax.errors import ConfigError


class Browsers(Protocol):
    """What draws the screens: `browser.Browsers`."""

    async def draw(self, plan: Plan) -> Screen: ...


Asked = tuple[Screen, list[Question]]

_MAX_ATTEMPTS = 30


class Stream:
    """The screens of a seed and a split."""

    def __init__(
        self,
        browsers: Browsers,
        sources: Mapping[str, tuple[str, ...]],
        *,
        seed: int,
        split: str,
        questions: int,
    ) -> None:
        self._browsers, self._sources = browsers, sources
        self._seed, self._split, self._questions = seed, split, questions
        self._digests: set[str] = set()  # of the screens so far

    async def fill(self, folder: Folder, screens: int, done: Callable[[int], None]) -> int:
        """Draws what the folder lacks of so many screens. Returns how many it drew.

        Args: done: is told the number of screens that are there.
        Raises:
          ConfigError: screens of this size show nothing to ask about.
          BrowserError: no browser. UirlError: a full disk. What is written stays.
        """
        drawn = 0
        for shard in range(-(-screens // SCREENS_PER_SHARD)):
            first = shard * SCREENS_PER_SHARD
            numbers = range(first, min(first + SCREENS_PER_SHARD, screens))
            rows = folder.rows(shard)
            if {row["screen"] for row in rows} == set(numbers):
                self._digests.update(row["digest"] for row in rows)
            else:
                asked = await self._draw(numbers, done)
                await asyncio.to_thread(folder.write, shard, asked)
                drawn += len(numbers)
            done(numbers.stop)
        return drawn

    async def _draw(self, numbers: range, done: Callable[[int], None]) -> list[Asked]:
        ready = numbers.start

        async def first_attempt(number: int) -> Asked:
            nonlocal ready
            asked = await self._ask(number, 0)
            ready += 1
            done(ready)
            return asked

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(first_attempt(number)) for number in numbers]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            await self._new(number, task.result())
            for number, task in zip(numbers, tasks, strict=True)
        ]

    async def _new(self, number: int, asked: Asked) -> Asked:
        """The first attempt that has questions and was not there before."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            digest = screen_digest(asked[0].png)
            if asked[1] and digest not in self._digests:
                self._digests.add(digest)
                return asked
            asked = await self._ask(number, attempt)
        raise ConfigError(
            f"screen {number}: {_MAX_ATTEMPTS} attempts showed nothing new to ask about; try a "
            "larger --size, or more --sources"
        )

    async def _ask(self, number: int, attempt: int) -> Asked:
        planned = plan(self._seed, self._split, number, attempt, self._sources)
        screen = await self._browsers.draw(planned)
        return screen, ask(screen, planned.rng("questions"), self._questions)
