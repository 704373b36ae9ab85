"""Plays episodes with one engine and the verifiers, for training, evaluation or replay.

Needs a model, a chat and the settings of `PlayConfig`; no learner and no config file. `run` builds
it from a run's config.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from uirl_jax import evaluation, policy_sync
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import play_numbered, run_tasks
from uirl_jax.actor.player import Player
from uirl_jax.actor.rollout import RolloutConfig
from uirl_jax.console import Progress
from uirl_jax.engine.engine import Engine
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.engine.openai import OpenAIEngine
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.errors import StoppedError
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.loading import PolicyModel
from uirl_jax.log_lines import key_values
from uirl_jax.models.weights import adapters_from_numpy
from uirl_jax.shards.layout import layout_of
from uirl_jax.store import open_store
from uirl_jax.types import TaskSpec, Trajectory

T = TypeVar("T")
Adapters = dict[str, np.ndarray]  # of a policy, by leaf


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    """How episodes are sampled and played."""

    engine: EngineConfig
    rollout: RolloutConfig
    concurrency: int  # parallel episodes
    max_patches: int  # of a screenshot that the learner takes
    seed: int  # of the run

    @property
    def max_context_tokens(self) -> int:
        """Limited by the engine's longest context; longer episodes end as max_tokens."""
        return min(self.rollout.max_context_tokens, self.engine.context_lengths[-1])


class Players:
    """Engine and verifiers, as an async context manager.

    Args:
      fleet: the verifiers; opened and closed here.
      workdir, run_id: where evaluations are written and policies are read, and their run.
    """

    def __init__(
        self,
        cfg: PlayConfig,
        model: PolicyModel,
        chat: Chat,
        fleet: Fleet,
        workdir: Path,
        run_id: str,
    ) -> None:
        self.cfg, self.model, self.chat, self.fleet = cfg, model, chat, fleet
        self.workdir, self.run_id = workdir, run_id
        self.engine = make_engine(cfg, model, chat)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        await self._stack.enter_async_context(self.engine)
        await self._stack.enter_async_context(self.fleet)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.__aexit__(None, None, None)

    def player(
        self, actor_id: str, *, temperature: float, engine: SamplingEngine | None = None
    ) -> Player:
        """A player of single episodes; `engine` replaces this object's engine."""
        return Player(
            self.fleet,
            engine or self.engine,
            self.chat,
            self.model.inputs,
            dataclasses.replace(
                self.cfg.rollout,
                temperature=temperature,
                max_context_tokens=self.cfg.max_context_tokens,
            ),
            concurrency=self.cfg.concurrency,
            run_id=self.run_id,
            actor_id=actor_id,
        )

    def to_trainable(self, adapters: dict[str, np.ndarray]) -> Any:
        """Adapters of a published policy by name -> the argument of engine.set_policy."""
        return adapters_from_numpy(adapters, self.model.trainable)

    async def evaluate(
        self,
        stage: str,
        tasks: Sequence[TaskSpec],
        stop: threading.Event,
        *,
        temperature: float,
        engine: SamplingEngine | None = None,
    ) -> evaluation.EvalResult:
        """Evaluates the engine's current policy on held-out instances; once per stage.

        A stage in which no episode ended, because of env_errors, is played again.

        Args:
          tasks: the instances (`evaluation.eval_tasks`); of none, nothing is written or printed.
          engine: replaces this object's engine.
        Raises: StoppedError: `stop` was set; the same command starts the stage again.
        """
        known = evaluation.read_results(self.workdir)
        if stage in known and known[stage].attempts:
            return known[stage]
        if not tasks:
            return evaluation.count(stage, tasks, [])
        started_s = time.monotonic()
        player = self.player("eval", temperature=temperature, engine=engine)
        progress = Progress(f"evaluation {stage}", len(tasks))
        ended = successes = 0

        def on_done(trajectory: Trajectory) -> None:
            nonlocal ended, successes
            ended, successes = ended + 1, successes + trajectory.success
            progress.update(ended, success=successes / ended)

        evaluating = evaluation.evaluate(
            lambda tasks: run_tasks(
                player,
                tasks,
                seed=self.cfg.seed,
                on_done=on_done,
                keep_images=evaluation.KEPT_EPISODES,
            ),
            tasks,
            stage,
            self.workdir,
            base_hash=self.model.base_hash,
            layout=layout_of(self.model.cfg),
        )
        try:
            result = await _unless_stopped(
                evaluating, stop, f"in the evaluation of stage {stage!r}"
            )
        finally:
            progress.close()
        line = key_values(
            "evaluated",
            stage=stage,
            success=f"{result.rate:.3f}",
            episodes=result.attempts,
            seconds=f"{time.monotonic() - started_s:.1f}",
        )
        print(line, flush=True)
        seen = {f"stage {name}": r.renderers for name, r in {**known, stage: result}.items()}
        if result.renderers and (text := evaluation.renderers_text(seen)):
            print(key_values("renderer_changed", stage=stage, text=text), flush=True)
        return result

    async def play_suite(
        self,
        suite: evaluation.Suite,
        directory: Path,
        contender: evaluation.Contender,
        stop: threading.Event,
    ) -> evaluation.Played:
        """Plays what is missing of a suite with the engine's current policy.

        Args: directory: of evaluation.open_suite.
        Raises: StoppedError: `stop` was set; the same command plays the rest.
        """
        player = self.player("eval", temperature=suite.temperature)
        asked = len(suite.specs) * suite.attempts
        progress = Progress(f"{suite.name}: {contender.name}", asked)

        def on_ended(ended: int, right: int) -> None:
            progress.update(ended, success=right / max(ended, 1))

        async def play(
            missing: Sequence[tuple[int, TaskSpec]], on_done: Callable[[Trajectory], None]
        ) -> None:
            await play_numbered(player, missing, on_done, seed=self.cfg.seed)

        playing = evaluation.play_suite(play, suite, directory, contender, on_ended)
        try:
            return await _unless_stopped(playing, stop, f"in the evaluation of {contender.name!r}")
        finally:
            progress.close()

    def take_policy(self) -> tuple[int, Adapters]:
        """Loads the newest published policy into the engine.

        Returns: its version and adapters; (0, {}) if none is published: the base.
        """
        store = open_store(self.workdir)
        manifest = policy_sync.read_manifest(store)
        if manifest is None:
            return 0, {}
        adapters = policy_sync.load(store, manifest, self.model.base_hash, run_id=self.run_id)
        self.engine.set_policy(self.to_trainable(adapters), manifest.version)
        return manifest.version, adapters


