"""Chance in an engine's place: the row of a table that every policy is compared with.

Three actions of four are clicks at a uniformly random place of the screen, the fourth types a word
of what was said. Client, rollout, instances and judge stay those of the run.
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
    """A SamplingEngine without a model: the seed of a request decides what is answered."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Raises: ImageError where the newest screenshot cannot be decoded, as every engine."""
        image = await asyncio.to_thread(decode_image, request.screens[-1].screenshot)
        screen = image.size
        rng = np.random.default_rng(request.seed)
        words = [
            word for m in request.messages for part in m.parts if part for word in part.split()
        ]
        text = ""
        if rng.random() < _TYPED_SHARE and words:
            word = words[int(rng.integers(len(words)))].strip("\"'.,")
            with contextlib.suppress(ActionError):  # no key types it, or the format has no typing
                text = self._say(Action("type", text=word), screen, request)
        if not text:
            x, y = (int(rng.integers(side)) for side in screen)
            text = self._say(Action("click", x=x, y=y), screen, request)
        ids = self._chat.completion_ids(text)
        logprobs = np.zeros(len(ids), np.float32)  # of no model: nothing is trained on it
        return SampleResult(ids, logprobs, 0, True, logprobs, np.zeros(len(ids), np.int32))

    def _say(self, action: Action, screen: tuple[int, int], request: SampleRequest) -> str:
        """In the words and the coordinates that the rollout will read."""
        seen_px = request.screens[-1].seen_px
        return actions.format_action(action, screen, self._chat.action_format, image_size=seen_px)

    def release(self, episode: str) -> None:
        pass  # nothing is kept of it

    def set_policy(self, lora: object, version: int) -> None:
        pass  # there is none

    def metrics(self) -> dict[str, float]:
        return {}
