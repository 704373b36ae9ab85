"""The engine: many episodes' turns sampled together, each joining and leaving on its own.

Stands between the actor's episodes, on the event loop, and the rounds of one worker thread
(`rounds`), so that the loop stays free for the verifiers. What a request can get wrong is refused
here, at its arrival. It does not tokenise, parse or retry.
"""

import asyncio
import collections
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from flax import nnx

from uirl_jax.engine import requests
from uirl_jax.engine.jobs import Job
from uirl_jax.engine.pixels import PixelReader
from uirl_jax.engine.requests import EngineConfig, SampleRequest, SampleResult
from uirl_jax.engine.rounds import Rounds
from uirl_jax.engine.slots import contents
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel

__all__ = ["Engine", "EngineConfig", "SampleRequest", "SampleResult"]


class Engine:
    """Samples from one model whose adapters may be replaced at any time.

    An async context manager: entering starts serving, leaving fails what is not done. It may be
    entered again; compiled programs and the cache stay.

    Args:
      model: its frozen weights are shared and never donated; its adapters are the first policy.
      vocabulary: of the model's tokenizer.
      policy_version: of the model's adapters.

    Raises:
      ConfigError: cfg asks for what the model's family cannot do.
    """

    def __init__(
        self,
        model: PolicyModel,
        vocabulary: Vocabulary,
        cfg: EngineConfig,
        *,
        policy_version: int = 0,
    ) -> None:
        model.family.require(requests.needed_capabilities(cfg))
        self._model, self._vocabulary, self._cfg = model, vocabulary, cfg
        self._pixels = PixelReader(model.inputs)
        self._rounds = Rounds(
            model, vocabulary, cfg, policy_version=policy_version, pixels=self._pixels
        )
        self._changed = asyncio.Event()  # something arrived, or `close` was called
        self._idle_s: dict[str, float] = collections.defaultdict(float)
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._open = False
        self._failure: Exception | None = None  # what ended the serving: no round can run any more

    async def __aenter__(self) -> Self:
        self._changed = asyncio.Event()  # an engine may be opened again, on another event loop
        # One thread: rounds run one after the other, and XLA already uses every core within one.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._pixels.open()
        self._open, self._failure = True, None
        self._task = asyncio.create_task(self._serve(self._executor), name="engine")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------- what callers use

    @property
    def policy_version(self) -> int:
        """Version that the next token is sampled with."""
        return self._rounds.next_policy.version

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Waits for a slot and returns the sampled tokens.

        Cancelling the caller frees the slot before the next round.

        Raises:
          ConfigError: no slot holds the request; it names the limit and the key to change.
          ImageError: the newest screenshot cannot be decoded.
          PolicyError: the policy in use gives NaN.
          ValueError: the request contradicts itself.
          RuntimeError: the engine is not open, or closed while the request waited.
          Exception: whatever made a round fail, a lack of memory for one. If no further round can
            run, every later call raises it too.
        """
        inputs = self._model.inputs
        positions_ac = requests.validated_positions(request, self._cfg, inputs)
        if request.stop_strings and self._vocabulary.decode is None:
            raise ValueError("a request with stop strings, and the vocabulary has no decode")
        self._check_open("sample() outside of `async with engine`")
        request = await self._with_pixels(request)
        job = Job(
            request,
            positions_ac,
            inputs.next_position(positions_ac),
            contents(request.context_ids, request.screens, inputs.image_token_id),
            requests.visual_tokens(request),
            asyncio.get_running_loop().create_future(),
            time.perf_counter(),
        )
        self._rounds.waiting.append(job)
        self._changed.set()
        return await job.future

    async def _with_pixels(self, request: SampleRequest) -> SampleRequest:
        """Its newest screen with arrays, unless its tokens are in the table. Older screens were the
        newest once, and are rarely needed again."""
        *before, newest = request.screens or (None,)
        if newest is None or newest.arrays is not None or self._rounds.has_tokens_of(newest.key):
            return request
        read = await self._pixels.read(newest)
        self._check_open("the engine closed as a request waited")
        return dataclasses.replace(request, screens=(*before, read))

    def _check_open(self, fault: str) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._open:
            raise RuntimeError(fault)

    def release(self, episode: str) -> None:
        """The episode has no further turn: others may have its slot."""
        self._rounds.pool.release(episode)
        self._changed.set()  # idle time from here on is not this episode's environment's

    def set_policy(self, trainable: nnx.State, version: int) -> None:
        """Takes new adapters into use from the next round on, within running requests too.

        Args:
          trainable: of the structure, shapes and dtypes of the first; jax or numpy arrays.

        Raises:
          PolicyError: it is not.
        """
        self._rounds.set_policy(trainable, version)

    async def warm_up(self) -> None:
        """Compiles everything that any request could need."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._rounds.compile_all)

    def metrics(self) -> dict[str, float]:
        """Totals since the start. A slot is in use while a request runs in it; the device is idle
        while none does, and waits for environments where episodes go on all the same."""
        totals, seconds = self._rounds.totals, self._rounds.seconds
        busy_s = seconds["encode"] + seconds["prefill"] + seconds["decode"]
        return {
            "engine/requests": totals["requests"],
            "engine/failed_rounds": totals["failed_rounds"],
            "engine/tokens_sampled": totals["tokens_sampled"],
            "engine/decode_s": seconds["decode"],
            "engine/decode_steps": totals["decode_steps"],
            "engine/decode_tokens_per_s": totals["tokens_sampled"] / max(seconds["decode"], 1e-9),
            "engine/decode_fill": totals["tokens_sampled"] / max(1, totals["decode_rows"]),
            "engine/prefill_tokens": totals["prefill_tokens"],
            "engine/prefill_tokens_per_s": totals["prefill_tokens"] / max(seconds["prefill"], 1e-9),
            "engine/cached_tokens": totals["cached_tokens"],
            "engine/cache_hits": totals["cached_tokens"] / max(1, totals["context_tokens"]),
            "engine/images_encoded": totals["images_encoded"],
            "engine/images_cached": totals["images_cached"],
            "engine/images_read": self._pixels.screens,
            "engine/images_cpu_s": self._pixels.cpu_s,
            "engine/queue_s": seconds["queue"] / max(1, totals["admitted"]),
            "engine/slot_use": seconds["slots"] / max(1e-9, seconds["round"] * self._cfg.num_slots),
            "engine/busy_s": busy_s,
            "engine/host_s": seconds["round"] - busy_s,
            "engine/idle_s": self._idle_s["in all"],
            "engine/environments_s": self._idle_s["in play"],
            "engine/compile_count": self._rounds.compile_count(),
        }

    async def close(self) -> None:
        """Fails what is not done, lets a running round end, stops serving.

        All of it also where this call or the serving task is cancelled: a round that outlived it
        would share the buffers with those of an engine that is entered again.
        """
        self._open = False
        self._changed.set()
        task, executor, self._task, self._executor = self._task, self._executor, None, None
        try:
            if task is not None:
                await asyncio.wait({task})
        finally:
            if executor is not None:
                executor.shutdown()
                self._pixels.close()
            for job in [*self._rounds.waiting, *self._rounds.running]:
                if not job.future.done():
                    job.future.set_exception(RuntimeError("the engine closed as a request waited"))
            self._rounds.drop_cancelled()

    # ---------------------------------------------------------------- the event loop's side

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        try:
            await self._run_rounds(executor)
        except BaseException as error:  # nobody may wait for an engine that serves no more
            ended = RuntimeError(f"the engine serves no more: {error!r}")
            self._failure = error if isinstance(error, Exception) else ended
            self._open = False
            rounds = self._rounds
            for job in [*rounds.running, *rounds.waiting]:
                if not job.future.done():
                    job.future.set_exception(self._failure)
            rounds.running = []
            rounds.waiting.clear()
            if not isinstance(error, Exception):
                raise

    async def _run_rounds(self, executor: ThreadPoolExecutor) -> None:
        loop, rounds = asyncio.get_running_loop(), self._rounds
        while self._open:
            if not rounds.waiting and not rounds.running:
                idle_since_s, in_play = time.perf_counter(), rounds.pool.has_owners()
                self._changed.clear()
                await self._changed.wait()
                idle_s = time.perf_counter() - idle_since_s
                self._idle_s["in all"] += idle_s
                self._idle_s["in play"] += idle_s if in_play else 0.0
                continue
            for job, outcome in await loop.run_in_executor(executor, rounds.run):
                if job.future.done():  # its caller was cancelled
                    continue
                if isinstance(outcome, Exception):
                    job.future.set_exception(outcome)
                else:
                    job.future.set_result(outcome)
