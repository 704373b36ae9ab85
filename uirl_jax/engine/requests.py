"""What the engine is asked, and how a batch of it is padded into one fixed shape. numpy only.

Everything that a single request can get wrong is refused here, at its arrival, so that it cannot
fail the others of its batch. Nothing here knows the queue or the model's weights.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from uirl_jax import vision_inputs
from uirl_jax.errors import ConfigError, ImageError

MIN_TEMPERATURE = 1e-3  # below it logits / temperature overflows float32; 0 itself means greedy


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The fixed shapes, and how long a batch is waited for.

    A batch takes the smallest size of each kind that holds it, and every combination that occurs is
    compiled once, at its first use: short tuples keep that number small.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32)  # rows
    context_lengths: tuple[int, ...] = (128, 256)  # tokens of a context, visual ones included
    image_rows: tuple[int, ...] = (1, 8, 32)  # rows of the vision tower; 0 without images
    image_row_patches: int = 256  # patches of such a row; screenshots that fit together share it
    max_new_tokens: int = 32
    wait_s: float = 0.05  # longest that a request waits for others; see also Engine.expect
    cache_dtype: str = "float32"

    def __post_init__(self) -> None:
        faults = [
            f"{key}={sizes} must be positive and rising"
            for key, sizes in (
                ("batch_sizes", self.batch_sizes),
                ("context_lengths", self.context_lengths),
                ("image_rows", self.image_rows),
            )
            if not sizes or sizes[0] < 1 or sorted(set(sizes)) != list(sizes)
        ]
        faults += [
            f"{key}={value} must be at least 1"
            for key, value in (
                ("image_row_patches", self.image_row_patches),
                ("max_new_tokens", self.max_new_tokens),
            )
            if value < 1
        ]
        if faults:
            raise ConfigError("engine: " + "; ".join(faults))


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One turn to sample. Screenshots come in the order of their placeholders in context_ids."""

    context_ids: np.ndarray  # int32[C]
    patches: tuple[np.ndarray, ...]  # float32[P,F] each, of vision_inputs.process_image
    grids: tuple[tuple[int, int, int], ...]  # (t, h, w) each
    image_keys: tuple[str, ...]  # screenshots with equal keys are encoded once a batch
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int  # decides the tokens, together with weights and context: whoever shares the batch


@dataclasses.dataclass(frozen=True)
class SampleResult:
    """The tokens of one request; see `sampling.sampling_logprobs` for what the logprobs are of."""

    token_ids: np.ndarray  # int32[S], S >= 1, the end token included
    logprobs: np.ndarray  # float32[S]
    policy_version: int
    stopped: bool  # the last token is an end token; else max_new_tokens cut it


class Shape(NamedTuple):
    """One compiled shape."""

    rows: int
    context_length: int
    image_rows: int


@dataclasses.dataclass(frozen=True)
class PlacedImage:
    """Where one distinct screenshot lies in the vision tower's rows."""

    row: int
    start: int  # first patch within the row
    segment: int  # from 1, distinct within the row
    patches_pf: np.ndarray
    grid_thw: tuple[int, int, int]


class BatchArrays(NamedTuple):
    """The arguments of `sampling.generate` after the weights, in its order and documented there."""

    patches_ipf: np.ndarray
    patch_positions_ip2: np.ndarray
    patch_segments_ip: np.ndarray
    token_ids_bt: np.ndarray
    vision_index_bt: np.ndarray
    positions_3bt: np.ndarray
    lengths_b: np.ndarray
    max_new_b: np.ndarray
    temperature_b: np.ndarray
    seeds_b2: np.ndarray


def validated_positions(
    request: SampleRequest, cfg: EngineConfig, *, image_token_id: int, merge_size: int
) -> np.ndarray:
    """Refuses a request that no batch could hold.

    Returns:
      int32[3,C], M-RoPE positions of its context; computing them is half of the checks.

    Raises:
      ConfigError: beyond a limit; the message names it and the key to change.
      ValueError: the request contradicts itself (a defect of the caller, no user's mistake).
    """
    length = len(request.context_ids)
    if length > cfg.context_lengths[-1]:
        raise ConfigError(
            f"a context of {length} tokens is longer than the engine's largest, "
            f"{cfg.context_lengths[-1]}: raise engine.context_lengths or keep fewer screenshots"
        )
    if not 1 <= request.max_new_tokens <= cfg.max_new_tokens:
        raise ConfigError(
            f"a request for {request.max_new_tokens} new tokens is outside 1 to "
            f"{cfg.max_new_tokens}: raise engine.max_new_tokens"
        )
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        raise ConfigError(
            f"temperature {request.temperature} is neither 0 (greedy) nor a number of at least "
            f"{MIN_TEMPERATURE}"
        )
    largest = max((len(patches_pf) for patches_pf in request.patches), default=0)
    if largest > cfg.image_row_patches:
        raise ConfigError(
            f"a screenshot of {largest} patches is larger than a row of the vision tower, "
            f"{cfg.image_row_patches}: raise engine.image_row_patches or lower max_pixels"
        )
    if place_images(request, {}, cfg) is None:
        raise ConfigError(
            f"the {len(request.patches)} screenshots of one context need more rows of the vision "
            f"tower than {cfg.image_rows[-1]}: raise engine.image_rows or keep fewer screenshots"
        )
    if not length or not len(request.patches) == len(request.grids) == len(request.image_keys):
        raise ValueError(
            f"a request with {length} tokens, {len(request.patches)} images, "
            f"{len(request.grids)} grids, {len(request.image_keys)} image keys"
        )
    for patches_pf, grid_thw in zip(request.patches, request.grids, strict=True):
        if len(patches_pf) != math.prod(grid_thw):
            raise ValueError(f"{len(patches_pf)} patches for an image of grid {grid_thw}")
    try:
        return vision_inputs.rope_positions(
            request.context_ids, request.grids, image_token_id, merge_size
        )
    except ImageError as error:  # the caller's arithmetic, not a screenshot, is at fault
        raise ValueError(f"context_ids and grids of a request disagree: {error}") from error


