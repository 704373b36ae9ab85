"""Trajectories into the arrays of one learner step: merge turns, pack rows, lay out screenshots.

Learner side, between `reader` and `learner.step`; numpy on the host, no device array is made here.
It is given the advantages and does not compute them. Every shape it returns is one of few fixed
ones, so that the step compiles once per shape.
"""

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from uirl_jax import vision_inputs
from uirl_jax.errors import ConfigError, ImageError, RecordError
from uirl_jax.types import TrainBatch, Trajectory


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The fixed shapes that a batch may have; of each ascending tuple the smallest that fits."""

    rows: int = 64  # B, always
    row_lengths: tuple[int, ...] = (128, 256, 512)  # T
    image_rows: tuple[int, ...] = (8, 16, 32, 64)  # I, one distinct screenshot per row
    patch_lengths: tuple[int, ...] = (192,)  # P of a row; multiples of merge_size ** 2
    pack: bool = True  # several sequences in a row, first fit; else one each

    def __post_init__(self) -> None:
        for name in ("row_lengths", "image_rows", "patch_lengths"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigError(f"batching.{name} is {sizes}, expected ascending sizes")
        if self.rows < 1:
            raise ConfigError(f"batching.rows is {self.rows}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Consecutive turns of a trajectory whose context only grew. Arrays as in types.TrainBatch."""

    token_ids_t: np.ndarray  # int32
    completion_mask_t: np.ndarray  # float32, 1 where the policy sampled the token
    behaviour_logprobs_t: np.ndarray  # float32, 0 outside completion_mask
    policy_versions_t: np.ndarray  # int32, -1 outside completion_mask
    image_keys: tuple[str, ...]  # of the screenshots in token_ids, in order


def sequences(trajectory: Trajectory) -> list[Sequence]:
    """As few sequences as possible in which every sampled token is sampled exactly once.

    A turn continues the sequence where its context begins with all that is in it, text and
    screenshots; elsewhere (the context policy dropped screenshots) it starts a new one, in which
    the older turns' tokens are context. Sampled tokens keep the order of the turns.
    """
    done: list[Sequence] = []
    for turn in trajectory.turns:
        before = done[-1] if done else None
        if before is not None and _continues(before, turn.context_ids, turn.image_keys):
            done.pop()
            known = len(before.token_ids_t)
        else:
            before, known = None, 0
        new = len(turn.context_ids) - known
        parts = {
            "token_ids_t": (turn.context_ids[known:], turn.token_ids),
            "completion_mask_t": (np.zeros(new), np.ones(len(turn.token_ids))),
            "behaviour_logprobs_t": (np.zeros(new), turn.logprobs),
            "policy_versions_t": (
                np.full(new, -1),
                np.full(len(turn.token_ids), turn.policy_version),
            ),
        }
        arrays = {
            name: np.concatenate([*([getattr(before, name)] if before else []), *added]).astype(
                np.float32 if name in ("completion_mask_t", "behaviour_logprobs_t") else np.int32
            )
            for name, added in parts.items()
        }
        done.append(Sequence(**arrays, image_keys=turn.image_keys))
    return done


def _continues(before: Sequence, context_ids: np.ndarray, image_keys: tuple[str, ...]) -> bool:
    known = len(before.token_ids_t)
    return (
        len(context_ids) >= known
        and np.array_equal(context_ids[:known], before.token_ids_t)
        and image_keys[: len(before.image_keys)] == before.image_keys
    )


