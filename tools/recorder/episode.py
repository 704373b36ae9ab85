"""One demonstration: a session of a verifier, what a person does in it, and the record of that.

As an episode of the actor (`actor.rollout`), with a person in the policy's place: the same client,
the same screenshots, and the limits that the agent would have. Nothing is written to disk here.
"""

import dataclasses
import enum
import time
import uuid
from typing import Any

import numpy as np

from uirl_jax.actor.rollout import MAX_REWARD, TERMINATE, UNSENT
from uirl_jax.demonstrations.recording import Recording
from uirl_jax.errors import (
    ActionError,
    ImageError,
    RequestRefusedError,
    UserCodeError,
    VerifierError,
)
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import decode_image
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers.client.client import Session, VerifierClient


@dataclasses.dataclass(frozen=True)
class Agent:
    """Whom it is shown to: how it speaks, what it sees, and what it can hold."""

    chat: Chat
    inputs: Inputs
    max_context_tokens: int
    max_new_tokens: int
    success_reward: float


class End(enum.StrEnum):
    """Why no action is taken any more."""

    NOT_YET = ""
    DONE = "done"  # the verifier says so
    TERMINATED = "terminated"
    MAX_TURNS = "max_turns"
    LOST = "lost"  # the session is gone, or nobody knows what became of an action


class Demonstration:
    """An open session and what was done in it. `act` one at a time; `close` deletes the session."""

    def __init__(
        self, client: VerifierClient, session: Session, task: TaskSpec, agent: Agent
    ) -> None:
        self.task, self.session = task, session
        self.ended = End.NOT_YET
        self.message = ""  # what the person has to know
        self.progress: dict[str, Any] = {"done": False, "reward": None}
        self.screenshot = b""
        self._client, self._agent = client, agent
        self._screen_size = (session.width_px, session.height_px)
        self._recording = Recording(
            task, session.instruction, self._screen_size, agent.chat, agent.inputs
        )
        self._started_unix_s, self._started_s = time.time(), time.monotonic()

    @classmethod
    async def open(cls, client: VerifierClient, task: TaskSpec, agent: Agent) -> "Demonstration":
        """Raises: VerifierError: no such task, no browser, no server. UserCodeError: its rule."""
        session = await client.create(task)
        demonstration = cls(client, session, task, agent)
        try:
            demonstration._see(await client.screenshot(session.id))
            if demonstration.ended is not End.NOT_YET:
                raise VerifierError(f"{task.name}: {demonstration.message}")
        except BaseException:
            await demonstration.close()
            raise
        return demonstration

    @property
    def turns(self) -> list[str]:
        """What was done so far, as the agent would say it."""
        return [turn.text for turn in self._recording.turns]

    @property
    def solved(self) -> bool:
        if self.session.judged_here or not self._client.dialect.judges:
            return self.progress.get("success") is True
        reward = self.progress["reward"] or 0.0
        return self.progress["done"] and reward >= self._agent.success_reward

    async def act(self, action: Action) -> None:
        """Does an action in the session and records it.

        Raises:
          ActionError: it cannot be done, or the agent could not say it; nothing has happened.
        """
        if action.kind == "drag" and self._agent.chat.action_format.cursor:
            # It drags from where the pointer is: a move there first, as near as it can say.
            _, _, move = self._recording.say(Action("move", x=action.x, y=action.y))
            if self._recording.cursor != (move.x, move.y):
                await self._act_once(move)
            action = dataclasses.replace(action, x=move.x, y=move.y)
        await self._act_once(action)

    async def _act_once(self, action: Action) -> None:
        self.message = ""
        if self.ended is not End.NOT_YET:
            raise ActionError("the episode has ended: save it or start over")
        text, token_ids, action = self._recording.say(action)
        self._check_length(text, token_ids)
        is_sent = action.kind not in UNSENT or self.session.judges_every_action
        if is_sent:
            self._client.check_action(action)
        screenshot = self.screenshot
        try:
            if is_sent:
                screenshot = await self._client.act(self.session.id, action, uuid.uuid4().hex)
            progress = await self._client.progress(self.session.id)
            self._check(progress)
        except (VerifierError, UserCodeError) as error:  # a rule of the user's own judges after it
            await self._failed(error)
            return
        self.progress = progress
        self._recording.act(action, progress)
        if progress["done"]:
            self.ended = End.DONE
        elif action.kind == TERMINATE:
            self.ended = End.TERMINATED
        elif len(self._recording.turns) >= self.task.max_turns:
            self._end(
                End.MAX_TURNS, f"the agent has no more than {self.task.max_turns} turns (max_turns)"
            )
        if self.ended is End.NOT_YET:
            self._see(screenshot)
        else:
            self.screenshot = screenshot

    def trajectory(self) -> Trajectory:
        """The record of what was done. Raises ActionError where nothing was."""
        if not self._recording.turns:
            raise ActionError("nothing was done yet: there is nothing to save")
        if self.solved:
            stop_reason = StopReason.COMPLETED
        elif self.ended in (End.DONE, End.TERMINATED):
            stop_reason = StopReason.FAILED
        else:
            lost = self.ended is End.LOST
            stop_reason = StopReason.ENV_ERROR if lost else StopReason.MAX_TURNS
        return dataclasses.replace(
            self._recording.trajectory(self.progress, success=self.solved, stop_reason=stop_reason),
            started_unix_s=self._started_unix_s,
            duration_s=time.monotonic() - self._started_s,
        )

    async def close(self) -> None:
        """Deletes the session, if it is still there; one that cannot be reached ends when idle."""
        try:
            await self._client.delete(self.session.id)
        except VerifierError as error:
            self.message = str(error)

    def _check_length(self, text: str, token_ids: np.ndarray) -> None:
        most = self._agent.max_new_tokens
        if len(token_ids) > most:
            raise ActionError(
                f"{text[:60]} has {len(token_ids)} tokens, the agent says at most {most}: do it in "
                "parts, or raise actor.rollout.max_new_tokens and engine.max_new_tokens"
            )

    def _check(self, progress: dict[str, Any]) -> None:
        """Raises VerifierError for a progress that an actor would not take either."""
        reward = progress.setdefault("reward", None)
        if not isinstance(progress.get("done"), bool):
            raise VerifierError("the progress does not say done")
        if abs(reward or 0.0) > MAX_REWARD:
            raise VerifierError(f"a reward of {reward:g}, at most {MAX_REWARD:g} are taken")

    async def _failed(self, error: VerifierError | UserCodeError) -> None:
        """An action that was refused can be followed by another one; all else is the end."""
        if isinstance(error, RequestRefusedError):
            try:
                await self._client.screenshot(self.session.id)
            except VerifierError:
                pass
            else:
                raise ActionError(str(error)) from error
        self._end(
            End.LOST, f"the session is lost: {error}. What is listed here can still be saved."
        )

    def _see(self, screenshot: bytes) -> None:
        """What the next action is about."""
        try:
            image = decode_image(screenshot)
            if image.size != self._screen_size:
                raise ImageError(f"a screenshot of {image.size}, the screen is {self._screen_size}")
            tokens = self._recording.see(image, screenshot)
        except ImageError as error:
            self._end(End.LOST, f"the session is lost: {error}")
            return
        self.screenshot = screenshot
        if tokens > self._agent.max_context_tokens:
            self.message = (
                f"The agent of this config never gets here: it would read {tokens} tokens, at most "
                f"{self._agent.max_context_tokens} fit (actor.rollout.max_context_tokens, "
                "engine.context_lengths; learner.batch.row_lengths for training)."
            )

    def _end(self, end: End, message: str) -> None:
        self.ended, self.message = end, message
