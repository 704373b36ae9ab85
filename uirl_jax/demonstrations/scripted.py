"""Scripted episodes of the bundled tasks as trajectories: what a cold start learns from.

They are played without HTTP, because no policy is judged. The hermetic desktop is played in this
thread (`demonstrate`); other tasks need an event loop, and processes if they run in a browser
(`Demonstrator`). `recording` builds the trajectories.
"""

import asyncio
import copy
import dataclasses
import io
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.demonstrations.recording import Recording
from uirl_jax.errors import ActionError, PageError, VerifierError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.types import StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.recorded import sets as recorded_sets
from uirl_jax.verifiers.screenshots import encode_image
from uirl_jax.verifiers.server.session_types import RunningTask, SessionTypes
from uirl_jax.verifiers.tasks import desktop

_TRIES = 3  # of a demonstration whose browser is lost


def _record(
    task: TaskSpec,
    session: desktop.Session | RunningTask,
    chat: Chat,
    inputs: Inputs,
) -> Recording:
    screen_size = (session.width_px, session.height_px)
    return Recording(task, session.instruction, screen_size, chat, inputs)


def _ended(recording: Recording, progress: Mapping[str, Any]) -> Trajectory:
    success = bool(progress["done"]) and float(progress["reward"] or 0.0) >= 1.0
    ended = StopReason.COMPLETED if success else StopReason.FAILED
    return recording.trajectory(
        progress,
        success=success,
        stop_reason=ended if progress["done"] else StopReason.MAX_TURNS,
    )


def _say_ended_early(task: TaskSpec, why: str) -> None:
    print(
        f"demonstration of {task.name} with seed {task.seed} ended early, {why}",
        file=sys.stderr,
        flush=True,
    )


async def _tried(
    task: TaskSpec, play: Callable[[], Awaitable[Trajectory]]
) -> Trajectory | VerifierError:
    """What `play` returns, called again where its browser is lost; else why there is nothing.

    Among thousands of demonstrations a browser crashes, or does not answer for too long on a busy
    machine: an hour of them does not end with it. A page that throws at its start would again.
    """
    lost = BrowserError(f"{task.name} was not played")
    for _ in range(_TRIES):
        try:
            return await play()
        except PageError as error:
            _say_ended_early(task, f"its page fails: {error}")
            return error
        except BrowserError as error:
            _say_ended_early(task, f"its browser is lost: {error}")
            lost = error
    return lost


def demonstrate(
    task: TaskSpec,
    chat: Chat,
    inputs: Inputs,
    rng: np.random.Generator,
    *,
    quality: float = 1.0,
) -> Trajectory:
    """One episode of the hermetic desktop by the scripted demonstrator.

    Args:
      quality: probability that an action is the right one, not the task's characteristic mistake.
    """
    session = desktop.open_session(task)
    recording = _record(task, session, chat, inputs)
    progress = session.progress()
    while len(recording.turns) < task.max_turns and not progress["done"]:
        image = session.screenshot()
        recording.see(image, encode_image(image, "png"))
        action = desktop.scripted_action(session, rng, quality)
        session.act(action)
        progress = session.progress()
        recording.act(action, progress)
    return _ended(recording, progress)