def make_chat(cfg: ChatConfig, model: PolicyModel) -> Chat:
    return Chat(model.path, cfg, model.family.chat)


def make_engine(cfg: PlayConfig, model: PolicyModel, chat: Chat) -> Engine | OpenAIEngine:
    """The sampling engine: in this process, or a client of a server."""
    if cfg.engine.kind == "jax":
        return Engine(model, chat.vocabulary(model.cfg.vocab_size), cfg.engine)
    return OpenAIEngine(
        model,
        chat,
        cfg.engine,
        max_context=cfg.max_context_tokens,
        max_patches=cfg.max_patches,
    )


class BackgroundLoop:
    """An asyncio loop in a separate thread: the actor's, while the learner has the main thread.

    What still runs when the block ends, after a KeyboardInterrupt for one, is cancelled and waited
    for, so that it closes what it holds, such as an engine's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        # All in this thread: a second interrupt may end __exit__, and the tasks end all the same.
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()


async def _cancel_others() -> None:
    """Cancels the other tasks of this loop and waits until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _unless_stopped(
    coroutine: Coroutine[Any, Any, T], stop: threading.Event, where: str
) -> T:
    """Runs the coroutine; if `stop` is set first, cancels it and waits until it has ended.

    Raises: StoppedError: `stop` was set.
    """
    working, watching = (
        asyncio.create_task(coroutine),
        asyncio.create_task(when_set(stop, asyncio.Event())),
    )
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StoppedError(f"stopped {where}; run the same command again to repeat it")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def when_set(stop: threading.Event, event: asyncio.Event) -> None:
    """Sets `event` once `stop` is set."""
    while not stop.is_set():
        await asyncio.sleep(0.1)
    event.set()
