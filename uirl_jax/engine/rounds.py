"""What the engine's one worker thread does: rounds of admitting, encoding, prefilling and decoding.

Behind `engine.Engine`, which talks to the callers. A waiting request gets a slot of the cache
(`slots`), has its screenshots encoded (`visual_table`) and what is new of its context prefilled, a
chunk at a time, and then takes part in decode steps until it ends; `Rounds.run` is one round of
this, read it first. The jitted `programs` do the work on the device, `jobs` lays out their arrays.
"""

import collections
import contextlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from uirl_jax.engine import requests
from uirl_jax.engine.jobs import Job, decode_rows, prefill_arrays
from uirl_jax.engine.pixels import PixelReader
from uirl_jax.engine.programs import CACHE_AXES, TABLE_AXES, Decoded, make_programs
from uirl_jax.engine.requests import EngineConfig, SampleResult
from uirl_jax.engine.slots import SlotPool
from uirl_jax.engine.visual_table import VisualTable
from uirl_jax.engine.warm_up import call_everything
from uirl_jax.engine.weights import (
    Weights,
    check_fits,
    compiler_options,
    merge,
    prepare,
    with_adapters,
)
from uirl_jax.errors import PolicyError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel
from uirl_jax.models import sharding


class Policy(NamedTuple):
    weights: Weights
    version: int


# What came of a job, for its future on the event loop's own thread.
Outcome = tuple[Job, SampleResult | Exception]


