"""An engine of random actions: the baseline that policies are compared with.

75 % of its actions click a uniformly random point of the screen, 25 % type a word of the prompt.
Client, rollout, task instances and rewards are those of the run.
"""

import asyncio
import contextlib

import numpy as np

from uirl_jax import actions
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.errors import ActionError
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import decode_image
from uirl_jax.types import Action

_TYPED_SHARE = 0.25


class RandomEngine:
    """A SamplingEngine without a model; the request's seed determines the action."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Raises: ImageError: the newest screenshot cannot be decoded, as in every engine."""
        image = await asyncio.to_thread(decode_image, request.screens[-1].screenshot)
        screen = image.size
        rng = np.random.default_rng(request.seed)
        words = [
            word for m in request.messages for part in m.parts if part for word in part.split()
        ]
        text = ""
        if rng.random() < _TYPED_SHARE and words:
            word = words[int(rng.integers(len(words)))].strip("\"'.,")
            with contextlib.suppress(ActionError):  # not typeable, or a format without typing
                text = self._format(Action("type", text=word), screen, request)
        if not text:
            x, y = (int(rng.integers(side)) for side in screen)
            text = self._format(Action("click", x=x, y=y), screen, request)
        ids = self._chat.completion_ids(text)
        logprobs = np.zeros(len(ids), np.float32)  # unused: these episodes are never trained on
        return SampleResult(ids, logprobs, 0, True, logprobs, np.zeros(len(ids), np.int32))

    def _format(self, action: Action, screen: tuple[int, int], request: SampleRequest) -> str:
        """The action as text, in the action format and coordinates that the rollout parses."""
        seen = request.screens[-1]
        return actions.format_action(
            action,
            screen,
            self._chat.action_format,
            image_size=seen.seen_px,
            margins=seen.margins,
        )

    def release(self, episode: str) -> None:
        pass  # no state per episode

    def set_policy(self, trainable: object, version: int) -> None:
        pass  # no policy

    def metrics(self) -> dict[str, float]:
        return {}
