"""Chance in an engine's place: the row of a table that every policy is compared with.

Three actions of four are clicks at a uniformly random place of the screen, the fourth types a word
of what was said. Client, rollout, instances and judge stay those of the run.
"""

import numpy as np

from uirl_jax import actions
from uirl_jax.chat import Chat
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.types import Action
from uirl_jax.verifiers import image_header

_TYPED_SHARE = 0.25
_MAX_SCREEN_PIXELS = 2**26  # the client has refused larger ones


class RandomEngine:
    """A SamplingEngine without a model: the seed of a request decides what is answered."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def sample(self, request: SampleRequest) -> SampleResult:
        rng = np.random.default_rng(request.seed)
        screen = image_header.image_size(request.screenshots[-1], max_pixels=_MAX_SCREEN_PIXELS)
        if rng.random() < _TYPED_SHARE:
            said = " ".join(part for m in request.messages for part in m.parts if part)
            action = Action("type", text=str(rng.choice(said.split())).strip("\"'.,"))
        else:
            action = Action("click", x=int(rng.integers(screen[0])), y=int(rng.integers(screen[1])))
        text = actions.format_action(action, screen, self._chat.action_format, image_size=screen)
        ids = self._chat.completion_ids(text)
        logprobs = np.zeros(len(ids), np.float32)  # of no model: nothing is trained on it
        return SampleResult(ids, logprobs, 0, True, logprobs, np.zeros(len(ids), np.int32))

    def release(self, episode: str) -> None:
        pass  # nothing is kept of it

    def set_policy(self, lora: object, version: int) -> None:
        pass  # there is none

    def metrics(self) -> dict[str, float]:
        return {}
