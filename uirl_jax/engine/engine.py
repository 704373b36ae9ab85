"""The engine: many episodes' turns sampled together, each joining and leaving on its own.

Stands between the actor's episodes and the jitted `programs`. A request gets a slot of the cache
(`slots`), has its screenshots encoded (`visual_table`) and what is new of its context prefilled, a
chunk at a time, and then takes part in decode steps until it ends. One worker thread does a round
of this after the other (`_round`, read it first), so that the event loop stays free for the
verifiers. It does not tokenise, parse or retry.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from uirl_jax.engine import requests
from uirl_jax.engine.jobs import Job, decode_rows, prefill_arrays
from uirl_jax.engine.programs import CACHE_AXES, TABLE_AXES, Decoded, make_programs
from uirl_jax.engine.requests import EngineConfig, SampleRequest, SampleResult
from uirl_jax.engine.slots import SlotPool, contents
from uirl_jax.engine.visual_table import VisualTable
from uirl_jax.engine.warm_up import call_everything
from uirl_jax.engine.weights import Weights, check_fits, prepare, with_adapters
from uirl_jax.errors import PolicyError
from uirl_jax.models import qwen2_vl, sharding
from uirl_jax.models.kv_cache import KVCache

__all__ = ["Engine", "EngineConfig", "SampleRequest", "SampleResult"]


class _Policy(NamedTuple):
    weights: Weights
    version: int


# What came of a job: told to its future on the event loop's own thread.
_Outcome = tuple[Job, SampleResult | Exception]


class Engine:
    """Samples from one model whose adapters may be replaced at any time.

    An async context manager: entering starts serving, leaving fails what is not done. It may be
    entered again; compiled programs and the cache stay.

    Args:
      graphdef, frozen, lora: `nnx.split` of the model; frozen is shared and never donated.
      policy_version: version of lora.
      end_token_ids: sampling any of them ends a request.
      forbidden_ids: never sampled; they leave the softmax: logprobs are those of what is left.
      decode_text: token ids to text; needed by requests with stop strings.
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
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._cfg, self._model_cfg = cfg, model_cfg
        # Placed once, and what is made here beside it: jit tells an array that was placed from one
        # that merely lies somewhere, and would compile again for it.
        lora = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), lora)
        self._decode_text = decode_text
        self._merge_size = model_cfg.vision.spatial_merge_size
        self._vision_trainable = "visual" in lora
        forbidden_v = np.zeros(model_cfg.vocab_size, bool)
        forbidden_v[list(forbidden_ids)] = True
        self._embedding_dtype = frozen["text"]["embedding"].dtype
        table_shape = (cfg.table_rows(self._merge_size), model_cfg.hidden_size)
        cache = jax.eval_shape(self._init_cache)
        beside = jax.tree.leaves(lora)[0].sharding
        self._mesh = beside.mesh if isinstance(beside, NamedSharding) else None
        by_layer = jax.default_backend() == "cpu" and self._mesh is None
        weights = prepare(frozen, lora, by_layer=by_layer)
        self._policy = self._next_policy = _Policy(weights, policy_version)

        def placement(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Sharding:
            if self._mesh is None:
                return beside
            spec = sharding.partition_spec(axes, shape, dict(self._mesh.shape))
            return NamedSharding(self._mesh, spec)

        self._cache_sharding = placement(CACHE_AXES, cache.k_lcksh.shape)
        self._table_sharding = placement(TABLE_AXES, table_shape)
        self._programs = make_programs(
            graphdef,
            end_token_ids=[int(token_id) for token_id in end_token_ids],
            forbidden_v=forbidden_v,
            decode_steps=cfg.decode_steps,
            cache_sharding=self._cache_sharding,
            table_sharding=self._table_sharding,
        )
        self._reset_buffers()
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: list[Job] = []  # the oldest first
        self._changed = asyncio.Event()  # something arrived, or `close` was called
        self._totals: collections.Counter[str] = collections.Counter()
        self._seconds: collections.Counter[str] = collections.Counter()
        self._executor: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        self._changed = asyncio.Event()  # an engine may be opened again, on another event loop
        # One thread: rounds run one after the other, and XLA already uses every core within one.
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
        """Version that the next token is sampled with."""
        return self._next_policy.version

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Waits for a slot and returns the sampled tokens.

        Cancelling the caller frees the slot before the next round.

        Raises:
          ConfigError: no slot holds the request; it names the limit and the key to change.
          PolicyError: the policy in use gives NaN.
          ValueError: the request contradicts itself.
          RuntimeError: the engine is not open, or closed while the request waited.
          Exception: whatever made a round fail, a lack of memory for one.
        """
        positions_3c = requests.validated_positions(
            request,
            self._cfg,
            image_token_id=self._model_cfg.image_token_id,
            merge_size=self._merge_size,
        )
        if request.stop_strings and self._decode_text is None:
            raise ValueError("a request with stop strings, and the engine has no decode_text")
        if not self._open:
            raise RuntimeError("sample() outside of `async with engine`")
        visual = requests.visual_tokens(request, self._merge_size)
        counts = [visual[key] for key in request.image_keys]
        contents_c = contents(
            request.context_ids, request.image_keys, counts, self._model_cfg.image_token_id
        )
        future = asyncio.get_running_loop().create_future()
        now_s = time.perf_counter()
        self._waiting.append(Job(request, positions_3c, contents_c, visual, future, now_s))
        self._changed.set()
        return await future

    def release(self, episode: str) -> None:
        """The episode has no further turn: others may have its slot."""
        self._pool.release(episode)
        self._changed.set()  # idle time from here on is not this episode's environment's

    def set_policy(self, lora: nnx.State, version: int) -> None:
        """Takes new adapters into use from the next round on, within running requests too.

        Args:
          lora: of the structure, shapes and dtypes of the first; jax or numpy arrays.

        Raises:
          PolicyError: it is not.
        """
        old = self._policy.weights.lora
        check_fits(lora, old, version)
        # Placed as the first adapters are: otherwise everything would be compiled again.
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), lora, old)
        self._next_policy = _Policy(with_adapters(self._policy.weights, placed), version)

    async def warm_up(self) -> None:
        """Compiles everything that any request could need."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._compile_all)

    def metrics(self) -> dict[str, float]:
        """Totals since the start. A slot is in use while a request runs in it; the device is idle
        while none does, and waits for environments where episodes go on all the same."""
        totals, seconds = self._totals, self._seconds
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
            "engine/queue_s": seconds["queue"] / max(1, totals["admitted"]),
            "engine/slot_use": seconds["slots"] / max(1e-9, seconds["round"] * self._cfg.num_slots),
            "engine/busy_s": busy_s,
            "engine/host_s": seconds["round"] - busy_s,
            "engine/idle_s": seconds["idle"],
            "engine/environments_s": seconds["environments"],
            "engine/compile_count": self._programs.compile_count(),
        }

    async def close(self) -> None:
        """Fails what is not done, lets a running round end, stops serving."""
        self._open = False
        self._changed.set()
        if self._task is not None and self._executor is not None:
            await self._task
            self._executor.shutdown()
            self._task = self._executor = None
        for job in [*self._waiting, *self._running]:
            if not job.future.done():
                job.future.set_exception(RuntimeError("the engine closed as a request waited"))
        self._drop_cancelled()

    # ---------------------------------------------------------------- the event loop's side

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while self._open:
            if not self._waiting and not self._running:
                idle_since_s, in_play = time.perf_counter(), self._pool.has_owners()
                self._changed.clear()
                await self._changed.wait()
                idle_s = time.perf_counter() - idle_since_s
                self._seconds["idle"] += idle_s
                self._seconds["environments"] += idle_s if in_play else 0.0
                continue
            for job, outcome in await loop.run_in_executor(executor, self._round):
                if job.future.done():  # its caller was cancelled
                    continue
                if isinstance(outcome, Exception):
                    job.future.set_exception(outcome)
                else:
                    job.future.set_result(outcome)

    # ---------------------------------------------------------------- in the worker thread

    def _round(self) -> list[_Outcome]:
        """Admits what waits, and makes one call of each kind that has something to do."""
        started_s = time.perf_counter()
        try:
            self._drop_cancelled()
            self._take_policy()
            self._admit()
            with self._on_mesh():
                self._encode()
                self._copy_prefixes()
                self._prefill()
                outcomes = self._decode()
        except Exception as error:  # a round fails its own requests; the engine lives on
            self._totals["failed_rounds"] += 1
            outcomes = [(job, error) for job in self._running]
            self._running = []
            self._reset_buffers()  # a failed call may have taken one with it: they are donated
        spent_s = time.perf_counter() - started_s
        self._seconds["round"] += spent_s
        self._seconds["slots"] += spent_s * (len(self._running) + len(outcomes))
        return outcomes

    def _reset_buffers(self) -> None:
        self._pool = SlotPool(self._cfg.num_slots)
        self._cache = jax.jit(self._init_cache, out_shardings=self._cache_sharding)()
        rows = self._cfg.table_rows(self._merge_size)
        self._table = VisualTable(rows)
        empty_md = jnp.zeros((rows, self._model_cfg.hidden_size), self._embedding_dtype)
        self._table_md = jax.device_put(empty_md, self._table_sharding)

    def _init_cache(self) -> KVCache:
        cfg = self._cfg
        return qwen2_vl.init_cache(
            self._model_cfg, cfg.num_slots, cfg.slot_places, jnp.dtype(cfg.cache_dtype)
        )

    def _on_mesh(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.future.done()]:
            self._running.remove(job)
            self._give_images_back(job)
            self._pool.abandon(job.slot)
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()

    def _take_policy(self) -> None:
        """A policy that came since the last round. What older ones computed is computed again."""
        if self._next_policy is self._policy:
            return
        self._policy = self._next_policy
        if self._cfg.keep_stale_cache:
            return
        self._pool.forget()
        for job in self._running:
            self._give_images_back(job)
        if self._vision_trainable:
            self._table.forget()

    def _admit(self) -> None:
        """Gives slots to what waits, the oldest first."""
        now_s = time.perf_counter()
        while self._waiting:
            job = self._waiting[0]
            if job.future.done():
                self._waiting.popleft()
                continue
            # The last token is left to the first decode step, which samples what comes after it.
            job.slot = self._pool.admit(job.request.episode, job.contents_c[:-1])
            if job.slot is None:
                return
            self._running.append(self._waiting.popleft())
            self._totals["admitted"] += 1
            self._totals["context_tokens"] += len(job.contents_c)
            self._totals["cached_tokens"] += max(job.slot.computed, job.slot.shared)
            self._seconds["queue"] += now_s - job.arrived_s

    def _to_prefill(self) -> list[Job]:
        """Those with something to prefill that need not wait for another slot, the oldest first."""
        return [job for job in self._running if job.slot.pending and job.slot.donor is None]

    def _encode(self) -> None:
        """The screenshots that the next prefills read, as many as one call holds."""
        for job in self._to_prefill():
            if job.reading is None:
                needed = job.unread_images(self._model_cfg.image_token_id)
                if self._table.take(needed) is None:
                    break  # until others have read theirs; the oldest comes first
                job.reading = needed
                self._totals["images_cached"] += sum(map(self._table.is_encoded, needed))
        placed: dict[str, requests.PlacedImage] = {}
        for job in self._running:
            reading, request = job.reading or {}, job.request
            for key, patches_pf, grid in zip(
                request.image_keys, request.patches, request.grids, strict=True
            ):
                known = key not in reading or key in placed or self._table.is_encoded(key)
                if not known and not requests.place_image(placed, key, patches_pf, grid, self._cfg):
                    break
        if not placed:
            return
        started_s = time.perf_counter()
        rows = {key: self._table.rows_of(key) for key in placed}
        arrays = requests.image_arrays(
            placed,
            rows,
            self._cfg,
            merge_size=self._merge_size,
            patch_features=self._model_cfg.vision.patch_features,
        )
        self._table_md = self._programs.encode(self._table_md, self._policy.weights, *arrays)
        for key in placed:
            self._table.set_encoded(key)
        self._totals["images_encoded"] += len(placed)
        self._count_seconds("encode", started_s, self._table_md)

    def _give_images_back(self, job: Job) -> None:
        if job.reading is not None:
            self._table.give_back(job.reading)
            job.reading = None

    def _copy_prefixes(self) -> None:
        pairs = self._pool.copies()
        if not pairs:
            return
        source_n, target_n = (np.zeros(self._cfg.num_slots, np.int32) for _ in range(2))
        for n, (source, target) in enumerate(pairs):
            source_n[n], target_n[n] = source.number, target.number
            self._pool.copied(target)
        self._cache = self._programs.copy(self._cache, source_n, target_n, np.int32(len(pairs)))

    def _prefill(self) -> None:
        """One chunk of as many contexts as a call holds."""
        ready = [
            job
            for job in self._to_prefill()
            if job.reading is not None and all(map(self._table.is_encoded, job.reading))
        ][: self._cfg.prefill_rows[-1]]
        if not ready:
            return
        started_s = time.perf_counter()
        arrays, counts = prefill_arrays(
            ready,
            self._cfg,
            image_token_id=self._model_cfg.image_token_id,
            rows_of=self._table.rows_of,
        )
        for job, count in zip(ready, counts, strict=True):
            job.slot.computed += count
            if not job.slot.pending:
                self._give_images_back(job)
        reach = max(job.slot.computed for job in ready)
        self._cache = self._programs.prefill(
            self._cache,
            self._policy.weights,
            self._table_md,
            *arrays,
            places=self._cfg.places(reach),
        )
        self._totals["prefill_tokens"] += sum(counts)
        self._count_seconds("prefill", started_s, self._cache)

    def _decode(self) -> list[_Outcome]:
        """Some tokens for every request whose context is in the cache."""
        cfg = self._cfg
        live = [job for job in self._running if not job.slot.pending][: cfg.batch_sizes[-1]]
        if not live:
            return []
        started_s = time.perf_counter()
        rows, row_of = decode_rows(live, cfg)
        # With contexts to prefill, one token and back to them: neither waits long for the other.
        steps = 1 if any(job.slot.pending for job in self._running) else cfg.decode_steps
        self._cache, decoded = self._programs.decode(
            self._cache,
            self._policy.weights,
            rows,
            np.int32(steps),
            np.bool_(bool(self._waiting)),  # of a deque it would be an array
            places=cfg.places(min(cfg.slot_places, int(rows.length_b.max()) + steps)),
        )
        decoded = jax.device_get(decoded)
        self._count_seconds("decode", started_s, self._cache)
        self._totals["decode_steps"] += int(decoded.count_b.max())
        self._totals["decode_rows"] += len(rows.slot_b) * int(decoded.count_b.max())
        self._totals["tokens_sampled"] += int(decoded.count_b.sum())
        outcomes = [self._advance(job, row, decoded) for job, row in zip(live, row_of, strict=True)]
        return [outcome for outcome in outcomes if outcome is not None]

    def _advance(self, job: Job, row: int, decoded: Decoded) -> _Outcome | None:
        """Adds what a call sampled to a job; what came of it where it has ended."""
        job.add(decoded, row, self._policy.version)
        if not np.isfinite(job.logprobs).all():
            self._leave(job, 0)
            return job, PolicyError(
                f"policy version {self._policy.version} gives logprobs that are not finite: its "
                "weights hold NaN or infinity, or overflow; publish another version"
            )
        if job.request.stop_strings:
            job.cut_at_stop_string(self._decode_text)
        if not job.ended:
            return None
        self._leave(job, len(job.contents_c) + len(job.token_ids) - 1)
        self._totals["requests"] += 1
        return job, job.result()

    def _leave(self, job: Job, computed: int) -> None:
        self._running.remove(job)
        self._pool.finish(job.slot, job.all_contents(), computed)

    def _count_seconds(self, kind: str, started_s: float, buffer: object) -> None:
        jax.block_until_ready(buffer)
        self._seconds[kind] += time.perf_counter() - started_s

    def _compile_all(self) -> None:
        with self._on_mesh():
            self._cache, self._table_md = call_everything(
                self._programs,
                self._cfg,
                self._model_cfg.vision,
                self._policy.weights,
                self._cache,
                self._table_md,
            )
        jax.block_until_ready((self._cache, self._table_md))  # or the first request waits for it
