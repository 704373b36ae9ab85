"""A request on its way through the engine, and the arrays of the calls that several share.

Host side, numpy only: `rounds` decides which requests share a call, `jobs` lays the call out. Rows
of padding name the slot past the last, so that nothing of them is written.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from uirl_jax.engine import requests
from uirl_jax.engine.programs import Decoded, DecodeRows, no_rows
from uirl_jax.engine.requests import EngineConfig, SampleRequest, SampleResult
from uirl_jax.engine.slots import Slot
from uirl_jax.families.border import Inputs


@dataclasses.dataclass(eq=False)
class Job:
    """One request, from its arrival to its answer."""

    request: SampleRequest
    positions_ac: np.ndarray  # int32[A,C]
    next_position: int  # of the first token after the context
    contents_c: np.ndarray  # int64[C], see slots.contents
    visual: dict[str, int]  # visual tokens of its screens, by key
    future: asyncio.Future[SampleResult]
    arrived_s: float  # time.perf_counter
    slot: Slot = dataclasses.field(init=False)  # once admitted
    reading: dict[str, int] | None = None  # screens whose table rows it holds; None: not asked yet
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    full_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stopped: bool = False

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.token_ids) >= self.request.max_new_tokens

    def all_contents(self) -> np.ndarray:
        """int64[C + sampled]."""
        return np.concatenate([self.contents_c, np.array(self.token_ids, np.int64)])

    def all_ids(self) -> np.ndarray:
        """int32[C + sampled]."""
        return np.concatenate([self.request.context_ids, np.array(self.token_ids, np.int32)])

    def all_positions(self) -> np.ndarray:
        """int32[A, C + sampled]: sampled text counts on from next_position."""
        more_t = self.next_position + np.arange(len(self.token_ids), dtype=np.int32)
        more_at = np.tile(more_t, (len(self.positions_ac), 1))
        return np.concatenate([self.positions_ac, more_at], axis=1)

    def unread_images(self, image_token_id: int) -> dict[str, int]:
        """Screens with visual tokens among the positions that are still to be prefilled."""
        is_visual_c = self.request.context_ids == image_token_id
        screens = self.request.screens
        ends = np.cumsum([screen.tokens for screen in screens])
        done = int(is_visual_c[: self.slot.computed].sum())
        return {s.key: s.tokens for s, end in zip(screens, ends, strict=True) if end > done}

    def vision_index(self, image_token_id: int, rows_of: Callable[[str], np.ndarray]) -> np.ndarray:
        """int32[C + sampled]: the table's row at visual tokens, -1 elsewhere.

        Those that were prefilled before have none: their rows may belong to others by now.
        """
        index_c = np.full(len(self.contents_c) + len(self.token_ids), -1, np.int32)
        placeholders = np.flatnonzero(self.request.context_ids == image_token_id)
        for screen in self.request.screens:
            if self.reading is not None and screen.key in self.reading:
                index_c[placeholders[: screen.tokens]] = rows_of(screen.key)
            placeholders = placeholders[screen.tokens :]
        return index_c

    def add(self, decoded: Decoded, row: int, version: int) -> None:
        """What a call sampled for it. The slot holds all of it but the last token."""
        count = int(decoded.count_b[row])
        self.token_ids += decoded.token_ids_bs[row, :count].tolist()
        self.logprobs += decoded.logprobs_bs[row, :count].tolist()
        self.full_logprobs += decoded.full_logprobs_bs[row, :count].tolist()
        self.versions += [version] * count
        self.stopped = bool(decoded.ended_b[row])
        self.slot.computed += count
        self.slot.contents_c = self.all_contents()[:-1]

    def cut_at_stop_string(self, decode_text: Callable[[Sequence[int]], str], seen: int) -> None:
        """Ends it behind the first token that completes a stop string.

        Args:
          seen: number of tokens in which earlier calls have found none.
        """
        for count in range(seen + 1, len(self.token_ids) + 1):
            text = decode_text(self.token_ids[:count])
            if any(stop in text for stop in self.request.stop_strings):
                for values in (self.token_ids, self.logprobs, self.full_logprobs, self.versions):
                    del values[count:]
                self.stopped = True
                return

    def result(self) -> SampleResult:
        return SampleResult(
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            policy_version=min(self.versions),
            stopped=self.stopped,
            full_logprobs=np.array(self.full_logprobs, np.float32),
            policy_versions=np.array(self.versions, np.int32),
        )


class PrefillArrays(NamedTuple):
    """The arguments of `Programs.prefill` after the table, in its order."""

    slot_b: np.ndarray
    start_b: np.ndarray
    token_ids_bt: np.ndarray
    vision_index_bt: np.ndarray
    positions_abt: np.ndarray
    prefix_b: np.ndarray  # int32, length of the context; read with Family.prefix_lm


def no_prefill(rows: int, length: int, slots: int, axes: int) -> PrefillArrays:
    """A prefill call of padding alone."""
    return PrefillArrays(
        np.full(rows, slots, np.int32),
        np.zeros(rows, np.int32),
        np.zeros((rows, length), np.int32),
        np.full((rows, length), -1, np.int32),
        np.zeros((axes, rows, length), np.int32),
        np.zeros(rows, np.int32),
    )


def prefill_arrays(
    jobs: Sequence[Job],
    cfg: EngineConfig,
    *,
    inputs: Inputs,
    rows_of: Callable[[str], np.ndarray],
    prefix_lm: bool,
) -> tuple[PrefillArrays, list[int]]:
    """The next chunk of every job's context, and how many tokens of each that is.

    Padding behind a row's tokens is overwritten before it is read; beyond the slot's end it is
    dropped.

    Args:
      prefix_lm: the context's last token comes with it, although the first decode step reads it
        again: all others see it. It is not counted.
    """
    rows = requests.smallest(cfg.prefill_rows, len(jobs))
    with_last = [int(prefix_lm and not job.token_ids) for job in jobs]
    longest = max(job.slot.pending + last for job, last in zip(jobs, with_last, strict=True))
    length = requests.smallest(cfg.prefill_lengths, longest)
    arrays = no_prefill(rows, length, cfg.num_slots, inputs.position_axes)
    counts = []
    for row, (job, last) in enumerate(zip(jobs, with_last, strict=True)):
        slot = job.slot
        span = slice(slot.computed, min(slot.computed + length, len(slot.contents_c) + last))
        count = span.stop - span.start
        arrays.prefix_b[row] = len(job.contents_c)
        arrays.slot_b[row], arrays.start_b[row] = slot.number, slot.computed
        arrays.token_ids_bt[row, :count] = job.all_ids()[span]
        arrays.vision_index_bt[row, :count] = job.vision_index(inputs.image_token_id, rows_of)[span]
        arrays.positions_abt[:, row, :count] = job.all_positions()[:, span]
        counts.append(count - last)
    return arrays, counts


def decode_rows(jobs: Sequence[Job], cfg: EngineConfig) -> tuple[DecodeRows, list[int]]:
    """A decode call of these jobs, and the row of each: its slot's where all slots are in it."""
    size = requests.smallest(cfg.batch_sizes, len(jobs))
    rows = no_rows(size, cfg.num_slots)
    in_order = size == cfg.num_slots
    row_of = [job.slot.number if in_order else row for row, job in enumerate(jobs)]
    for job, row in zip(jobs, row_of, strict=True):
        request, sampled = job.request, len(job.token_ids)
        rows.slot_b[row] = job.slot.number
        rows.length_b[row] = job.slot.computed
        rows.token_b[row] = job.token_ids[-1] if sampled else request.context_ids[-1]
        rows.position_b[row] = (
            job.next_position + sampled - 1 if sampled else job.positions_ac[0, -1]
        )
        rows.step_b[row] = sampled
        rows.remaining_b[row] = request.max_new_tokens - sampled
        rows.temperature_b[row] = request.temperature
        rows.top_p_b[row], rows.top_k_b[row] = request.top_p, request.top_k
        rows.seeds_b2[row] = requests.seed_words(request.seed)
    return rows, row_of
