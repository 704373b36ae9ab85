"""Rows of supervised batches for small models that are made from nothing: one screen in each.

What is asked and answered comes from `make_base_model` and `make_page_model`; demonstrations of
episodes are batched by `uirl_jax.shards.batching`. A `Conversation` is clicks turn after turn.
`Questions` share a screen as their prefix and do not see each other, as samples of a group do in a
training step: nothing can be copied from the answer before, so that each of them teaches to look.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from uirl_jax.families.border import Inputs, PlacedScreen, Screen
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import vision_index
from uirl_jax.shards import batching
from uirl_jax.types import TrainBatch


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One row: token ids, which of them are the demonstrator's, and the screens they talk about.

    Attributes:
      starts: of its sequences, each of which shows all screens.
    """

    token_ids_t: np.ndarray
    mask_t: np.ndarray
    screens: tuple[Screen, ...]
    starts: tuple[int, ...] = (0,)

    @property
    def sequences(self) -> list[slice]:
        ends = (*self.starts[1:], len(self.token_ids_t))
        return [slice(start, end) for start, end in zip(self.starts, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class Questions:
    """One screen, and what is asked about it.

    Attributes:
      prefix_t: the tokens before every question; the screen is among them.
      asked: of each question its tokens, and how many of them, at the end, are the answer.
    """

    prefix_t: np.ndarray
    asked: tuple[tuple[np.ndarray, int], ...]
    screen: Screen


def questions_about(
    screen: Screen,
    asked: Iterable[tuple[str, str]],
    *,
    chat: Chat,
    inputs: Inputs,
    row_tokens: int,
) -> Questions:
    """Questions of pairs of an instruction and its answer, as if each were the first of an episode.

    Those that find no room in a row are left out.

    Raises:
      ValueError: the token behind the screen is not the same for all of them.
    """
    prefix_t = np.zeros(0, np.int32)
    found: list[tuple[np.ndarray, int]] = []
    length = 0
    for instruction, answer in asked:
        context_t = chat.context(instruction, [screen], []).ids
        if not found:
            prefix = 1 + max(np.flatnonzero(context_t == inputs.image_token_id)) + 1
            prefix_t = context_t[:prefix]
            length = prefix - 1
        if not np.array_equal(context_t[: len(prefix_t)], prefix_t):
            raise ValueError(f"{instruction!r} begins within the token behind the screen")
        answer_t = chat.completion_ids(answer)
        ids_t = np.concatenate([context_t[len(prefix_t) :], answer_t]).astype(np.int32)
        length += 1 + len(ids_t)
        if length > row_tokens:
            break
        found.append((ids_t, len(answer_t)))
    return Questions(prefix_t, tuple(found), screen)


def conversation_rows(
    examples: list[Conversation], *, row_tokens: int, images_a_row: int, inputs: Inputs
) -> TrainBatch:
    """Rows of a fixed length, one example each, its screens in its own image rows."""
    rows, images = len(examples), len(examples) * images_a_row
    placed = [
        PlacedScreen(screen, row * images_a_row + index, start=0, segment=1)
        for row, example in enumerate(examples)
        for index, screen in enumerate(example.screens)
    ]
    packed = inputs.pack_screens(placed, images, examples[0].screens[0].patches)
    first_tokens = iter(packed.first_tokens)
    shape_bt = (rows, row_tokens)
    arrays = {
        "token_ids_bt": np.zeros(shape_bt, np.int32),
        "segment_ids_bt": np.zeros(shape_bt, np.int32),
        "positions_abt": np.zeros((inputs.position_axes, *shape_bt), np.int32),
        "completion_mask_bt": np.zeros(shape_bt, np.float32),
        "vision_index_bt": np.full(shape_bt, -1, np.int32),
    }
    for row, example in enumerate(examples):
        length = len(example.token_ids_t)
        arrays["token_ids_bt"][row, :length] = example.token_ids_t
        arrays["completion_mask_bt"][row, :length] = example.mask_t
        rows_v = np.concatenate(
            [next(first_tokens) + np.arange(screen.tokens) for screen in example.screens]
        )
        for number, span in enumerate(example.sequences):
            ids_t = example.token_ids_t[span]
            arrays["segment_ids_bt"][row, span] = 1 + number
            arrays["positions_abt"][:, row, span] = inputs.positions(ids_t, example.screens)
            arrays["vision_index_bt"][row, span] = vision_index(
                ids_t, inputs.image_token_id, rows_v
            )
    return _supervised_batch(arrays, packed.arrays, shape_bt[1])


def question_rows(
    examples: list[Questions], *, row_tokens: int, sampled: int, inputs: Inputs
) -> TrainBatch:
    """A row for each screen: its questions share it as a prefix and do not see each other.

    Args:
      sampled: room for so many tokens of answers in a row.
    """
    rows = len(examples)
    placed = [
        PlacedScreen(example.screen, row, start=0, segment=1)
        for row, example in enumerate(examples)
    ]
    packed = inputs.pack_screens(placed, rows, examples[0].screen.patches)
    shape_bt = (rows, row_tokens)
    token_ids_bt, segments_bt, prefixes_bt = (np.zeros(shape_bt, np.int32) for _ in range(3))
    positions_abt = np.zeros((inputs.position_axes, *shape_bt), np.int32)
    vision_bt = np.full(shape_bt, -1, np.int32)
    mask_bt = np.zeros(shape_bt, np.float32)
    for row, example in enumerate(examples):
        # The prefix' last token begins every question instead (types.TrainBatch).
        prefix_t, last_t = np.split(example.prefix_t, [-1])
        end = len(prefix_t)
        token_ids_bt[row, :end] = prefix_t
        segments_bt[row, :end] = 1
        positions_abt[:, row, :end] = inputs.positions(prefix_t, [example.screen])
        rows_v = packed.first_tokens[row] + np.arange(example.screen.tokens)
        vision_bt[row, :end] = vision_index(prefix_t, inputs.image_token_id, rows_v)
        for number, (ids_t, answer) in enumerate(example.asked):
            own_t = np.concatenate([last_t, ids_t])
            span = slice(end, end + len(own_t))
            token_ids_bt[row, span] = own_t
            segments_bt[row, span] = 2 + number
            whole_t = np.concatenate([prefix_t, own_t])
            positions_at = inputs.positions(whole_t, [example.screen])
            positions_abt[:, row, span] = positions_at[:, len(prefix_t) :]
            end = span.stop
            mask_bt[row, end - answer : end] = 1.0
        prefixes_bt[row, :end] = 1
    arrays = {
        "token_ids_bt": token_ids_bt,
        "segment_ids_bt": segments_bt,
        "prefix_segments_bt": prefixes_bt,
        "positions_abt": positions_abt,
        "completion_mask_bt": mask_bt,
        "vision_index_bt": vision_bt,
    }
    return _supervised_batch(arrays, packed.arrays, sampled)


def _supervised_batch(
    arrays: dict[str, np.ndarray], vision: dict[str, np.ndarray], sampled: int
) -> TrainBatch:
    """A batch of examples, which are no trajectories: every answer's token weighs the same.

    Args:
      arrays: tokens, segments, positions, completion mask and vision index of the rows.
      sampled: room for so many tokens of answers in a row.
    """
    mask_bt = arrays["completion_mask_bt"]
    index_bs = batching.sampled_index(mask_bt, sampled)
    return TrainBatch(
        **{"prefix_segments_bt": None, **arrays},
        vision=vision,
        sampled_index_bs=index_bs,
        turn_ids_bt=mask_bt.astype(np.int32),
        weights_bt=mask_bt / max(mask_bt.sum(), 1.0),
        behaviour_logprobs_bt=np.zeros_like(mask_bt),
        advantages_bt=np.zeros_like(mask_bt),
        values_bt=None,
        returns_bt=None,
        trajectory_bs=np.full_like(index_bs, -1),
        token_bs=np.full_like(index_bs, -1),
    )
