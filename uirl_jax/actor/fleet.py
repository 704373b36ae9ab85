"""Chooses the verifier for each episode, and pauses verifiers that fail.

Sits between `player` and the verifiers' clients, which it owns. It starts no verifier and retries
no request. It tracks which URLs exist and how their last episodes ended. `host` repeats an episode
that a verifier broke; it goes to another verifier while the first one is paused, because a
session's state cannot move.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from uirl_jax.errors import ConfigError
from uirl_jax.log_lines import key_values
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.containers.containers import Client
from uirl_jax.verifiers.recorded.rewards import PREFIX as RECORDED

FIRST_REST_S = 0.25
POLL_S = 0.1
BROKEN_EPISODES = 3  # a verifier that breaks this many started episodes in a row is paused too
# A verifier that cannot play a task so many times in a row is not asked for it for a while.
MISMATCHED_EPISODES = 3
# Of a recorded set so many different rows: one may be too large for the prompt, or broken.
MISMATCHED_ROWS = 32
MISMATCH_REST_S = 60.0
FULL_PAUSE_S = 1.0  # after a verifier was full, if it does not say how long
GROW_S = 10.0  # after so long without being full one more episode is tried
LATENCY_WEIGHT = 0.2  # of the newest episode in the running mean
MIN_LATENCY_S = 1e-3  # shorter latencies are noise and count as this


def is_recorded(task_name: str) -> bool:
    """Whether a mismatch says something of one row, and nothing of the task's other instances."""
    return task_name.startswith(RECORDED)


def _most_mismatches(task_name: str) -> int:
    return MISMATCHED_ROWS if is_recorded(task_name) else MISMATCHED_EPISODES


