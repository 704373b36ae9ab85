"""Which verifier the next episode goes to, and when to leave one alone for a while.

On the data path: between `player` and the verifiers' clients, which it owns. It starts no verifier
and retries no request; it only knows which URLs exist now and how the last episodes went. An
episode that a verifier breaks is played again by `host`, and goes to another one while the first
rests: a session's state cannot move.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from uirl_jax.metrics import key_values
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.containers.containers import ContainerClient

FIRST_REST_S = 0.25
POLL_S = 0.1
BROKEN_EPISODES = 3  # in a row, each after it had begun: then a verifier rests too
LATENCY_WEIGHT = 0.2  # of the newest episode in the running mean
MIN_LATENCY_S = 1e-3  # below this it is noise that would decide


@dataclasses.dataclass
class Verifier:
    """One server of the fleet."""

    url: str
    client: VerifierClient | ContainerClient
    episodes: int = 0  # being played there now
    broken: int = 0  # episodes in a row that it broke in their middle
    turn_s: float | None = None  # running mean of a turn's wait; None: no episode ended yet
    rest_s: float = 0.0  # how long it is left alone after the last failure; 0: it works
    resting_until_s: float = 0.0  # time.monotonic()
    down_since_s: float = 0.0

    def takes_another(self, now_s: float) -> bool:
        if self.resting_until_s > now_s:
            return False
        # A container is one session; and one episode is enough to see whether a rest has helped.
        alone = self.rest_s > 0.0 or not self.client.dialect.has_sessions
        return not alone or self.episodes == 0


class Fleet:
    """The verifiers, as an async context manager that closes their clients.

    An episode goes where the turns of all episodes there, with it, wait least: with equal load
    the shares are as one over the latency that was measured. Whoever takes a verifier by `next`
    ends it with one of `worked`, `broke`, `failed` or `left`.

    Args:
        base_urls: returns the URLs that exist now; asked again for every episode, because a
            verifier that a supervisor starts again may come back under another port.
        make_client: opens the client of one URL.
        max_rest_s: a verifier that does not come back is tried this often in the end.
    """

    def __init__(
        self,
        base_urls: Callable[[], Sequence[str]],
        make_client: Callable[[str], VerifierClient | ContainerClient] = VerifierClient,
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
        self._opening = asyncio.Lock()  # of clients: a second one of a URL would never be used

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
        """A verifier for one episode; waits as long as there is none."""
        while True:
            verifiers = [await self._verifier(url) for url in self._base_urls()]
            now_s = time.monotonic()
            ready = [verifier for verifier in verifiers if verifier.takes_another(now_s)]
            if ready:
                self._announced_empty = False
                self._turn += 1
                start = self._turn % len(ready)  # equal ones take turns
                chosen = min(ready[start:] + ready[:start], key=self._load)
                chosen.episodes += 1
                return chosen
            if not verifiers and not self._announced_empty:
                self._announced_empty = True
                reason = "no URL at present, waiting; --role=verifier starts the bundled server"
                print(key_values("no_verifier", reason=reason), flush=True)
            rests = [v.resting_until_s for v in verifiers if v.resting_until_s > now_s]
            wake_s = min(rests, default=now_s + POLL_S)
            await asyncio.sleep(min(POLL_S, wake_s - now_s))  # the URLs may change meanwhile

    def left(self, verifier: Verifier) -> None:
        """An episode there is over, in a way that says nothing about the verifier."""
        verifier.episodes = max(0, verifier.episodes - 1)

    def broke(self, verifier: Verifier) -> None:
        """An episode had begun there and ended as env_error."""
        verifier.broken += 1
        if verifier.broken >= BROKEN_EPISODES:
            self.failed(verifier)
        else:
            self.left(verifier)

    def failed(self, verifier: Verifier) -> None:
        """An episode could not even begin there."""
        self.left(verifier)
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

    def worked(self, verifier: Verifier, turn_s: float | None = None) -> None:
        """An episode there came to its end; turn_s is how long its turns waited on average."""
        self.left(verifier)
        verifier.broken = 0
        self._last_success_s = time.monotonic()
        if turn_s is not None:
            known_s = turn_s if verifier.turn_s is None else verifier.turn_s
            verifier.turn_s = known_s + LATENCY_WEIGHT * (turn_s - known_s)
        if verifier.rest_s:
            down_s = self._last_success_s - verifier.down_since_s
            print(key_values("verifier_back", url=verifier.url, down_s=down_s), flush=True)
            verifier.rest_s = verifier.resting_until_s = 0.0

    def worked_since(self, monotonic_s: float) -> bool:
        """Whether an episode came to its end, on any verifier, since then."""
        return self._last_success_s >= monotonic_s

    def _load(self, verifier: Verifier) -> float:
        """Seconds that one more episode's turns would make all of them wait there. One that is not
        known yet counts as the quickest: that is how it becomes known."""
        turn_s = verifier.turn_s
        if turn_s is None:
            known = (other.turn_s for other in self._known.values())
            turn_s = min((s for s in known if s is not None), default=MIN_LATENCY_S)
        return (verifier.episodes + 1) * max(MIN_LATENCY_S, turn_s)

    async def _verifier(self, url: str) -> Verifier:
        async with self._opening:
            if url not in self._known:
                client = await self._stack.enter_async_context(self._make_client(url))
                self._known[url] = Verifier(url, client)
        return self._known[url]