def place_images(
    request: SampleRequest, placed: dict[str, PlacedImage], cfg: EngineConfig
) -> dict[str, PlacedImage] | None:
    """Adds a request's new screenshots behind those already placed, in the last row while it fits.

    Returns:
      placed with the new ones, or None where the rows do not suffice.
    """
    joined = dict(placed)
    for key, patches_pf, grid_thw in zip(
        request.image_keys, request.patches, request.grids, strict=True
    ):
        if key in joined:
            continue
        row, start, segment = 0, 0, 1
        if joined:
            last = next(reversed(joined.values()))
            row, start, segment = last.row, last.start + len(last.patches_pf), last.segment + 1
            if start + len(patches_pf) > cfg.image_row_patches:
                row, start, segment = row + 1, 0, 1
        if row >= cfg.image_rows[-1]:
            return None
        joined[key] = PlacedImage(row, start, segment, patches_pf, grid_thw)
    return joined


def shape_of(
    requests: Sequence[SampleRequest], placed: dict[str, PlacedImage], cfg: EngineConfig
) -> Shape:
    """The smallest shape that holds the batch."""
    images = 1 + max((image.row for image in placed.values()), default=-1)
    return Shape(
        _smallest(cfg.batch_sizes, len(requests)),
        _smallest(cfg.context_lengths, max(len(r.context_ids) for r in requests)),
        _smallest(cfg.image_rows, images) if images else 0,
    )


def _smallest(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


def empty_arrays(shape: Shape, cfg: EngineConfig, patch_features: int) -> BatchArrays:
    """A batch of padding rows alone: they ask for no token and end before the first."""
    rows, tokens, patches = shape.rows, shape.context_length, cfg.image_row_patches
    return BatchArrays(
        patches_ipf=np.zeros((shape.image_rows, patches, patch_features), np.float32),
        patch_positions_ip2=np.zeros((shape.image_rows, patches, 2), np.int32),
        patch_segments_ip=np.zeros((shape.image_rows, patches), np.int32),
        token_ids_bt=np.zeros((rows, tokens), np.int32),
        vision_index_bt=np.full((rows, tokens), -1, np.int32),
        positions_3bt=np.zeros((3, rows, tokens), np.int32),
        lengths_b=np.ones(rows, np.int32),
        max_new_b=np.zeros(rows, np.int32),
        temperature_b=np.zeros(rows, np.float32),
        seeds_b2=np.zeros((rows, 2), np.uint32),
    )


def fill_arrays(
    requests: Sequence[SampleRequest],
    positions: Sequence[np.ndarray],
    placed: dict[str, PlacedImage],
    shape: Shape,
    cfg: EngineConfig,
    *,
    image_token_id: int,
    merge_size: int,
    patch_features: int,
) -> BatchArrays:
    """Pads a batch into its shape; request i is row i, positions[i] its `validated_positions`."""
    arrays = empty_arrays(shape, cfg, patch_features)
    for image in placed.values():
        span = slice(image.start, image.start + len(image.patches_pf))
        arrays.patches_ipf[image.row, span] = image.patches_pf
        arrays.patch_positions_ip2[image.row, span] = vision_inputs.patch_positions(
            image.grid_thw, merge_size
        )
        arrays.patch_segments_ip[image.row, span] = image.segment
    for row, request in enumerate(requests):
        length = len(request.context_ids)
        arrays.token_ids_bt[row, :length] = request.context_ids
        arrays.positions_3bt[:, row, :length] = positions[row]
        arrays.lengths_b[row] = length
        arrays.max_new_b[row] = request.max_new_tokens
        arrays.temperature_b[row] = request.temperature
        arrays.seeds_b2[row] = seed_words(request.seed)
        if request.grids:
            slots = np.flatnonzero(request.context_ids == image_token_id)
            images = [placed[key] for key in request.image_keys]
            arrays.vision_index_bt[row, slots] = np.concatenate(
                [_table_rows(image, cfg.image_row_patches, merge_size) for image in images]
            )
    return arrays


def _table_rows(image: PlacedImage, row_patches: int, merge_size: int) -> np.ndarray:
    """Rows of the table of visual tokens that hold an image: merge_size**2 patches make one row."""
    first = (image.row * row_patches + image.start) // merge_size**2
    return first + np.arange(vision_inputs.num_visual_tokens(image.grid_thw, merge_size))


def seed_words(seed: int) -> np.ndarray:
    """The two words of a threefry key, uint32[2], for any integer seed (taken modulo 2**64)."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
