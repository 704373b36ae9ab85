"""The trajectory of an episode that a script or a person demonstrates.

It looks like an actor's, but nothing was sampled: logprobs are 0 and the policy version is -1. The
actions are kept in pixels beside the tokens, so that the same demonstration can be written again
for a model with another tokenizer, action format or context (`retell`). `is_example` says which of
a script's are worth learning from. `scripted` plays scripts, `tools.record_demo` records people.
"""

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax import actions
from uirl_jax.errors import ActionError
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.chat import Chat, Context
from uirl_jax.families.screens import decode_image, plan_screen
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers.dialects import AIMED_REWARD

_ROUNDING = 1e-6  # the page adds in another order than the script


def is_example(demonstration: Trajectory) -> bool:
    """Whether to learn from it: it solved its task, or was paid what its script aimed at.

    Some tasks pay by distance, and 1 for no whole pixel; success stays the reward 1 for policies.
    """
    progress = demonstration.turns[-1].progress if demonstration.turns else {}
    aim = progress.get(AIMED_REWARD, 0.0)
    return demonstration.success or 0.0 < aim - _ROUNDING <= demonstration.reward


class Recording:
    """A trajectory in the making: `see`, then `act`, turn by turn."""

    def __init__(
        self,
        task: TaskSpec,
        instruction: str,
        screen_size: tuple[int, int],
        chat: Chat,
        inputs: Inputs,
    ) -> None:
        self._task = task
        self._instruction = instruction
        self._screen_size = screen_size
        self._chat = chat
        self._inputs = inputs
        self._images: dict[str, bytes] = {}
        self._screens: list[Screen] = []
        self._context: Context
        self.turns: list[Turn] = []

    def see(self, image: Image.Image, encoded: bytes) -> int:
        """The screenshot before the next action; how many tokens a policy would read there."""
        screen = plan_screen(self._inputs, encoded, image.size)
        self._images[screen.key] = encoded
        self._screens.append(screen)
        self._context = self._chat.context(
            self._instruction, self._screens, [turn.token_ids for turn in self.turns]
        )
        return len(self._context.ids)

    @property
    def cursor(self) -> tuple[int, int] | None:
        """Where the pointer was left, in pixels of the screen."""
        return actions.cursor_after(turn.action for turn in self.turns)

    def say(self, action: Action) -> tuple[str, np.ndarray, Action]:
        """An action on what was seen last, as the policy would say it.

        Returns:
          Its text, the text's int32[S] tokens with the end of the turn, and what that text means: a
          coordinate of a coarse space (0-999) stands for the pixel next to it.

        Raises:
          ActionError: not valid on this screen, or the action format cannot say it.
        """
        how = {
            "image_size": self._screens[-1].seen_px,
            "margins": self._screens[-1].margins,
            "cursor": self.cursor,
        }
        action_format = self._chat.action_format
        text = actions.format_action(action, self._screen_size, action_format, **how)
        meant = actions.parse(text, self._screen_size, action_format, **how)
        return text, self._chat.completion_ids(text), meant

    def act(
        self,
        action: Action,
        progress: Mapping[str, Any],
        said: tuple[str, np.ndarray] | None = None,
    ) -> None:
        """The action on what was seen last, and what came of it. Raises ActionError as `say`.

        Args: said: a text and its tokens that mean the action, in place of those of `say`.
        """
        text, token_ids = said or self.say(action)[:2]
        self.turns.append(
            Turn(
                context_ids=self._context.ids,
                token_ids=token_ids,
                logprobs=np.zeros(len(token_ids), np.float32),
                image_keys=tuple(self._screens[index].key for index in self._context.kept),
                full_logprobs=np.zeros(len(token_ids), np.float32),
                policy_versions=np.full(len(token_ids), -1, np.int32),
                text=text,
                action=action,
                progress=dict(progress),
            )
        )

    def trajectory(
        self, progress: Mapping[str, Any], *, success: bool, stop_reason: StopReason
    ) -> Trajectory:
        """What was recorded so far, with the verifier's last word."""
        seen = {key for turn in self.turns for key in turn.image_keys}  # no screen after the end
        return Trajectory(
            episode_id=uuid.uuid4().hex,
            group_id="demonstration",
            task=self._task,
            instruction=self._instruction,
            turns=tuple(self.turns),
            images={key: data for key, data in self._images.items() if key in seen},
            image_tokens={s.key: s.tokens for s in self._screens if s.key in seen},
            stop_reason=stop_reason,
            reward=float(progress["reward"] or 0.0),
            success=success,
        )


def reads_alike(recorded: Trajectory, chat: Chat, inputs: Inputs) -> bool:
    """Whether the chat's action format reads every turn's text as the action that was recorded.

    Raises: ImageError: a screenshot that cannot be read.
    """
    for number, turn in enumerate(recorded.turns):
        if turn.action is None or not turn.image_keys:
            return False
        encoded = recorded.images[turn.image_keys[-1]]
        screen_size = decode_image(encoded).size
        screen = plan_screen(inputs, encoded, screen_size)
        try:
            action = actions.parse(
                turn.text,
                screen_size,
                chat.action_format,
                image_size=screen.seen_px,
                margins=screen.margins,
                cursor=actions.cursor_after(earlier.action for earlier in recorded.turns[:number]),
            )
        except ActionError:
            return False
        if action != turn.action:
            return False
    return True


def retell(
    demonstration: Trajectory, chat: Chat, inputs: Inputs, *, keep_words: bool = False
) -> Trajectory:
    """A demonstration in another chat: the same screenshots and actions, new contexts and tokens.

    Args: keep_words: what was said stays as it was, thoughts included: `reads_alike` is true.
    Raises:
      ActionError: a turn without an action, or one that the chat's action format cannot say.
      ImageError: a screenshot that cannot be read.
    """
    recording: Recording | None = None
    for number, turn in enumerate(demonstration.turns):
        if turn.action is None or not turn.image_keys:
            raise ActionError(f"turn {number} has no action on a screenshot: no demonstration")
        encoded = demonstration.images[turn.image_keys[-1]]  # the newest always stays in a context
        image = decode_image(encoded)
        if recording is None:
            recording = Recording(
                demonstration.task, demonstration.instruction, image.size, chat, inputs
            )
        recording.see(image, encoded)
        try:
            said = (turn.text, turn.token_ids) if keep_words else None
            recording.act(turn.action, turn.progress, said)
        except ActionError as error:
            raise ActionError(f"turn {number}: {error}") from error
    if recording is None:
        raise ActionError("it has no turn")
    told = recording.trajectory(
        {"reward": demonstration.reward},
        success=demonstration.success,
        stop_reason=demonstration.stop_reason,
    )
    return dataclasses.replace(
        demonstration, turns=told.turns, images=told.images, image_tokens=told.image_tokens
    )