@dataclasses.dataclass
class Verifier:
    """One verifier of the fleet."""

    url: str
    client: Client
    episodes: int = 0  # running there now
    broken: int = 0  # consecutive episodes that it broke after their first turn
    turn_s: float | None = None  # running mean of a turn's wait; None: no episode ended yet
    rest_s: float = 0.0  # length of the pause after the last failure; 0: it works
    resting_until_s: float = 0.0  # time.monotonic()
    down_since_s: float = 0.0
    capacity: int = 0  # episodes that it takes at a time; 0: no limit is known
    capacity_is_guess: bool = False  # it does not say; more are tried from time to time
    full_until_s: float = 0.0  # time.monotonic(); it was full, and more are not tried before
    # Task name -> seeds of the episodes in a row that it and this config could not play together;
    # of a recorded set each row once.
    mismatches: dict[str, list[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    last_mismatch_s: float = 0.0  # time.monotonic()

    def fits(self, task_name: str, now_s: float) -> bool:
        """Whether an episode of the task is worth a try there."""
        known_not_to = len(self.mismatches[task_name]) >= _most_mismatches(task_name)
        return not known_not_to or now_s - self.last_mismatch_s >= MISMATCH_REST_S

    def takes_another(self, now_s: float) -> bool:
        if self.resting_until_s > now_s or self.full_until_s > now_s:
            return False
        if self.capacity and self.episodes >= self.capacity:
            return False
        # A container holds one session; and after a pause one episode is enough to probe.
        one_at_a_time = self.rest_s > 0.0 or not self.client.dialect.has_sessions
        return not one_at_a_time or self.episodes == 0


class Fleet:
    """The verifiers, as an async context manager that closes their clients.

    An episode goes to the verifier with the least load, which is its number of episodes times its
    measured latency per turn; under constant load each verifier's share is inversely proportional
    to its latency. Each verifier returned by `next` must be given back with exactly one of
    `worked`, `broke`, `failed`, `mismatched`, `full` or `left`.

    Args:
        base_urls: returns the current URLs; called for every episode, because a verifier that a
            supervisor restarts may have another port.
        make_client: opens the client of one URL.
        max_rest_s: longest pause between two attempts with a failing verifier.
    """

    def __init__(
        self,
        base_urls: Callable[[], Sequence[str]],
        make_client: Callable[[str], Client] = VerifierClient,
        *,
        max_rest_s: float = 10.0,
    ) -> None:
        self._base_urls = base_urls
        self._make_client = make_client
        self._max_rest_s = max_rest_s
        self._known: dict[str, Verifier] = {}
        self._turn = 0  # round robin
        self._last_success_s = -1.0
        self._played: set[str] = set()  # names of tasks that some verifier has played
        self._announced_empty = False
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()  # one client per URL

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

    async def next(self, task_name: str = "") -> Verifier:
        """Returns a verifier for one episode; waits until one is available."""
        while True:
            verifiers = [await self._verifier(url) for url in self._base_urls()]
            now_s = time.monotonic()
            # If none fits: an episode that was waiting meanwhile; `mismatched` decides.
            candidates = [v for v in verifiers if v.fits(task_name, now_s)] or verifiers
            ready = [verifier for verifier in candidates if verifier.takes_another(now_s)]
            if ready:
                self._announced_empty = False
                self._turn += 1
                start = self._turn % len(ready)  # equal loads: round robin
                chosen = min(ready[start:] + ready[:start], key=self._load)
                chosen.episodes += 1
                return chosen
            if not verifiers and not self._announced_empty:
                self._announced_empty = True
                reason = "no URL at present, waiting; --role=verifier starts the bundled server"
                print(key_values("no_verifier", reason=reason), flush=True)
            pauses = (max(v.resting_until_s, v.full_until_s) for v in verifiers)
            rests = [until_s for until_s in pauses if until_s > now_s]
            wake_s = min(rests, default=now_s + POLL_S)
            await asyncio.sleep(min(POLL_S, wake_s - now_s))  # the URLs may change meanwhile

    def left(self, verifier: Verifier) -> None:
        """An episode ended there for a reason that is not the verifier's, such as cancellation."""
        verifier.episodes = max(0, verifier.episodes - 1)

    def broke(self, verifier: Verifier) -> None:
        """An episode ended there as env_error after at least one turn."""
        verifier.broken += 1
        if verifier.broken >= BROKEN_EPISODES:
            self.failed(verifier)
        else:
            self.left(verifier)

    def failed(self, verifier: Verifier) -> None:
        """An episode ended there as env_error before its first turn; pauses the verifier."""
        self.left(verifier)
        self._pause(verifier)

    def _pause(self, verifier: Verifier) -> None:
        now_s = time.monotonic()
        if verifier.resting_until_s > now_s:  # paused already, by another episode
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

    def full(self, verifier: Verifier, capacity: int, wait_s: float) -> None:
        """It had no room for a session: a limit on concurrency, not a fault.

        Args:
            capacity: sessions that it says it runs at a time; 0: those that run now.
            wait_s: when it asks to come back; 0: it does not say.
        """
        self.left(verifier)
        known = verifier.capacity
        verifier.capacity_is_guess = not capacity
        verifier.capacity = capacity or max(1, verifier.episodes)
        verifier.full_until_s = time.monotonic() + (wait_s or FULL_PAUSE_S)
        if not known:
            limit = verifier.capacity
            print(key_values("verifier_full", url=verifier.url, episodes_at_most=limit), flush=True)

    def mismatched(self, verifier: Verifier, task: TaskSpec, reason: str) -> None:
        """It and this config cannot play the task together; other tasks may work there.

        A recorded row that does not fit is not the verifier's fault: it pauses nothing.

        Raises: ConfigError: no verifier can, and none ever could: the config is wrong.
        """
        self.left(verifier)
        seeds, most = verifier.mismatches[task.name], _most_mismatches(task.name)
        verifier.last_mismatch_s = time.monotonic()
        counted_before = is_recorded(task.name) and task.seed in seeds
        if len(seeds) < most and not counted_before:
            seeds.append(task.seed)
            if len(seeds) == most:
                line = key_values(
                    "verifier_mismatch", url=verifier.url, task=task.name, reason=reason
                )
                print(line, flush=True)
        verifiers = [self._known.get(url) for url in self._base_urls()]
        untried = (v is None or len(v.mismatches[task.name]) < most for v in verifiers)
        if not verifiers or any(untried):  # none: the bundled server is being restarted
            return
        if task.name not in self._played:
            rows = f"not one of {most} rows fits, the last: " if is_recorded(task.name) else ""
            raise ConfigError(f"task {task.name!r} cannot be played: {rows}{reason}")
        if not is_recorded(task.name):
            self._pause(verifier)

    def worked(self, verifier: Verifier, turn_s: float | None = None, task_name: str = "") -> None:
        """An episode ended there without env_error; turn_s is the mean wait of its turns."""
        self.left(verifier)
        verifier.broken = 0
        verifier.mismatches[task_name].clear()
        self._played.add(task_name)
        self._last_success_s = time.monotonic()
        if verifier.capacity_is_guess and self._last_success_s - verifier.full_until_s > GROW_S:
            verifier.capacity += 1
            verifier.full_until_s = self._last_success_s
        if turn_s is not None:
            known_s = turn_s if verifier.turn_s is None else verifier.turn_s
            verifier.turn_s = known_s + LATENCY_WEIGHT * (turn_s - known_s)
        if verifier.rest_s:
            down_s = self._last_success_s - verifier.down_since_s
            print(key_values("verifier_back", url=verifier.url, down_s=down_s), flush=True)
            verifier.rest_s = verifier.resting_until_s = 0.0

    def worked_since(self, monotonic_s: float) -> bool:
        """Whether an episode has ended without env_error on any verifier since that time."""
        return self._last_success_s >= monotonic_s

    def _load(self, verifier: Verifier) -> float:
        """Load with one more episode, in seconds: episodes x latency per turn. A verifier without a
        measured latency counts as the fastest one, so that it is tried and measured."""
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