def make_batch(
    trajectories: Seq[Trajectory],
    advantages: Seq[float | np.ndarray],
    *,
    image_cfg: vision_inputs.ImageConfig,
    image_token_id: int,
    cfg: BatchConfig,
) -> TrainBatch:
    """One batch of all the trajectories; see types.TrainBatch for its layout.

    Args:
        advantages: per trajectory one float, or float32[S] with one for each sampled token in the
            order of the turns.
        image_token_id: the placeholder in context_ids, one per visual token.
        cfg: the shapes, and whether to pack.

    Returns: rows beyond the sequences, and image rows beyond the screenshots, are padding. Row i of
    patches_ipf holds screenshot i; its visual tokens are rows i * P / merge_size ** 2 and on of the
    flattened table.

    Raises ConfigError where the trajectories fit none of the shapes, RecordError where a trajectory
    contradicts itself or its screenshots.
    """
    flat = [
        (sequence, advantages_t, trajectory)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        for sequence, advantages_t in _with_advantages(trajectory, advantage)
    ]
    images, first_visual = _image_table(
        [(key, trajectory) for sequence, _, trajectory in flat for key in sequence.image_keys],
        image_cfg,
        cfg,
    )
    row_length, places = _place([len(sequence.token_ids_t) for sequence, *_ in flat], cfg)
    shape_bt = (cfg.rows, row_length)
    batch = TrainBatch(
        token_ids_bt=np.zeros(shape_bt, np.int32),
        segment_ids_bt=np.zeros(shape_bt, np.int32),
        positions_3bt=np.zeros((3, *shape_bt), np.int32),
        completion_mask_bt=np.zeros(shape_bt, np.float32),
        vision_index_bt=np.full(shape_bt, -1, np.int32),
        behaviour_logprobs_bt=np.zeros(shape_bt, np.float32),
        advantages_bt=np.zeros(shape_bt, np.float32),
        **images,
    )
    segments_b = np.zeros(cfg.rows, np.int32)
    for (sequence, advantages_t, trajectory), (row, start) in zip(flat, places, strict=True):
        segments_b[row] += 1
        at = (row, slice(start, start + len(sequence.token_ids_t)))
        batch.token_ids_bt[at] = sequence.token_ids_t
        batch.segment_ids_bt[at] = segments_b[row]
        batch.completion_mask_bt[at] = sequence.completion_mask_t
        batch.behaviour_logprobs_bt[at] = sequence.behaviour_logprobs_t
        batch.advantages_bt[at] = advantages_t
        grids = [trajectory.image_grids[key] for key in sequence.image_keys]
        batch.vision_index_bt[at] = _vision_index(
            sequence, trajectory, [first_visual[key] for key in sequence.image_keys], grids,
            image_token_id, image_cfg.merge_size,
        )  # fmt: skip
        try:
            batch.positions_3bt[:, row, at[1]] = vision_inputs.rope_positions(
                sequence.token_ids_t, grids, image_token_id, image_cfg.merge_size
            )
        except ImageError as error:
            raise RecordError(f"episode {trajectory.episode_id}: {error}") from None
    return batch


def _with_advantages(
    trajectory: Trajectory, advantage: float | np.ndarray
) -> list[tuple[Sequence, np.ndarray]]:
    """The trajectory's sequences, each with float32[T] advantages, 0 outside its mask."""
    found = sequences(trajectory)
    counts = [int(sequence.completion_mask_t.sum()) for sequence in found]
    advantages_s = np.asarray(advantage, np.float32)
    if advantages_s.ndim and advantages_s.shape != (sum(counts),):
        raise ConfigError(
            f"episode {trajectory.episode_id}: advantages have shape {advantages_s.shape}, "
            f"expected one float or [{sum(counts)}], one per sampled token"
        )
    advantages_s = np.broadcast_to(advantages_s, (sum(counts),))
    result, used = [], 0
    for sequence, count in zip(found, counts, strict=True):
        advantages_t = np.zeros(len(sequence.token_ids_t), np.float32)
        advantages_t[sequence.completion_mask_t > 0] = advantages_s[used : used + count]
        used += count
        result.append((sequence, advantages_t))
    return result


def _place(lengths: list[int], cfg: BatchConfig) -> tuple[int, list[tuple[int, int]]]:
    """The row length, and (row, start) of each sequence: the shortest rows that hold them all."""
    longest = max(lengths, default=0)
    if longest > cfg.row_lengths[-1]:
        raise ConfigError(
            f"a sequence has {longest} tokens, row_lengths accepts at most "
            f"{cfg.row_lengths[-1]}: add a longer one, or keep fewer screenshots in the context"
        )
    for row_length in cfg.row_lengths:
        if row_length < longest:
            continue
        free_b = [row_length] * cfg.rows
        places = []
        for length in lengths:
            for row, free in enumerate(free_b):
                if length <= free and (cfg.pack or free == row_length):
                    places.append((row, row_length - free))
                    free_b[row] -= length
                    break
            else:
                break
        if len(places) == len(lengths):
            return row_length, places
    raise ConfigError(
        f"{len(lengths)} sequences of {sum(lengths)} tokens do not fit {cfg.rows} rows of at "
        f"most {cfg.row_lengths[-1]}{'' if cfg.pack else ', one each'}: allow more rows"
    )


