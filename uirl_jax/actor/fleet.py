"""Which verifier the next episode goes to, and when to leave one alone for a while.

On the data path: between `player` and the verifiers' clients, which it owns. It starts no verifier
and retries no request; it only knows which URLs exist now and how the last episodes went.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from uirl_jax.metrics import key_values
from uirl_jax.verifiers.client import VerifierClient

FIRST_REST_S = 0.25
POLL_S = 0.1


@dataclasses.dataclass
class Verifier:
    """One server of the fleet."""

    url: str
    client: VerifierClient
    rest_s: float = 0.0  # how long it is left alone after the last failure; 0: it works
    resting_until_s: float = 0.0  # time.monotonic()
    down_since_s: float = 0.0


class Fleet:
    """The verifiers, as an async context manager that closes their clients.

    Args:
        base_urls: returns the URLs that exist now; asked again for every episode, because a
            verifier that a supervisor starts again may come back under another port.
        make_client: opens the client of one URL.
        max_rest_s: a verifier that does not come back is tried this often in the end.
    """

    def __init__(
        self,
        base_urls: Callable[[], Sequence[str]],
        make_client: Callable[[str], VerifierClient] = VerifierClient,
        *,
        max_rest_s: float = 10.0,
    ) -> None:
        self._base_urls = base_urls
        self._make_client = make_client
        self._max_rest_s = max_rest_s
        self._known: dict[str, Verifier] = {}
        self._turn = 0  # round robin
        self._last_success_s = -1.0
        self._announced_empty = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def next(self) -> Verifier:
        """The next verifier that is not resting; waits as long as there is none."""
        while True:
            verifiers = [await self._verifier(url) for url in self._base_urls()]
            now_s = time.monotonic()
            ready = [v for v in verifiers if v.resting_until_s <= now_s]
            if ready:
                self._announced_empty = False
                self._turn += 1
                return ready[self._turn % len(ready)]
            if not verifiers and not self._announced_empty:
                self._announced_empty = True
                print(key_values("no_verifier", reason="no URL at present, waiting"), flush=True)
            wake_s = min((v.resting_until_s for v in verifiers), default=now_s + POLL_S)
            await asyncio.sleep(min(POLL_S, wake_s - now_s))  # the URLs may change meanwhile

    def failed(self, verifier: Verifier) -> None:
        """An episode could not even begin there."""
        now_s = time.monotonic()
        if verifier.resting_until_s > now_s:  # one of many that failed at the same moment
            return
        if not verifier.rest_s:
            verifier.down_since_s = now_s
        verifier.rest_s = min(self._max_rest_s, max(FIRST_REST_S, 2 * verifier.rest_s))
        verifier.resting_until_s = now_s + verifier.rest_s
        line = key_values(
            "verifier_down",
            url=verifier.url,
            down_s=now_s - verifier.down_since_s,
            retry_in_s=verifier.rest_s,
        )
        print(line, flush=True)

    def worked(self, verifier: Verifier) -> None:
        """An episode there came to its end."""
        self._last_success_s = time.monotonic()
        if verifier.rest_s:
            down_s = self._last_success_s - verifier.down_since_s
            print(key_values("verifier_back", url=verifier.url, down_s=down_s), flush=True)
            verifier.rest_s = verifier.resting_until_s = 0.0

    def worked_since(self, monotonic_s: float) -> bool:
        """Whether an episode came to its end, on any verifier, since then."""
        return self._last_success_s >= monotonic_s

    async def _verifier(self, url: str) -> Verifier:
        if url not in self._known:
            client = await self._stack.enter_async_context(self._make_client(url))
            self._known.setdefault(url, Verifier(url, client))
        return self._known[url]
