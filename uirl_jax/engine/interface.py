"""What the actor needs of an engine, whichever kind samples: `engine.Engine` or `openai`'s."""

from typing import Any, Protocol

from uirl_jax.engine.requests import SampleRequest, SampleResult


class SamplingEngine(Protocol):
    """Samples with adapters that may be replaced at any time. Entered and closed by its owner."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """One turn's tokens; cancelling the caller ends the work on it."""
        ...

    def release(self, episode: str) -> None:
        """The episode has no further turn."""
        ...

    def set_policy(self, trainable: Any, version: int) -> None:
        """Requests that come from now on are sampled with these adapters, or newer ones."""
        ...

    def metrics(self) -> dict[str, float]:
        """Totals since the start, as `engine/...`."""
        ...
