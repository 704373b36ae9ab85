"""The actor that plays against `proxy`, for `plays`: the real one, but for its engine.

Client, fleet, rollout and player are those of a run, with small pictures, and with short time-outs
(LIMITS) where something hangs, so that it ends soon. `ScriptedEngine` stands where an engine does.
"""

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from tools.bench.faults import proxy
from uirl_jax import actions, assets
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import run_tasks
from uirl_jax.actor.player import Attempt, Player
from uirl_jax.actor.rollout import RolloutConfig, derive_seed
from uirl_jax.engine.requests import SampleRequest, SampleResult
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.screens import decode_planned
from uirl_jax.families.table import family_of
from uirl_jax.shards.record import TokenLayout
from uirl_jax.types import StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers.client.client import ClientLimits, VerifierClient
from uirl_jax.verifiers.tasks import desktop

MODEL_DIR = assets.DIRECTORY / "tiny-ui-base"  # its tokenizer is used
LIMITS = ClientLimits(
    connect_timeout_s=1.0,
    read_timeout_s=0.8,
    attempt_timeout_s=1.0,
    create_timeout_s=4.0,
    backoff_s=0.05,
    max_retry_after_s=0.2,
    max_image_bytes=2 * 2**20,
)
# Where nothing hangs, a busy machine must not look as if something did: a call that timed out is
# tried again, and a fault that strikes once is then gone.
PATIENT = dataclasses.replace(
    LIMITS, connect_timeout_s=5.0, read_timeout_s=8.0, attempt_timeout_s=10.0, create_timeout_s=10.0
)
ROLLOUT = RolloutConfig(
    temperature=0.0,
    max_new_tokens=64,
    max_context_tokens=100_000,
    episode_timeout_s=15.0,
    delete_timeout_s=3.0,
)
LANES = 8  # verifiers of the fleet, as it sees them
RUN_ID, ACTOR_ID, RUN_SEED = "faults", "a0", 7


class ScriptedEngine:
    """No model: the demonstrator of the hermetic desktop, in an engine's place.

    It knows an episode's task by the seed of its first request, and follows it in a desktop of its
    own. What it says is certain, so its logprobs are 0.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._tasks: dict[int, tuple[TaskSpec, np.ndarray | None]] = {}
        self._playing: dict[str, tuple[desktop.Session, np.ndarray | None]] = {}
        self._rng = np.random.default_rng(0)
        self._requests = 0

    def expect(self, seed: int, task: TaskSpec, text: str | None = None) -> None:
        """An episode with this seed is of this task; `text` is all that is said there."""
        ids = None if text is None else self._chat.completion_ids(text)
        self._tasks[derive_seed(seed, 0)] = (task, ids)

    async def sample(self, request: SampleRequest) -> SampleResult:
        self._requests += 1
        decode_planned(
            request.screens[-1]
        )  # as every engine: ImageError where it cannot be decoded
        if request.episode not in self._playing:
            task, said = self._tasks[request.seed]
            self._playing[request.episode] = desktop.open_session(task), said
        session, ids = self._playing[request.episode]
        if ids is None:
            ids = self._chat.completion_ids(self._demonstrated(session))
        logprobs = np.zeros(len(ids), np.float32)
        return SampleResult(ids, logprobs, 0, True, logprobs, np.zeros(len(ids), np.int32))

    def _demonstrated(self, session: desktop.Session) -> str:
        if session.judge.done:  # not so on the server: it lies, or is behind
            return "wait(0)"
        quality = 0.0 if errs(session.task.seed) else 1.0
        action = desktop.scripted_action(session, self._rng, quality)
        session.act(action)
        return actions.format_action(action, (session.width_px, session.height_px))

    def release(self, episode: str) -> None:
        self._playing.pop(episode, None)

    def set_policy(self, lora: Any, version: int) -> None:
        pass  # there is none

    def metrics(self) -> dict[str, float]:
        return {"engine/requests": float(self._requests)}


def errs(seed: int) -> bool:
    """Whether the demonstrator clicks beside the button of this seed: it earns nothing, so that a
    reward there would be a fault's."""
    return seed % 10 == 9