class Demonstrator:
    """Demonstrations of every bundled task. A context manager; leaving it ends its browsers.

    Blocks its thread, which must not run an event loop.

    Args:
      task_dirs: folders of tasks of one's own; ConfigError where one is none (own_tasks.load).
      recorded: files of recorded sets by name; their recordings are what is demonstrated.
      browsers: how many of them play at once.
    """

    def __init__(
        self,
        task_dirs: Sequence[str] = (),
        *,
        recorded: Mapping[str, str] | None = None,
        browsers: int = 1,
    ) -> None:
        own = own_tasks.load(task_dirs)
        self._recorded = recorded_sets.load(recorded or {})
        self._runner = asyncio.Runner()
        self._types = SessionTypes(
            warm_browsers=browsers,
            max_browsers=browsers,
            own=own,
            recorded=self._recorded,
        )
        self._browsers = asyncio.Semaphore(browsers)

    def __enter__(self) -> "Demonstrator":
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._types.close())

    def training_screens(self, task_name: str) -> tuple[tuple[int, ...], ...]:
        """Rows of a recorded set that training draws from, by screen; empty: another task."""
        return self._recorded.training_screens(task_name)

    def demonstrate(
        self,
        task: TaskSpec,
        chat: Chat,
        inputs: Inputs,
        rng: np.random.Generator,
        *,
        quality: float = 1.0,
    ) -> Trajectory:
        """As `demonstrate`, of any task; a browser's `scripted_action` says what mistakes it makes.

        A script that fails on a page ends the episode, unsolved; stderr says which and why.

        Raises:
          VerifierError: no such task, nobody who can demonstrate it, no browser, or a page that
            fails before its script begins.
        """
        if task.name in desktop.TASKS:
            return demonstrate(task, chat, inputs, rng, quality=quality)
        played = self._runner.run(
            _tried(task, lambda: self._play(task, chat, inputs, copy.deepcopy(rng), quality))
        )
        if isinstance(played, VerifierError):
            raise played
        return played

    def demonstrate_all(
        self,
        tasks: Sequence[TaskSpec],
        chat: Chat,
        inputs: Inputs,
        rngs: Sequence[np.random.Generator],
        *,
        quality: float = 1.0,
    ) -> list[Trajectory]:
        """As `demonstrate`, of several tasks, side by side where they run in browsers.

        Without those whose page cannot be opened, or whose browser is lost each time: stderr says
        which and why.

        Raises:
          VerifierError: no such task, nobody who can demonstrate it, or no browser for any of them.
        """

        async def play(task: TaskSpec, rng: np.random.Generator) -> Trajectory | VerifierError:
            if task.name in desktop.TASKS:
                return demonstrate(task, chat, inputs, rng, quality=quality)
            async with self._browsers:
                return await _tried(
                    task, lambda: self._play(task, chat, inputs, copy.deepcopy(rng), quality)
                )

        async def play_all() -> list[Trajectory | VerifierError]:
            # None of them goes on when one has failed: whoever catches that may close the browsers.
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(play(*one)) for one in zip(tasks, rngs, strict=True)]
            return [task.result() for task in playing]

        try:
            ended = self._runner.run(play_all())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        played = [one for one in ended if isinstance(one, Trajectory)]
        lost = [one for one in ended if isinstance(one, BrowserError)]
        if lost and not played:
            raise lost[0]
        return played

    async def _play(
        self,
        task: TaskSpec,
        chat: Chat,
        inputs: Inputs,
        rng: np.random.Generator,
        quality: float,
    ) -> Trajectory:
        session = await self._types.open(task)
        try:
            recording = _record(task, session, chat, inputs)
            progress = await session.progress()
            while len(recording.turns) < task.max_turns and not progress["done"]:
                encoded = await session.screenshot("png")
                recording.see(Image.open(io.BytesIO(encoded)).convert("RGB"), encoded)
                try:
                    action = await session.scripted_action(rng, quality)
                    if action is None:
                        raise VerifierError(f"{task.name}: there is no script that demonstrates it")
                    recording.say(action)  # before anything happens that cannot be recorded
                    await session.act(action)
                    waits = action.kind == "wait" and not session.is_still
                    await asyncio.sleep((action.seconds or 0.0) if waits else 0.0)
                    progress = await session.progress()
                    recording.act(action, progress)
                except (ActionError, PageError) as error:
                    # Of a page that its script does not understand; thousands of others do not wait
                    # for that one.
                    _say_ended_early(task, f"its script failed: {error}")
                    break
            return dataclasses.replace(_ended(recording, progress), renderer=session.renderer)
        finally:
            await session.close()
