"""Trajectories into the arrays of one learner step: merge turns, pack rows, lay out screenshots.

Learner side, between `reader` and `learner.step`; numpy on the host, no device array is made here.
What is computed per sampled token (advantages, weights) is put in its place by `fill` and read from
there by `gather`; none of it is computed here. Every shape it returns is one of few fixed
ones, so that the step compiles once per shape; a step with more records has more batches.
"""

import concurrent.futures
import dataclasses
from collections.abc import Sequence as Seq

import numpy as np

from uirl_jax.errors import ConfigError, ImageError, RecordError
from uirl_jax.families.border import Inputs, PlacedScreen, Screen
from uirl_jax.families.screens import read_screen, vision_index
from uirl_jax.shards import packing
from uirl_jax.types import TrainBatch, Trajectory

_EMPTY = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The fixed shapes that a batch may have; of each ascending tuple the smallest that fits.

    With `pack`, sequences share rows; with `share_prompts`, also what they begin with: the members
    of a group read one screenshot and one instruction, and a row then holds them once. That pays
    where an episode is one short turn: for a group of 8 behind 1,000 visual tokens a quarter of the
    time (v5e, by the planner); with ten turns the same time and three times the memory.
    """

    # B: how many go through at once; a step takes as many batches as it needs.
    rows: int = dataclasses.field(default=64, metadata={"min": 1, "max": 65_536})
    # T.
    row_lengths: tuple[int, ...] = dataclasses.field(
        default=(128, 256, 512), metadata={"min": 1, "max": 1_000_000}
    )
    # S, sampled tokens of a row; after these, T.
    sampled_lengths: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"min": 1, "max": 1_000_000}
    )
    # I, one distinct screenshot per row.
    image_rows: tuple[int, ...] = dataclasses.field(
        default=(8, 16, 32, 64), metadata={"min": 1, "max": 65_536}
    )
    # P of a row; `Inputs.row_tokens` refuses some.
    patch_lengths: tuple[int, ...] = dataclasses.field(
        default=(256,), metadata={"min": 1, "max": 1_000_000}
    )
    pack: bool = True  # several sequences in a row; else one each
    share_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("row_lengths", "sampled_lengths", "image_rows", "patch_lengths"):
            sizes = getattr(self, name)
            wrong = sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes)))
            if wrong or not (sizes or name == "sampled_lengths"):
                raise ConfigError(f"batching.{name} is {sizes}, expected ascending sizes")
        if self.rows < 1:
            raise ConfigError(f"batching.rows is {self.rows}, expected at least 1")
        if self.share_prompts and not self.pack:
            raise ConfigError("batching.share_prompts needs batching.pack: a row holds them all")


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Consecutive turns of a trajectory whose context only grew. Arrays as in types.TrainBatch."""

    token_ids_t: np.ndarray  # int32
    completion_mask_t: np.ndarray  # float32, 1 where the policy sampled the token
    behaviour_logprobs_t: np.ndarray  # float32, 0 outside completion_mask
    policy_versions_t: np.ndarray  # int32, -1 outside completion_mask
    turns_t: np.ndarray  # int32, the turn of the trajectory, -1 outside completion_mask
    image_keys: tuple[str, ...]  # of the screenshots in token_ids, in order


def sequences(trajectory: Trajectory) -> list[Sequence]:
    """As few sequences as possible in which every sampled token is sampled exactly once.

    A turn continues the sequence where its context begins with all that is in it, text and
    screenshots; elsewhere (the context policy dropped screenshots) it starts a new one, in which
    the older turns' tokens are context. Sampled tokens keep the order of the turns.
    """
    done: list[Sequence] = []
    for number, turn in enumerate(trajectory.turns):
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
            "policy_versions_t": (np.full(new, -1), turn.policy_versions),
            "turns_t": (np.full(new, -1), np.full(len(turn.token_ids), number)),
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