class Rounds:
    """The buffers on the device, and who has which part of them.

    The worker thread's own, but for what the event loop may do at any time: append to `waiting`,
    `set_policy`, release an episode in `pool`, ask `has_tokens_of`, and read the counters.

    Args:
      pixels: open while rounds run; the other arguments as in `engine.Engine`.
    """

    def __init__(
        self,
        model: PolicyModel,
        vocabulary: Vocabulary,
        cfg: EngineConfig,
        *,
        policy_version: int,
        pixels: PixelReader,
    ) -> None:
        self._model, self._vocabulary, self._cfg, self._pixels = model, vocabulary, cfg, pixels
        self._inputs = model.inputs
        # Placed once, and what is made here beside it: jit tells an array that was placed from one
        # that merely lies somewhere, and would compile again for it.
        trainable = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), model.trainable)
        self._vision_trainable = model.trains_vision
        beside = jax.tree.leaves(trainable)[0].sharding
        self._mesh: Any = beside.mesh if isinstance(beside, NamedSharding) else None
        by_layer = jax.default_backend() == "cpu" and self._mesh is None
        weights = prepare(model, trainable, by_layer=by_layer)
        self.policy = self.next_policy = Policy(weights, policy_version)

        def placement(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Sharding:
            if self._mesh is None:
                return beside
            spec = sharding.partition_spec(axes, shape, dict(self._mesh.shape))
            return NamedSharding(self._mesh, spec)

        self._table_shape = jax.eval_shape(self._init_table, weights)
        self._cache_sharding = jax.tree.map(
            lambda leaf: placement(CACHE_AXES, leaf.shape), jax.eval_shape(self._init_cache)
        )
        self._table_sharding = placement(TABLE_AXES, self._table_shape.shape)
        self._programs = make_programs(
            model,
            vocabulary,
            cfg,
            cache_sharding=self._cache_sharding,
            table_sharding=self._table_sharding,
            compiler_options=compiler_options(model, by_layer=by_layer),
        )
        self._prefix_lm = model.family.prefix_lm
        self._cache: Any  # None: to be made by the next round, as `_table_md`
        self._table_md: Any
        self._drop_buffers()
        self._make_buffers()
        self.waiting: collections.deque[Job] = collections.deque()
        self.running: list[Job] = []  # the oldest first
        self.totals: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def compile_count(self) -> int:
        return self._programs.compile_count()

    def has_tokens_of(self, key: str) -> bool:
        """The screenshot need not be read; not for sure: its rows may soon be others'."""
        return self._table.holds(key)

    def set_policy(self, trainable: nnx.State, version: int) -> None:
        """As `Engine.set_policy`."""
        old = self.policy.weights.trainable
        check_fits(trainable, old, version)
        # Placed as the first adapters are: otherwise everything would be compiled again.
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), trainable, old)
        self.next_policy = Policy(with_adapters(self._model, self.policy.weights, placed), version)

    def run(self) -> list[Outcome]:
        """Admits what waits, and makes one call of each kind that has something to do.

        Raises: Exception: the buffers cannot be made again after a failed call. No further round
          can run; the jobs are still in `running` and `waiting`.
        """
        started_s = time.perf_counter()
        self._make_buffers()
        outcomes: list[Outcome] = []
        try:
            self.drop_cancelled()
            self._take_policy()
            self._admit()
            with self._on_mesh():
                self._encode()
                self._copy_prefixes()
                self._prefill()
                self._decode(outcomes)
        except Exception as error:  # a round fails its own requests; the engine lives on
            self.totals["failed_rounds"] += 1
            outcomes += [(job, error) for job in self.running]
            self.running = []
            self._drop_buffers()  # a failed call may have taken one with it: they are donated
        spent_s = time.perf_counter() - started_s
        self.seconds["round"] += spent_s
        self.seconds["slots"] += spent_s * (len(self.running) + len(outcomes))
        return outcomes

    def _drop_buffers(self) -> None:
        """They go before the next round makes others: the device may have no room for both."""
        self._cache = self._table_md = None
        can = self._model.family.capabilities
        self.pool = SlotPool(
            self._cfg.num_slots, reuse=can.reuse_across_turns, share=can.share_in_group
        )
        self._table = VisualTable(len(self._table_shape))

    def _make_buffers(self) -> None:
        """Those that are missing."""
        if self._cache is None:
            self._cache = jax.jit(self._init_cache, out_shardings=self._cache_sharding)()
        if self._table_md is None:
            empty_md = jnp.zeros(self._table_shape.shape, self._table_shape.dtype)
            self._table_md = jax.device_put(empty_md, self._table_sharding)

    def _init_cache(self) -> Any:
        cfg = self._cfg
        return self._model.family.init_cache(
            self._model.cfg, cfg.num_slots, cfg.slot_positions, jnp.dtype(cfg.cache_dtype)
        )

    def _init_table(self, weights: Weights) -> jax.Array:
        """Zeros of the width and dtype in which the family encodes images."""
        module, _ = merge(self._model, weights)
        empty = requests.packed_images((), {}, 1, self._cfg, self._inputs)
        visual_md = module.encode_images(empty.vision)
        rows = self._cfg.table_rows(self._inputs)
        return jnp.zeros((rows, visual_md.shape[-1]), visual_md.dtype)

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def drop_cancelled(self) -> None:
        for job in [job for job in self.running if job.future.done()]:
            self.running.remove(job)
            self._give_images_back(job)
            self.pool.abandon(job.slot)
        while self.waiting and self.waiting[0].future.done():
            self.waiting.popleft()

    def _take_policy(self) -> None:
        """A policy that came since the last round. What older ones computed is computed again."""
        if self.next_policy is self.policy:
            return
        self.policy = self.next_policy
        if not self._cfg.keep_stale_cache:
            self._forget_computed()

    def _forget_computed(self) -> None:
        """What runs is prefilled again."""
        self.pool.forget()
        for job in self.running:
            self._give_images_back(job)
        if self._vision_trainable:
            self._table.forget()

    def _admit(self) -> None:
        """Gives slots to what waits, the oldest first."""
        now_s = time.perf_counter()
        while self.waiting:
            job = self.waiting[0]
            if job.future.done():
                self.waiting.popleft()
                continue
            # The last token is left to the first decode step, which samples what comes after it.
            slot = self.pool.admit(job.request.episode, job.contents_c[:-1], job.contents_c)
            if slot is None:
                return
            job.slot = slot
            self.running.append(self.waiting.popleft())
            self.totals["admitted"] += 1
            self.totals["context_tokens"] += len(job.contents_c)
            self.totals["cached_tokens"] += max(job.slot.computed, job.slot.shared)
            self.seconds["queue"] += now_s - job.arrived_s

    def _to_prefill(self) -> list[Job]:
        """Those with something to prefill that need not wait for another slot, the oldest first."""
        return [job for job in self.running if job.slot.pending and job.slot.donor is None]

    def _encode(self) -> None:
        """The screenshots that the next prefills read, as many as one call holds."""
        for job in self._to_prefill():
            if job.reading is None:
                needed = job.unread_images(self._inputs.image_token_id)
                if self._table.take(needed) is None:
                    break  # until others have read theirs; the oldest comes first
                job.reading = needed
                self.totals["images_cached"] += sum(map(self._table.is_encoded, needed))
        placed: list[PlacedScreen] = []
        keys: set[str] = set()
        for job in self.running:
            for screen in job.request.screens:
                key = screen.key
                known = key not in (job.reading or {}) or key in keys or self._table.is_encoded(key)
                if known:
                    continue
                if not requests.place_screen(placed, screen, self._cfg, self._inputs):
                    break
                keys.add(key)
        if not placed:
            return
        # The newest of a request was read at its arrival; older ones whose tokens were dropped are
        # read here.
        read = self._pixels.read_all(place.screen for place in placed)
        placed = [place._replace(screen=screen) for place, screen in zip(placed, read, strict=True)]
        started_s = time.perf_counter()
        rows = {key: self._table.rows_of(key) for key in keys}
        arrays = requests.image_arrays(placed, rows, self._cfg, self._inputs)
        self._table_md = self._programs.encode(self._table_md, self.policy.weights, *arrays)
        for key in keys:
            self._table.set_encoded(key)
        self.totals["images_encoded"] += len(placed)
        self._count_seconds("encode", started_s, self._table_md)

    def _give_images_back(self, job: Job) -> None:
        if job.reading is not None:
            self._table.give_back(job.reading)
            job.reading = None

    def _copy_prefixes(self) -> None:
        pairs = self.pool.copies()
        if not pairs:
            return
        source_n, target_n = (np.zeros(self._cfg.num_slots, np.int32) for _ in range(2))
        for n, (source, target) in enumerate(pairs):
            source_n[n], target_n[n] = source.number, target.number
            self.pool.copied(target)
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
            inputs=self._inputs,
            rows_of=self._table.rows_of,
            prefix_lm=self._prefix_lm,
        )
        for job, count in zip(ready, counts, strict=True):
            job.slot.computed += count
            if not job.slot.pending:
                self._give_images_back(job)
        # A context's last token, which is not counted, lies behind what is.
        reach = max(job.slot.computed for job in ready) + self._prefix_lm
        self._cache = self._programs.prefill(
            self._cache,
            self.policy.weights,
            self._table_md,
            *arrays,
            span=self._cfg.span(reach),
        )
        self.totals["prefill_tokens"] += sum(counts)
        self._count_seconds("prefill", started_s, self._cache)

    def _decode(self, outcomes: list[Outcome]) -> None:
        """Some tokens for every request whose context is in the cache.

        Args:
          outcomes: gets those that end, each as it ends: what fails after it cannot take it back.
        """
        cfg = self._cfg
        live = [job for job in self.running if not job.slot.pending][: cfg.batch_sizes[-1]]
        if not live:
            return
        started_s = time.perf_counter()
        rows, row_of = decode_rows(live, cfg)
        # With contexts to prefill, one token and back to them: neither waits long for the other.
        steps = 1 if any(job.slot.pending for job in self.running) else cfg.decode_steps
        self._cache, decoded = self._programs.decode(
            self._cache,
            self.policy.weights,
            rows,
            np.int32(steps),
            np.bool_(bool(self.waiting)),  # of a deque it would be an array
            span=cfg.span(min(cfg.slot_positions, int(rows.length_b.max()) + steps)),
        )
        decoded = jax.device_get(decoded)
        self._count_seconds("decode", started_s, self._cache)
        self.totals["decode_steps"] += int(decoded.count_b.max())
        self.totals["decode_rows"] += len(rows.slot_b) * int(decoded.count_b.max())
        self.totals["tokens_sampled"] += int(decoded.count_b.sum())
        for job, row in zip(live, row_of, strict=True):
            outcome = self._advance(job, row, decoded)
            if outcome is not None:
                outcomes.append(outcome)
        if any(isinstance(outcome, PolicyError) for _, outcome in outcomes):
            # NaN stays behind a shorter context that gets the slot, where a weight of 0 does not
            # hide it: 0 * NaN is NaN.
            self._cache = None
            self._forget_computed()

    def _advance(self, job: Job, row: int, decoded: Decoded) -> Outcome | None:
        """Adds what a call sampled to a job; what came of it where it has ended."""
        seen = len(job.token_ids)
        job.add(decoded, row, self.policy.version)
        if not np.isfinite(job.logprobs).all():
            self._leave(job, 0)
            return job, PolicyError(
                f"policy version {self.policy.version} gives logprobs that are not finite: its "
                "weights hold NaN or infinity, or overflow; publish another version"
            )
        if job.request.stop_strings and self._vocabulary.decode is not None:
            job.cut_at_stop_string(self._vocabulary.decode, seen)
        if not job.ended:
            return None
        self._leave(job, len(job.contents_c) + len(job.token_ids) - 1)
        self.totals["requests"] += 1
        return job, job.result()

    def _leave(self, job: Job, computed: int) -> None:
        self.running.remove(job)
        self.pool.finish(job.slot, job.all_contents(), computed)

    def _count_seconds(self, kind: str, started_s: float, buffer: object) -> None:
        jax.block_until_ready(buffer)
        self.seconds[kind] += time.perf_counter() - started_s

    def compile_all(self) -> None:
        """Everything that any request could need."""
        self._make_buffers()
        with self._on_mesh():
            self._cache, self._table_md = call_everything(
                self._programs,
                self._cfg,
                self._inputs,
                self.policy.weights,
                self._cache,
                self._table_md,
            )
        jax.block_until_ready((self._cache, self._table_md))  # or the first request waits for it
