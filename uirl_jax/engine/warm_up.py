"""Every program of the engine called once at every size, with nothing but padding.

What a run compiles is then compiled before its first request. Beside `rounds`, which owns
the buffers.
"""

import jax
import numpy as np

from uirl_jax.engine.programs import Programs, no_rows
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.engine.weights import Weights
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.qwen2_vl_config import VisionConfig


def call_everything(
    programs: Programs,
    cfg: EngineConfig,
    vision: VisionConfig,
    weights: Weights,
    cache: KVCache,
    table_md: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """The buffers, which are donated, hold afterwards what they held before."""
    merge_area = vision.spatial_merge_size**2
    for rows in cfg.image_rows:
        shape = (rows, cfg.image_row_patches)
        nowhere_m = np.full(rows * cfg.image_row_patches // merge_area, len(table_md), np.int32)
        table_md = programs.encode(
            table_md,
            weights,
            np.zeros((*shape, vision.patch_levels), np.uint8),
            np.zeros((*shape, 2), np.int32),
            np.zeros(shape, np.int32),
            nowhere_m,
        )
    for places in (length + cfg.max_new_tokens for length in cfg.context_lengths):
        for rows in cfg.prefill_rows:
            for shorter, length in zip(
                (0, *cfg.prefill_lengths), cfg.prefill_lengths, strict=False
            ):
                if cfg.places(min(shorter + 1, cfg.slot_places)) > places:
                    continue  # where so few places are looked at, the shorter one does
                cache = programs.prefill(
                    cache,
                    weights,
                    table_md,
                    np.full(rows, cfg.num_slots, np.int32),
                    np.zeros(rows, np.int32),
                    np.zeros((rows, length), np.int32),
                    np.full((rows, length), -1, np.int32),
                    np.zeros((3, rows, length), np.int32),
                    places=places,
                )
        for size in cfg.batch_sizes:
            rows = no_rows(size, cfg.num_slots)
            cache, _ = programs.decode(
                cache, weights, rows, np.int32(0), np.bool_(False), places=places
            )
    nobody_n = np.zeros(cfg.num_slots, np.int32)
    return programs.copy(cache, nobody_n, nobody_n, np.int32(0)), table_md