def make_batches(
    trajectories: Seq[Trajectory], *, inputs: Inputs, cfg: BatchConfig
) -> list[TrainBatch]:
    """All the trajectories in batches of cfg.rows rows; see types.TrainBatch for the layout.

    Args:
        inputs: of the model directory.
        cfg: the shapes, and what rows may hold.

    Returns: at least one batch, its advantages and weights still 0 (`fill`). Rows beyond the
    sequences, and image rows beyond the screenshots, are padding. Row i of the arrays of `vision`
    holds a batch's screenshot i.

    Raises ConfigError where the trajectories fit none of the shapes, RecordError where a trajectory
    contradicts itself or its screenshots.
    """
    flat = [
        (sequence, number, first_token)
        for number, trajectory in enumerate(trajectories)
        for sequence, first_token in _numbered(sequences(trajectory))
    ]
    screens = _read_screens(
        [(sequence, trajectories[number]) for sequence, number, _ in flat], inputs
    )
    pieces = [
        _piece(sequence, trajectories[number], number, first_token, screens, inputs)
        for sequence, number, first_token in flat
    ]
    row_length, rows = packing.fill_rows(
        pieces,
        rows=cfg.rows,
        row_lengths=cfg.row_lengths,
        pack=cfg.pack,
        share_prompts=cfg.share_prompts,
    )
    return [
        _assemble(batch_rows, row_length, screens, inputs, cfg)
        for batch_rows in _cut_batches(rows, cfg)
    ]


def _piece(
    sequence: Sequence,
    trajectory: Trajectory,
    number: int,
    first_token: int,
    screens: dict[str, Screen],
    inputs: Inputs,
) -> packing.Piece:
    seen = [screens[key] for key in sequence.image_keys]
    try:
        positions_at = inputs.positions(sequence.token_ids_t, seen)
    except ImageError as error:
        raise RecordError(f"episode {trajectory.episode_id}: {error}") from None
    # All before the first sampled token but the last one, whose logits choose it: that one every
    # sequence keeps.
    prompt_length = max(int(np.argmax(sequence.completion_mask_t > 0)) - 1, 0)
    ends_v = np.cumsum([screen.tokens for screen in seen])
    in_prompt = np.count_nonzero(sequence.token_ids_t[:prompt_length] == inputs.image_token_id)
    return packing.Piece(
        sequence.token_ids_t,
        sequence.completion_mask_t,
        sequence.behaviour_logprobs_t,
        sequence.turns_t,
        positions_at,
        sequence.image_keys,
        prompt_length,
        prompt_images=int(np.searchsorted(ends_v, in_prompt)) + 1 if in_prompt else 0,
        trajectory=number,
        first_token=first_token,
    )


def _cut_batches(rows: list[packing.Row], cfg: BatchConfig) -> list[list[packing.Row]]:
    """Rows in their order, at most cfg.rows to a batch and no more screenshots than it holds."""
    batches: list[list[packing.Row]] = [[]]
    seen: set[str] = set()
    for row in rows:
        keys = {key for span in row.spans for key in span.piece.image_keys}
        full = len(batches[-1]) == cfg.rows or len(seen | keys) > cfg.image_rows[-1]
        if full and batches[-1]:
            batches.append([])
            seen = set()
        batches[-1].append(row)
        seen |= keys
    return batches


