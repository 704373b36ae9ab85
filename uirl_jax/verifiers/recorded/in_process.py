"""Recorded sessions in the actor's own process, with the methods of a `VerifierClient`.

No HTTP, no server and no encoding: a screenshot is the set's picture as it is stored. Instruction,
progress and rewards are those of the bundled server's session, which is the same class.
"""

import dataclasses
import uuid
from typing import Any, Self

from uirl_jax import actions
from uirl_jax.errors import ActionError, InvalidRequestError, VerifierError
from uirl_jax.types import Action, Rule, TaskSpec
from uirl_jax.verifiers import dialects
from uirl_jax.verifiers.client import answers
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.client.rules import FindOwnRule, no_own_rule
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.recorded.task import RecordedTask

URL = "recorded:in_process"  # what stands for it among the addresses of verifiers


@dataclasses.dataclass
class _Open:
    task: RecordedTask
    rule: Rule | None  # None: the session's own reward
    turns: int = 0


class RecordedClient:
    """An async context manager, which has nothing to close.

    Args:
      find_own_rule: of a task; with weights of the config (`rewards.with_weights`).
      max_pixels: larger pictures are refused, as a client of a server does.
    """

    def __init__(
        self,
        sets: RecordedSets,
        *,
        find_own_rule: FindOwnRule = no_own_rule,
        max_pixels: int = 16_000_000,
    ) -> None:
        self.dialect = dialects.find_dialect("g1+")
        self._sets, self._find_own_rule, self._max_pixels = sets, find_own_rule, max_pixels
        self._open: dict[str, _Open] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._open.clear()

    def check_action(self, action: Action) -> None:
        """Every action can be judged."""

    async def create(self, task: TaskSpec) -> Session:
        """Opens a session. Raises: InvalidRequestError: it will never be opened."""
        own = self._find_own_rule(task)
        try:
            running = await self._sets.open(task)
        except VerifierError as error:
            raise InvalidRequestError(str(error)) from error
        width_px, height_px = running.width_px, running.height_px
        if width_px * height_px > self._max_pixels:
            raise InvalidRequestError(
                f"{task.name}: a screen of {width_px}x{height_px} pixels, at most "
                f"{self._max_pixels} are accepted (verifier.limits.max_image_pixels)"
            )
        session_id = uuid.uuid4().hex
        self._open[session_id] = _Open(running, own)
        instruction = running.instruction if own is None else own.instruction or running.instruction
        return Session(
            session_id,
            instruction,
            width_px,
            height_px,
            judged_here=own is not None,
            judges_every_action=True,
        )

    async def screenshot(self, session_id: str) -> bytes:
        return self._find(session_id).task.picture()

    async def act(self, session_id: str, action: Action, request_id: str | None = None) -> bytes:
        """Judges the action; the screen after it."""
        entry = self._find(session_id)
        try:
            actions.validate(action, (entry.task.width_px, entry.task.height_px))
        except ActionError as error:
            raise InvalidRequestError(str(error)) from error
        entry.turns += 1
        await entry.task.act(action)
        return entry.task.picture()

    async def progress(self, session_id: str) -> dict[str, Any]:
        entry = self._find(session_id)
        progress = await entry.task.progress()
        if entry.rule is not None:
            return {**progress, **entry.rule.judge(progress, entry.turns)._asdict()}
        return answers.check_verdict(progress, f"progress of session {session_id}")

    async def delete(self, session_id: str) -> None:
        self._open.pop(session_id, None)

    def _find(self, session_id: str) -> _Open:
        return answers.find_open(self._open, session_id)
