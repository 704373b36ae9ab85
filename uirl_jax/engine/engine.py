"""The engine: requests of many episodes wait in one queue and are sampled together, batch by batch.

It stands between the actor's episodes and the jitted `sampling.generate`: it takes what waits, has
it padded into one of a few fixed shapes (`requests`), runs it in a worker thread, so that the event
loop stays free for the verifiers, and hands every episode its own tokens. It does not tokenise,
parse or retry, and no request enters a batch that is already running.
"""

import asyncio
import collections
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.engine import requests, sampling
from uirl_jax.engine.requests import EngineConfig, PlacedImage, SampleRequest, SampleResult, Shape
from uirl_jax.errors import PolicyError
from uirl_jax.models import qwen2_vl

__all__ = ["Engine", "EngineConfig", "SampleRequest", "SampleResult", "Shape"]


class _Policy(NamedTuple):
    lora: nnx.State
    version: int


class _Waiting(NamedTuple):
    request: SampleRequest
    positions_3c: np.ndarray  # int32[3,C]
    future: asyncio.Future[SampleResult]
    arrived_s: float  # clock of the event loop


def jit_generate(
    graphdef: nnx.GraphDef,
    *,
    model_cfg: qwen2_vl.Qwen2VLConfig,
    end_token_ids: Sequence[int],
    forbidden_ids: Sequence[int],
    cfg: EngineConfig,
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The engine's one jitted function, (frozen, lora, *BatchArrays) as in sampling.generate."""
    forbidden_v = np.zeros(model_cfg.vocab_size, bool)
    forbidden_v[list(forbidden_ids)] = True
    return jax.jit(
        functools.partial(
            sampling.generate,
            graphdef,
            model_cfg=model_cfg,
            end_token_ids=tuple(int(token_id) for token_id in end_token_ids),
            forbidden_v=forbidden_v,
            max_new_tokens=cfg.max_new_tokens,
            cache_dtype=jnp.dtype(cfg.cache_dtype),
        )
    )


class Engine:
    """Samples from one model whose adapters are replaced between batches.

    An async context manager: entering starts the batching task, leaving fails what still waits and
    lets a running batch end. It may be entered again; compiled programs stay.

    Args:
      graphdef, frozen, lora: `nnx.split` of the model; frozen is shared and never donated.
      policy_version: version of lora.
      end_token_ids: sampling any of them ends a request.
      forbidden_ids: never sampled; they leave the softmax: logprobs are those of what is left.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        frozen: nnx.State,
        lora: nnx.State,
        policy_version: int,
        *,
        model_cfg: qwen2_vl.Qwen2VLConfig,
        end_token_ids: Sequence[int],
        forbidden_ids: Sequence[int],
        cfg: EngineConfig,
    ) -> None:
        self._cfg = cfg
        self._frozen = frozen
        self._policy = _Policy(lora, policy_version)
        self._end_token_ids = tuple(int(token_id) for token_id in end_token_ids)
        self._image_layout = {
            "image_token_id": model_cfg.image_token_id,
            "merge_size": model_cfg.vision.spatial_merge_size,
        }
        self._patch_features = model_cfg.vision.patch_features
        self._generate = jit_generate(
            graphdef,
            model_cfg=model_cfg,
            end_token_ids=self._end_token_ids,
            forbidden_ids=forbidden_ids,
            cfg=cfg,
        )
        self._programs: dict[Shape, jax.stages.Compiled] = {}
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._changed = asyncio.Event()  # something arrived, or `expect` or `close` was called
        self._expected = cfg.batch_sizes[-1]
        self._totals: collections.Counter[str] = collections.Counter()
        self._busy_s = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        self._changed = asyncio.Event()  # an engine may be opened again, on another event loop
        # One thread: batches run one after the other, and XLA already uses every core within one.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._open = True
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
    def context_limit(self) -> int:
        """Tokens of the longest context that a request may have."""
        return self._cfg.context_lengths[-1]

    @property
    def policy_version(self) -> int:
        """Version that the next batch is sampled with."""
        return self._policy.version

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Waits for a place in a batch and returns the sampled tokens.

        Cancelling the caller takes the request out of the queue; one that is already in a running
        batch is sampled to its end and dropped.

        Raises:
          ConfigError: no shape holds the request; it names the limit and the key to change.
          PolicyError: the policy in use gives NaN.
          ValueError: the request contradicts itself.
          RuntimeError: the engine is not open, or closed while the request waited.
          Exception: whatever made the request's batch fail, a lack of memory for one.
        """
        positions_3c = requests.validated_positions(request, self._cfg, **self._image_layout)
        if not self._open:
            raise RuntimeError("sample() outside of `async with engine`")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, positions_3c, loop.create_future(), loop.time())
        self._waiting.append(waiting)
        self._changed.set()
        return await waiting.future

    def set_policy(self, lora: nnx.State, version: int) -> None:
        """Takes new adapters into use from the next batch on; a running batch keeps the old ones.

        Args:
          lora: of the structure, shapes and dtypes of the first; jax or numpy arrays.

        Raises:
          PolicyError: it is not.
        """
        old = self._policy.lora
        if jax.tree.structure(lora) != jax.tree.structure(old):
            raise PolicyError(f"policy version {version}: not the adapters of this model")
        for (path, new_leaf), old_leaf in zip(
            jax.tree.leaves_with_path(lora), jax.tree.leaves(old), strict=True
        ):
            if (new_leaf.shape, new_leaf.dtype) != (old_leaf.shape, old_leaf.dtype):
                raise PolicyError(
                    f"policy version {version}: {jax.tree_util.keystr(path)} is "
                    f"{new_leaf.dtype}{list(new_leaf.shape)}, expected "
                    f"{old_leaf.dtype}{list(old_leaf.shape)}"
                )
        # The compiled programs insist on the placement of the first adapters.
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), lora, old)
        self._policy = _Policy(placed, version)

    def expect(self, concurrent: int) -> None:
        """Says how many episodes are under way: when all of them wait, a batch starts at once."""
        self._expected = max(1, concurrent)
        self._changed.set()

    async def warm_up(self, shapes: Iterable[Shape]) -> None:
        """Compiles shapes (of the configured sizes) before their first batch."""
        loop = asyncio.get_running_loop()
        for shape in shapes:
            arrays = requests.empty_arrays(shape, self._cfg, self._patch_features)
            lora = self._policy.lora
            await loop.run_in_executor(self._executor, self._program, shape, lora, arrays)

    def metrics(self) -> dict[str, float]:
        """Totals since the start; batch_fill is the share of the rows that were requests."""
        totals = self._totals
        return {
            "engine/requests": totals["requests"],
            "engine/tokens_sampled": totals["tokens_sampled"],
            "engine/prefill_tokens": totals["prefill_tokens"],
            "engine/images_encoded": totals["images_encoded"],
            "engine/batches": totals["batches"],
            "engine/failed_batches": totals["failed_batches"],
            "engine/batch_fill": totals["requests"] / max(1, totals["rows"]),
            "engine/busy_s": self._busy_s,
            "engine/compile_count": len(self._programs),
        }

    async def close(self) -> None:
        """Fails what waits, lets a running batch end, stops the batching task."""
        self._open = False
        for waiting in self._waiting:
            if not waiting.future.done():
                waiting.future.set_exception(RuntimeError("the engine closed as a request waited"))
        self._waiting.clear()
        self._changed.set()
        if self._task is not None and self._executor is not None:
            await self._task
            self._executor.shutdown()
            self._task = self._executor = None

    # ---------------------------------------------------------------- the batching task

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while await self._enough_wait():
            members, placed = self._take()
            try:
                results = await loop.run_in_executor(
                    executor, self._run, members, placed, self._policy
                )
            except Exception as error:  # a batch fails its own requests; the engine lives on
                self._totals["failed_batches"] += 1
                for member in members:
                    if not member.future.done():
                        member.future.set_exception(error)
                continue
            for member, result in zip(members, results, strict=True):
                if not member.future.done():  # else its caller was cancelled
                    member.future.set_result(result)

    async def _enough_wait(self) -> bool:
        """Waits until a batch is worth starting; False once the engine is closed."""
        loop = asyncio.get_running_loop()
        while self._open:
            live = [waiting for waiting in self._waiting if not waiting.future.done()]
            self._waiting = collections.deque(live)  # a cancelled caller leaves a done future
            timeout_s = None
            if live:
                timeout_s = live[0].arrived_s + self._cfg.wait_s - loop.time()
                if timeout_s <= 0 or len(live) >= min(self._expected, self._cfg.batch_sizes[-1]):
                    return True
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # the oldest has waited long enough
        return False

    def _take(self) -> tuple[list[_Waiting], dict[str, PlacedImage]]:
        """Takes requests in the order of their arrival until the rows or the images are full."""
        members: list[_Waiting] = []
        placed: dict[str, PlacedImage] = {}
        while self._waiting and len(members) < self._cfg.batch_sizes[-1]:
            joined = requests.place_images(self._waiting[0].request, placed, self._cfg)
            if joined is None:
                break  # it fits alone, as checked at its arrival: the next batch begins with it
            placed = joined
            members.append(self._waiting.popleft())
        return members, placed

    # ---------------------------------------------------------------- in the worker thread

    def _run(
        self, members: list[_Waiting], placed: dict[str, PlacedImage], policy: _Policy
    ) -> list[SampleResult]:
        started_s = time.perf_counter()
        batch = [member.request for member in members]
        shape = requests.shape_of(batch, placed, self._cfg)
        arrays = requests.fill_arrays(
            batch,
            [member.positions_3c for member in members],
            placed,
            shape,
            self._cfg,
            patch_features=self._patch_features,
            **self._image_layout,
        )
        program = self._program(shape, policy.lora, arrays)
        outputs = program(self._frozen, policy.lora, *arrays)
        token_ids_bs, logprobs_bs, counts_b = jax.device_get(outputs)
        if not np.isfinite(logprobs_bs[: len(batch)]).all():
            raise PolicyError(
                f"policy version {policy.version} gives logprobs that are not finite: its weights "
                "hold NaN or infinity, or overflow; publish another version"
            )
        results = []
        for row, count in enumerate(counts_b[: len(batch)].tolist()):
            token_ids_s, logprobs_s = token_ids_bs[row, :count], logprobs_bs[row, :count]
            stopped = int(token_ids_s[-1]) in self._end_token_ids
            results.append(SampleResult(token_ids_s, logprobs_s, policy.version, stopped))
        self._busy_s += time.perf_counter() - started_s
        self._totals.update(
            batches=1,
            requests=len(batch),
            rows=shape.rows,
            tokens_sampled=int(counts_b.sum()),
            prefill_tokens=sum(len(request.context_ids) for request in batch),
            images_encoded=len(placed),
        )
        return results

    def _program(
        self, shape: Shape, lora: nnx.State, arrays: requests.BatchArrays
    ) -> jax.stages.Compiled:
        """The program of a shape. Compiled ahead of the call, so that nothing can be compiled again
        unnoticed: arrays of another shape, dtype or placement are an error."""
        if shape not in self._programs:
            self._programs[shape] = self._generate.lower(self._frozen, lora, *arrays).compile()
        return self._programs[shape]