def _assemble(
    rows: list[packing.Row],
    row_length: int,
    screens: dict[str, Screen],
    inputs: Inputs,
    cfg: BatchConfig,
) -> TrainBatch:
    """One batch of at most cfg.rows filled rows."""
    keys = dict.fromkeys(key for row in rows for span in row.spans for key in span.piece.image_keys)
    vision, visual_rows = _pack_screens([screens[key] for key in keys], inputs, cfg)
    shape_bt = (cfg.rows, row_length)
    arrays = {
        "token_ids_bt": np.zeros(shape_bt, np.int32),
        "segment_ids_bt": np.zeros(shape_bt, np.int32),
        "prefix_segments_bt": np.zeros(shape_bt, np.int32),
        "positions_abt": np.zeros((inputs.position_axes, *shape_bt), np.int32),
        "completion_mask_bt": np.zeros(shape_bt, np.float32),
        "vision_index_bt": np.full(shape_bt, -1, np.int32),
        "behaviour_logprobs_bt": np.zeros(shape_bt, np.float32),
        "turn_ids_bt": np.zeros(shape_bt, np.int32),
    }
    number_bt, token_bt = np.full(shape_bt, -1, np.int32), np.full(shape_bt, -1, np.int32)
    for b, row in enumerate(rows):
        for span in row.spans:
            piece, taken = span.piece, slice(span.start, span.stop)
            at = (b, slice(span.column, span.column + span.stop - span.start))
            # The k-th placeholder is the k-th visual token of the sequence's screenshots; as many
            # of one as of the other: Inputs.positions has checked it.
            rows_v = np.concatenate([_EMPTY, *(visual_rows[key] for key in piece.image_keys)])
            index_t = vision_index(piece.token_ids, inputs.image_token_id, rows_v)
            arrays["token_ids_bt"][at] = piece.token_ids[taken]
            arrays["segment_ids_bt"][at] = span.segment
            arrays["prefix_segments_bt"][at] = span.prefix_segment
            arrays["positions_abt"][:, b, at[1]] = piece.positions[:, taken]
            arrays["completion_mask_bt"][at] = piece.completion_mask[taken]
            arrays["vision_index_bt"][at] = index_t[taken]
            arrays["behaviour_logprobs_bt"][at] = piece.behaviour_logprobs[taken]
            inside_t = piece.completion_mask[taken] > 0
            first_turn = min(piece.turns[taken][inside_t], default=0)
            turns_t = arrays["turn_ids_bt"][b].max() + 1 + piece.turns[taken] - first_turn
            arrays["turn_ids_bt"][at] = np.where(inside_t, turns_t, 0)
            number_bt[at] = np.where(inside_t, piece.trajectory, -1)
            before = np.count_nonzero(piece.completion_mask[: span.start])
            tokens_t = piece.first_token + before + np.cumsum(inside_t) - 1
            token_bt[at] = np.where(inside_t, tokens_t, -1)
    if not cfg.share_prompts:
        arrays["prefix_segments_bt"] = None
    index_bs = sampled_index(arrays["completion_mask_bt"], cfg.sampled_lengths)
    unused_bs, at_bs = index_bs < 0, np.maximum(index_bs, 0)
    return TrainBatch(
        **arrays,
        vision=vision,
        sampled_index_bs=index_bs,
        trajectory_bs=np.where(unused_bs, -1, np.take_along_axis(number_bt, at_bs, 1)),
        token_bs=np.where(unused_bs, -1, np.take_along_axis(token_bt, at_bs, 1)),
        advantages_bt=np.zeros(shape_bt, np.float32),
        weights_bt=np.zeros(shape_bt, np.float32),
        values_bt=None,
        returns_bt=None,
    )