def _image_table(
    wanted: list[tuple[str, Trajectory]],
    image_cfg: vision_inputs.ImageConfig,
    cfg: BatchConfig,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The image arrays of a TrainBatch, and the row of each screenshot's first visual token."""
    area = image_cfg.merge_size**2
    if any(length % area for length in cfg.patch_lengths):
        raise ConfigError(f"patch_lengths {cfg.patch_lengths}: expected multiples of {area}")
    processed: dict[str, tuple[np.ndarray, tuple[int, int, int]]] = {}
    for key, trajectory in wanted:
        if key not in processed:
            processed[key] = _process(key, trajectory, image_cfg)
        grid_thw = processed[key][1]
        if trajectory.image_grids[key] != grid_thw:
            raise RecordError(
                f"episode {trajectory.episode_id}: the policy saw image {key[:16]} with grid "
                f"{trajectory.image_grids[key]}, this image config makes {grid_thw}"
            )
    largest = max((len(patches_pf) for patches_pf, _ in processed.values()), default=0)
    n_rows = _smallest(len(processed), cfg.image_rows, "distinct screenshots", "image_rows")
    n_patches = _smallest(largest, cfg.patch_lengths, "patches of a screenshot", "patch_lengths")
    patches_ipf = np.zeros((n_rows, n_patches, image_cfg.patch_features), np.float32)
    positions_ip2 = np.zeros((n_rows, n_patches, 2), np.int32)
    segments_ip = np.zeros((n_rows, n_patches), np.int32)
    for row, (patches_pf, grid_thw) in enumerate(processed.values()):
        count = len(patches_pf)
        patches_ipf[row, :count] = patches_pf
        positions_ip2[row, :count] = vision_inputs.patch_positions(grid_thw, image_cfg.merge_size)
        segments_ip[row, :count] = 1
    arrays = {
        "patches_ipf": patches_ipf,
        "patch_positions_ip2": positions_ip2,
        "patch_segments_ip": segments_ip,
    }
    return arrays, {key: row * n_patches // area for row, key in enumerate(processed)}


def _process(
    key: str, trajectory: Trajectory, image_cfg: vision_inputs.ImageConfig
) -> tuple[np.ndarray, tuple[int, int, int]]:
    try:
        image = vision_inputs.decode_image(trajectory.images[key])
        patches_pf, grid_thw = vision_inputs.process_image(image, image_cfg)
    except ImageError as error:
        raise RecordError(f"episode {trajectory.episode_id}: image {key[:16]}: {error}") from None
    return patches_pf, tuple(grid_thw)


def _smallest(needed: int, sizes: tuple[int, ...], what: str, name: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ConfigError(f"{needed} {what}, {name} accepts at most {sizes[-1]}: add a larger one")


def _vision_index(
    sequence: Sequence,
    trajectory: Trajectory,
    first_rows: list[int],
    grids: list[tuple[int, int, int]],
    image_token_id: int,
    merge_size: int,
) -> np.ndarray:
    """int32[T]: the k-th placeholder is the k-th visual token of the sequence's screenshots."""
    rows_v = np.concatenate(
        [
            np.zeros(0, np.int32),
            *(
                first + np.arange(vision_inputs.num_visual_tokens(grid_thw, merge_size))
                for first, grid_thw in zip(first_rows, grids, strict=True)
            ),
        ]
    )
    placeholders_t = sequence.token_ids_t == image_token_id
    if placeholders_t.sum() != len(rows_v):
        raise RecordError(
            f"episode {trajectory.episode_id}: {placeholders_t.sum()} image placeholders for "
            f"{len(rows_v)} visual tokens"
        )
    index_t = np.full(len(placeholders_t), -1, np.int32)
    index_t[placeholders_t] = rows_v
    return index_t
