"""Every program of the engine called once at every size, with nothing but padding.

All that a run compiles is then compiled before its first request. `rounds` owns the buffers.
"""

from typing import Any

import jax
import numpy as np

from uirl_jax.engine.jobs import no_prefill
from uirl_jax.engine.programs import Programs, no_rows
from uirl_jax.engine.requests import EngineConfig, packed_images
from uirl_jax.engine.weights import Weights
from uirl_jax.families.border import Inputs


def call_everything(
    programs: Programs,
    cfg: EngineConfig,
    inputs: Inputs,
    weights: Weights,
    cache: Any,
    table_md: jax.Array,
) -> tuple[Any, jax.Array]:
    """The buffers, which are donated, hold afterwards what they held before."""
    for rows in cfg.image_rows:
        empty = packed_images((), {}, rows, cfg, inputs)
        table_md = programs.encode(table_md, weights, *empty)
    for span in (length + cfg.max_new_tokens for length in cfg.context_lengths):
        for rows in cfg.prefill_rows:
            for shorter, length in zip(
                (0, *cfg.prefill_lengths), cfg.prefill_lengths, strict=False
            ):
                if cfg.span(min(shorter + 1, cfg.slot_positions)) > span:
                    continue  # where so few positions are read, the shorter length does
                padding = no_prefill(rows, length, cfg.num_slots, inputs.position_axes)
                cache = programs.prefill(cache, weights, table_md, *padding, span=span)
        for size in cfg.batch_sizes:
            rows = no_rows(size, cfg.num_slots)
            cache, _ = programs.decode(
                cache, weights, rows, np.int32(0), np.bool_(False), span=span
            )
    nowhere_n = np.zeros(cfg.num_slots, np.int32)
    return programs.copy(cache, nowhere_n, nowhere_n, np.int32(0)), table_md