def sampled_index(completion_mask_bt: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """TrainBatch.sampled_index_bs of a mask, S the first of `lengths`, or T, that holds a row's."""
    counts_b = np.count_nonzero(completion_mask_bt, axis=1)
    size = next(n for n in (*lengths, completion_mask_bt.shape[1]) if n >= counts_b.max())
    index_bs = np.full((len(counts_b), size), -1, np.int32)
    for b, mask_t in enumerate(completion_mask_bt):
        index_bs[b, : counts_b[b]] = np.flatnonzero(mask_t)
    return index_bs


def _numbered(found: list[Sequence]) -> list[tuple[Sequence, int]]:
    """Each with the number of sampled tokens of its trajectory that come before its own."""
    counts = [int(sequence.completion_mask_t.sum()) for sequence in found]
    return list(zip(found, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))


def fill(batches: Seq[TrainBatch], **per_token: Seq[float | np.ndarray]) -> list[TrainBatch]:
    """The batches with fields set: fill(batches, advantages_bt=..., weights_bt=...).

    Args:
        per_token: by field, for each of the trajectories one float, or float[S] with one for each
            sampled token in the order of the turns.
    Raises: ConfigError where a length is not a trajectory's.
    """
    sampled = np.zeros(max((b.trajectory_bs.max(initial=-1) for b in batches), default=-1) + 1, int)
    for batch in batches:
        np.add.at(sampled, batch.trajectory_bs[batch.trajectory_bs >= 0], 1)
    for name, values in per_token.items():
        for number, value in enumerate(values):
            expected = sampled[number] if number < len(sampled) else 0
            if np.ndim(value) and np.shape(value) != (expected,):
                raise ConfigError(
                    f"trajectory {number}: {name} has shape {np.shape(value)}, expected one float "
                    f"or [{expected}], one per sampled token"
                )
    return [
        dataclasses.replace(
            batch, **{name: _spread(batch, values) for name, values in per_token.items()}
        )
        for batch in batches
    ]


def _spread(batch: TrainBatch, values: Seq[float | np.ndarray]) -> np.ndarray:
    out_bt = np.zeros(batch.token_ids_bt.shape, np.float32)
    for b, s in zip(*np.nonzero(batch.sampled_index_bs >= 0), strict=True):
        value = values[int(batch.trajectory_bs[b, s])]
        if isinstance(value, np.ndarray) and value.ndim:
            value = value[batch.token_bs[b, s]]
        out_bt[b, batch.sampled_index_bs[b, s]] = value
    return out_bt


def gather(
    batches: Seq[TrainBatch], arrays_bt: Seq[np.ndarray], sampled_tokens: Seq[int]
) -> list[np.ndarray]:
    """The reverse of `fill`: what stands at the trajectories' sampled tokens, float32[S] each.

    Args:
        arrays_bt: one array a batch.
        sampled_tokens: S of every trajectory.
    """
    out = [np.zeros(count, np.float32) for count in sampled_tokens]
    for batch, array_bt in zip(batches, arrays_bt, strict=True):
        for b, s in zip(*np.nonzero(batch.sampled_index_bs >= 0), strict=True):
            values_s = out[batch.trajectory_bs[b, s]]
            values_s[batch.token_bs[b, s]] = array_bt[b, batch.sampled_index_bs[b, s]]
    return out


def _read_screens(flat: list[tuple[Sequence, Trajectory]], inputs: Inputs) -> dict[str, Screen]:
    """Every distinct screenshot by its key."""
    found = {key: trajectory for sequence, trajectory in flat for key in sequence.image_keys}
    # 22 ms for a 1280x800 screen, nearly all of it without the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="screenshots") as threads:
        read = threads.map(lambda key: _read(key, found[key], inputs), found)
        screens = dict(zip(found, read, strict=True))
    for sequence, trajectory in flat:
        for key in sequence.image_keys:
            recorded, tokens = trajectory.image_tokens[key], screens[key].tokens
            if recorded != tokens:
                raise RecordError(
                    f"episode {trajectory.episode_id}: the policy read image {key[:16]} as "
                    f"{recorded} visual tokens, this model directory's image settings give {tokens}"
                )
    return screens


def _read(key: str, trajectory: Trajectory, inputs: Inputs) -> Screen:
    try:
        return read_screen(inputs, trajectory.images[key])
    except ImageError as error:
        raise RecordError(f"episode {trajectory.episode_id}: image {key[:16]}: {error}") from None


def _pack_screens(
    screens: list[Screen], inputs: Inputs, cfg: BatchConfig
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """TrainBatch.vision, and the rows of the visual table of each screenshot, by key."""
    for length in cfg.patch_lengths:
        inputs.row_tokens(length)
    largest = max((screen.patches for screen in screens), default=0)
    n_rows = _smallest(len(screens), cfg.image_rows, "distinct screenshots", "image_rows")
    n_patches = _smallest(largest, cfg.patch_lengths, "patches of a screenshot", "patch_lengths")
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    packed = inputs.pack_screens(placed, n_rows, n_patches)
    visual_rows = {
        screen.key: np.arange(first, first + screen.tokens, dtype=np.int32)
        for screen, first in zip(screens, packed.first_tokens, strict=True)
    }
    return packed.arrays, visual_rows


def _smallest(needed: int, sizes: tuple[int, ...], what: str, name: str) -> int:
    for size in sizes:
        if needed <= size:
            return size
    raise ConfigError(f"{needed} {what}, {name} accepts at most {sizes[-1]}: add a larger one")