def task_of(seed: int) -> TaskSpec:
    """Three turns or one, in turn; now and then ten that earn a half after five."""
    if seed % 8 == 2:
        return TaskSpec("desktop/data_entry", seed, "rows=2,columns=1", max_turns=12)
    if seed % 2:
        return TaskSpec("desktop/click_button", seed, max_turns=3)
    return TaskSpec("desktop/enter_text", seed, max_turns=6)


class JumpingClock:
    """time.time, an hour or a day off in either direction at every look."""

    def __init__(self) -> None:
        self._time, self._rng = time.time, random.Random(0)

    def __call__(self) -> float:
        return self._time() + self._rng.choice((-86_400.0, -3600.0, 0.0, 3600.0, 86_400.0))

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        time.time = self
        try:
            yield
        finally:
            time.time = self._time


class Ended(NamedTuple):
    """What is kept of an episode, whether it is published or not."""

    task: TaskSpec
    stop_reason: StopReason
    reward: float
    success: bool
    duration_s: float


class NotingPlayer(Player):
    """A player that notes how each of its episodes ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ended: list[Ended] = []
        self.cancelled = 0  # begun, and then ended with a group that was abandoned

    async def play(
        self, task: TaskSpec, seed: int, group: str, on_start: Callable[[], None] | None = None
    ) -> Attempt:
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            if on_start is not None:
                on_start()

        try:
            attempt = await super().play(task, seed, group, begin)
        except asyncio.CancelledError:
            self.cancelled += begun
            raise
        t = attempt.trajectory
        self.ended.append(Ended(t.task, t.stop_reason, t.reward, t.success, t.duration_s))
        return attempt


class World:
    """The proxy's process, and an actor's parts for whoever wants to play against it."""

    def __init__(self, port: int, concurrency: int) -> None:
        self.port, self._concurrency = port, concurrency
        family = family_of(MODEL_DIR)
        model_cfg = family.read_config(MODEL_DIR)
        images = dataclasses.replace(model_cfg.images, max_pixels=28 * 28 * 12)
        cfg = ChatConfig(system_prompt="", prompt_template="{instruction}")
        self.chat = Chat(MODEL_DIR, cfg, family.chat)
        self.layout = TokenLayout(self.chat.vocab_size, self.chat.image_token_id)
        self.engine = ScriptedEngine(self.chat)
        self.inputs = family.make_inputs(dataclasses.replace(model_cfg, images=images))

    @contextlib.asynccontextmanager
    async def player(
        self, plan: str, concurrency: int | None = None
    ) -> AsyncIterator[NotingPlayer]:
        urls = [f"http://127.0.0.1:{self.port}/{plan}/{lane}" for lane in range(LANES)]
        limits = LIMITS if proxy.hangs(plan) else PATIENT

        def client(url: str) -> VerifierClient:
            return VerifierClient(url, limits=limits)

        async with Fleet(lambda: urls, client, max_rest_s=0.1) as fleet:
            yield NotingPlayer(
                fleet,
                self.engine,
                self.chat,
                self.inputs,
                ROLLOUT,
                concurrency=concurrency or self._concurrency,
                run_id=RUN_ID,
                actor_id=ACTOR_ID,
            )

    async def report(self, plan: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/report/{plan}"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return await response.json()

    async def play(
        self, plan: str, tasks: Sequence[TaskSpec], text: str | None = None, seed: int = RUN_SEED
    ) -> list[Trajectory]:
        """One episode of each task, without another try; `text` is all that is said in them."""
        for index, task in enumerate(tasks):
            self.engine.expect(derive_seed(seed, index), task, text)
        async with self.player(plan) as player:
            return await run_tasks(player, tasks, seed=seed, env_retries=0)
