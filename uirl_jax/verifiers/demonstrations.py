"""Scripted episodes of the bundled tasks as trajectories: what a cold start learns from.

Played without HTTP: nothing here judges a policy. The records look like an actor's, but that nobody
sampled them: their logprobs are 0 and their policy version is -1. The hermetic desktop is played
in this thread (`demonstrate`); all others take an event loop, and processes where they run in a
browser (`Demonstrator`).
"""

import asyncio
import hashlib
import io
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from uirl_jax import actions, vision_inputs
from uirl_jax.chat import Chat
from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers import desktop, own_tasks
from uirl_jax.verifiers.session_types import RunningTask, SessionTypes


class _Recording:
    """The trajectory of an episode while it is played."""

    def __init__(
        self,
        task: TaskSpec,
        session: desktop.Session | RunningTask,
        chat: Chat,
        image_cfg: vision_inputs.ImageConfig,
    ) -> None:
        self._task = task
        self._instruction = session.instruction
        self._screen_size = (session.width_px, session.height_px)
        self._chat = chat
        self._image_cfg = image_cfg
        self._images: dict[str, bytes] = {}
        self._grids: dict[str, tuple[int, int, int]] = {}
        self._keys: list[str] = []
        self.turns: list[Turn] = []

    def see(self, image: Image.Image, encoded: bytes) -> None:
        """The screenshot before the next action."""
        key = hashlib.sha256(encoded).hexdigest()
        self._images[key] = encoded
        self._grids[key] = vision_inputs.process_image(image, self._image_cfg)[1]
        self._keys.append(key)

    def act(self, action: Action, progress: Mapping[str, object]) -> None:
        """The action on what was seen last, and what came of it."""
        context = self._chat.context(
            self._instruction,
            [self._grids[key] for key in self._keys],
            [turn.token_ids for turn in self.turns],
        )
        text = actions.format_action(
            action,
            self._screen_size,
            self._chat.action_format,
            image_size=self._chat.image_size(self._grids[self._keys[-1]]),
            cursor=actions.cursor_after(turn.action for turn in self.turns),
        )
        token_ids = self._chat.completion_ids(text)
        self.turns.append(
            Turn(
                context_ids=context.ids,
                token_ids=token_ids,
                logprobs=np.zeros(len(token_ids), np.float32),
                image_keys=tuple(self._keys[index] for index in context.kept),
                full_logprobs=np.zeros(len(token_ids), np.float32),
                policy_versions=np.full(len(token_ids), -1, np.int32),
                text=text,
                action=action,
                progress=dict(progress),
            )
        )

    def trajectory(self, progress: Mapping[str, object]) -> Trajectory:
        reward = float(progress["reward"] or 0.0)
        success = bool(progress["done"]) and reward >= 1.0
        ended = StopReason.COMPLETED if success else StopReason.FAILED
        return Trajectory(
            episode_id=uuid.uuid4().hex,
            group_id="demonstration",
            task=self._task,
            instruction=self._instruction,
            turns=tuple(self.turns),
            images=self._images,
            image_grids=self._grids,
            stop_reason=ended if progress["done"] else StopReason.MAX_TURNS,
            reward=reward,
            success=success,
        )


def demonstrate(
    task: TaskSpec,
    chat: Chat,
    image_cfg: vision_inputs.ImageConfig,
    rng: np.random.Generator,
    *,
    quality: float = 1.0,
) -> Trajectory:
    """One episode of the hermetic desktop by the scripted demonstrator.

    Args:
      quality: probability that an action is the right one, not the task's characteristic mistake.
    """
    session = desktop.open_session(task)
    recording = _Recording(task, session, chat, image_cfg)
    progress = session.progress()
    while len(recording.turns) < task.max_turns and not progress["done"]:
        image = session.screenshot()
        encoded = io.BytesIO()
        image.save(encoded, "PNG", compress_level=1)
        recording.see(image, encoded.getvalue())
        action = desktop.scripted_action(session, rng, quality)
        session.act(action)
        progress = session.progress()
        recording.act(action, progress)
    return recording.trajectory(progress)


class Demonstrator:
    """Demonstrations of every bundled task. A context manager; leaving it ends its browsers.

    Blocks its thread, which must not run an event loop.

    Args:
      task_dirs: folders of tasks of one's own; ConfigError where one is none (own_tasks.load).
    """

    def __init__(self, task_dirs: Sequence[str] = ()) -> None:
        own = own_tasks.load(task_dirs)
        self._runner = asyncio.Runner()
        self._types = SessionTypes(warm_browsers=1, max_browsers=1, own=own)

    def __enter__(self) -> "Demonstrator":
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._types.close())

    def demonstrate(
        self,
        task: TaskSpec,
        chat: Chat,
        image_cfg: vision_inputs.ImageConfig,
        rng: np.random.Generator,
        *,
        quality: float = 1.0,
    ) -> Trajectory:
        """As `demonstrate`, of any task. MiniWoB++'s demonstrator makes no mistakes.

        Raises:
          VerifierError: no such task, nobody who can demonstrate it, or no browser.
        """
        if task.name in desktop.TASKS:
            return demonstrate(task, chat, image_cfg, rng, quality=quality)
        return self._runner.run(self._play(task, chat, image_cfg, rng, quality))

    async def _play(
        self,
        task: TaskSpec,
        chat: Chat,
        image_cfg: vision_inputs.ImageConfig,
        rng: np.random.Generator,
        quality: float,
    ) -> Trajectory:
        session = await self._types.open(task)
        try:
            recording = _Recording(task, session, chat, image_cfg)
            progress = await session.progress()
            while len(recording.turns) < task.max_turns and not progress["done"]:
                encoded = await session.screenshot("png")
                recording.see(Image.open(io.BytesIO(encoded)).convert("RGB"), encoded)
                action = await session.scripted_action(rng, quality)
                if action is None:
                    raise VerifierError(f"{task.name}: there is no script that demonstrates it")
                await session.act(action)
                await asyncio.sleep(action.seconds if action.kind == "wait" else 0.0)
                progress = await session.progress()
                recording.act(action, progress)
            return recording.trajectory(progress)
        finally:
            await session.close()
