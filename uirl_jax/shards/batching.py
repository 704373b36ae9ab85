"""Trajectories into the arrays of one learner step: merge turns, build rows, decode screenshots.

Learner side, between `reader` and `learner.step`; numpy on the host, no device array is made here.
What is computed per sampled token (advantages, weights) is put in its place by `fill` and read from
there by `gather`; none of it is computed here. Every shape it returns is one of few fixed
ones, so that the step compiles once per shape; a step with more records has more batches.
"""

import concurrent.futures
import dataclasses
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from uirl_jax.errors import ConfigError, ImageError, RecordError
from uirl_jax.families.border import Inputs, PlacedScreen, Screen
from uirl_jax.families.screens import image_size, plan_screen, read_planned, vision_index
from uirl_jax.shards import packing
from uirl_jax.shards.plan import BatchConfig, BatchPlan, plan_batches
from uirl_jax.types import TrainBatch, Trajectory

_EMPTY = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Consecutive turns of a trajectory whose context only grew. Arrays as in types.TrainBatch."""

    token_ids_t: np.ndarray  # int32
    completion_mask_t: np.ndarray  # float32, 1 where the policy sampled the token
    behaviour_logprobs_t: np.ndarray  # float32, 0 outside completion_mask
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


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Records cut into sequences, and their screenshots, planned and not decoded.

    Attributes:
        of: by number of the record and of its sequence.
        screens: by key.
    """

    inputs: Inputs
    of: Mapping[tuple[int, int], packing.Piece]
    screens: Mapping[str, Screen]


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a batch that a host builds; None: all."""

    rows: Collection[int] | None = None
    image_rows: Collection[int] | None = None


WHOLE = Part()


def make_batches(
    trajectories: Seq[Trajectory],
    *,
    inputs: Inputs,
    cfg: BatchConfig,
    parts: tuple[int, int] = (1, 1),
) -> list[TrainBatch]:
    """All the trajectories in batches of cfg.rows rows; see types.TrainBatch for the layout.

    Args:
        inputs: of the model directory.
        cfg: the shapes, and what rows may hold.
        parts: of the mesh that the batches go to (`sharding.batch_parts`).

    Returns: at least one batch, its advantages and weights still 0 (`fill`). Rows beyond the
    sequences, and image rows beyond the screenshots, are padding. Row i of the arrays of `vision`
    holds a batch's screenshot i.

    Raises ConfigError where the trajectories fit none of the shapes, RecordError where a trajectory
    contradicts itself or its screenshots.
    """
    pieces = cut(dict(enumerate(trajectories)), inputs)
    return [assemble(batch_plan, pieces, cfg) for batch_plan in plan_of(pieces, cfg, parts)]


def cut(records: Mapping[int, Trajectory], inputs: Inputs) -> Pieces:
    """Cuts records into pieces.

    Args:
        records: by their number in the step.
    Raises: RecordError: a trajectory contradicts itself or its screenshots.
    """
    screens: dict[str, Screen] = {}
    pieces = {}
    for number, trajectory in records.items():
        for index, (sequence, first_token) in enumerate(_numbered(sequences(trajectory))):
            for key in sequence.image_keys:
                if key not in screens:
                    screens[key] = _planned(key, trajectory, inputs)
                recorded, tokens = trajectory.image_tokens[key], screens[key].tokens
                if recorded != tokens:
                    raise RecordError(
                        f"episode {trajectory.episode_id}: the policy read image {key[:16]} as "
                        f"{recorded} visual tokens, this model directory's image settings give "
                        f"{tokens}"
                    )
            seen = [screens[key] for key in sequence.image_keys]
            piece = _piece(sequence, trajectory, seen, first_token, inputs)
            pieces[number, index] = piece._replace(trajectory=number, sequence=index)
    return Pieces(inputs, pieces, screens)


def plan_of(pieces: Pieces, cfg: BatchConfig, parts: tuple[int, int] = (1, 1)) -> list[BatchPlan]:
    """See plan.plan_batches."""
    return plan_batches(
        list(pieces.of.values()),
        pieces.screens,
        inputs=pieces.inputs,
        cfg=cfg,
        parts=parts,
    )


def _piece(
    sequence: Sequence,
    trajectory: Trajectory,
    seen: list[Screen],
    first_token: int,
    inputs: Inputs,
) -> packing.Piece:
    try:
        positions_at = inputs.positions(sequence.token_ids_t, seen)
    except ImageError as error:
        raise RecordError(f"episode {trajectory.episode_id}: {error}") from None
    # All before the first sampled token but the last one, whose logits choose it: that one every
    # sequence keeps.
    prompt_length = max(int(np.argmax(sequence.completion_mask_t > 0)) - 1, 0)
    ends_v = np.cumsum([screen.tokens for screen in seen])
    visual_v = np.flatnonzero(sequence.token_ids_t[:prompt_length] == inputs.image_token_id)
    # Where a prompt's tokens see each other, a screenshot's depend on the instruction behind it.
    alike = 0 if inputs.prefix_lm or not len(visual_v) else int(visual_v[-1]) + 1
    return packing.Piece(
        sequence.token_ids_t,
        sequence.completion_mask_t,
        sequence.behaviour_logprobs_t,
        sequence.turns_t,
        positions_at,
        sequence.image_keys,
        prompt_length,
        screens_length=alike,
        prompt_images=int(np.searchsorted(ends_v, len(visual_v))) + 1 if len(visual_v) else 0,
        trajectory=0,
        sequence=0,
        first_token=first_token,
    )


def assemble(
    batch_plan: BatchPlan, pieces: Pieces, cfg: BatchConfig, part: Part = WHOLE
) -> TrainBatch:
    """Builds a batch, or the rows of it that this host's devices hold; the others stay 0.

    Args:
        pieces: of the records that `BatchPlan.records` names for the part, or more.
        part: screenshots are decoded for its image rows. Tokens are cheap: rows are built for all
            pieces that are there, so that a host with all records has whole arrays of tokens.
    Raises: RecordError: a screenshot is not what its header says.
    """
    inputs, shape_bt = pieces.inputs, (cfg.rows, batch_plan.row_length)
    vision, visual_rows = _pack_screens(batch_plan, pieces, part)
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
    for b, spans in batch_plan.rows.items():
        part_rows = visual_rows[b * batch_plan.data_parts // cfg.rows]
        for span in spans:
            piece, taken = pieces.of.get((span.record, span.sequence)), slice(span.start, span.stop)
            if piece is None:
                continue
            at = (b, slice(span.column, span.column + span.stop - span.start))
            # The k-th placeholder is the k-th visual token of the sequence's screenshots; as many
            # of one as of the other: Inputs.positions has checked it.
            rows_v = np.concatenate([_EMPTY, *(part_rows[key] for key in piece.image_keys)])
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
    index_bs = sampled_index(arrays["completion_mask_bt"], batch_plan.sampled_length)
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


def sampled_index(completion_mask_bt: np.ndarray, size: int) -> np.ndarray:
    """TrainBatch.sampled_index_bs of a mask, [B, size]."""
    index_bs = np.full((len(completion_mask_bt), size), -1, np.int32)
    for b, mask_t in enumerate(completion_mask_bt):
        found = np.flatnonzero(mask_t)
        index_bs[b, : len(found)] = found
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


def _planned(key: str, trajectory: Trajectory, inputs: Inputs) -> Screen:
    screenshot = trajectory.images[key]
    try:
        return plan_screen(inputs, screenshot, image_size(screenshot))
    except ImageError as error:
        raise RecordError(f"episode {trajectory.episode_id}: image {key[:16]}: {error}") from None


def _pack_screens(
    batch_plan: BatchPlan, pieces: Pieces, part: Part
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """TrainBatch.vision, and the rows of the visual table of each data part's screens, by key."""
    known = [planned for planned in batch_plan.screens if planned.key in pieces.screens]
    read = {p.key for p in known if part.image_rows is None or p.row in part.image_rows}

    def screen_of(key: str) -> Screen:
        screen = pieces.screens[key]
        if key not in read:
            return screen
        try:
            return read_planned(pieces.inputs, screen)
        except ImageError as error:
            raise RecordError(f"image {key[:16]}: {error}") from None

    keys = list(dict.fromkeys(planned.key for planned in known))
    # 22 ms for a 1280x800 screen, nearly all of it without the interpreter's lock.
    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="screenshots") as threads:
        screens = dict(zip(keys, threads.map(screen_of, keys), strict=True))
    placed = [PlacedScreen(screens[planned.key], planned.row, 0, 1) for planned in known]
    size = batch_plan.image_rows, batch_plan.patch_length
    packed = pieces.inputs.pack_screens(placed, *size)
    visual_rows: list[dict[str, np.ndarray]] = [{} for _ in range(batch_plan.data_parts)]
    for (screen, row, *_), first in zip(placed, packed.first_tokens, strict=True):
        tokens_v = np.arange(first, first + screen.tokens, dtype=np.int32)
        visual_rows[row * batch_plan.data_parts // batch_plan.image_rows][screen.key] = tokens_v
    return packed.arrays, visual_rows
