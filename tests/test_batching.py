import dataclasses
import hashlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.families.qwen.images import ImageConfig, cut_image
from uirl_jax.families.qwen.inputs import QwenInputs, patch_positions
from uirl_jax.families.screens import decode_image
from uirl_jax.shards.batching import BatchConfig, fill, gather, make_batches, sequences
from uirl_jax.types import StopReason, TaskSpec, TrainBatch, Trajectory, Turn

PLACEHOLDER = 9
IMAGE_CFG = ImageConfig(min_pixels=28 * 28)
INPUTS = QwenInputs(IMAGE_CFG, PLACEHOLDER)
CFG = BatchConfig(
    rows=4, row_lengths=(12, 24, 48), image_rows=(2, 4, 8), patch_lengths=(8, 16), pack=False
)


def png(seed: int, height_px: int = 28, width_px: int = 56) -> tuple[str, bytes]:
    """A key and its screenshot of noise; 28x56 pixels are 8 patches and 2 visual tokens."""
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    pixels = rng.integers(0, 256, (height_px, width_px, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest(), file.getvalue()


def turn(context: list[int], sampled: list[int], keys: tuple[str, ...] = ()) -> Turn:
    return Turn(
        context_ids=np.array(context, np.int32),
        token_ids=np.array(sampled, np.int32),
        logprobs=-np.array(sampled, np.float32) / 8,  # a token's logprob can be told from its id
        full_logprobs=np.zeros(len(sampled), np.float32),
        policy_versions=np.zeros(len(sampled), np.int32),
        image_keys=keys,
        text="",
        action=None,
    )


def trajectory(turns: list[Turn], images: dict[str, bytes] | None = None) -> Trajectory:
    images = images or {}
    return Trajectory(
        episode_id="e0",
        group_id="g0",
        task=TaskSpec("desktop/click_button", seed=0),
        instruction="",
        turns=tuple(turns),
        images=images,
        image_tokens={
            key: INPUTS.cut_screen(decode_image(data)).tokens for key, data in images.items()
        },
        stop_reason=StopReason.COMPLETED,
        reward=1.0,
        success=True,
    )


def batches_of(trajectories, advantages=None, **changes) -> list[TrainBatch]:
    batches = make_batches(
        trajectories,
        inputs=INPUTS,
        cfg=dataclasses.replace(CFG, **changes),
    )
    return fill(
        batches, advantages_bt=advantages if advantages is not None else [1.0] * len(trajectories)
    )


def batch_of(trajectories, advantages=None, **changes) -> TrainBatch:
    (batch,) = batches_of(trajectories, advantages, **changes)
    return batch


# ---------------------------------------------------------------- sequences


def test_sequences_of_turns_that_only_grow_are_one():
    merged = sequences(trajectory([turn([1, 2], [50, 51]), turn([1, 2, 50, 51, 4], [52])]))
    assert len(merged) == 1
    assert merged[0].token_ids_t.tolist() == [1, 2, 50, 51, 4, 52]
    assert merged[0].completion_mask_t.tolist() == [0, 0, 1, 1, 0, 1]
    np.testing.assert_array_equal(
        merged[0].behaviour_logprobs_t, [0, 0, -50 / 8, -51 / 8, 0, -52 / 8]
    )
    dtypes = [array.dtype for name, array in vars(merged[0]).items() if name.endswith("_t")]
    assert dtypes == [np.int32, np.float32, np.float32, np.int32]


def test_sequences_fork_where_the_context_drops_something():
    turns = [turn([1, 2], [50]), turn([1, 50, 4], [51]), turn([1, 50, 4, 51, 4], [52])]
    forked = sequences(trajectory(turns))
    assert [s.token_ids_t.tolist() for s in forked] == [[1, 2, 50], [1, 50, 4, 51, 4, 52]]
    assert [s.completion_mask_t.tolist() for s in forked] == [[0, 0, 1], [0, 0, 0, 1, 0, 1]]


def test_sequences_fork_where_the_same_tokens_stand_for_another_screenshot():
    turns = [turn([9, 9], [50], keys=("a",)), turn([9, 9, 50, 9, 9], [51], keys=("b", "c"))]
    assert [s.image_keys for s in sequences(trajectory(turns))] == [("a",), ("b", "c")]


def test_sequences_follow_the_ten_slot_policy_of_the_design():
    """Ten slots, five dropped at once: twenty turns are 3 sequences and 30 image slots."""
    turns, kept, sampled = [], [], []
    for number in range(20):
        if len(kept) == 10:
            kept = kept[5:]
        kept.append(number)
        context = [1]
        for older in range(number + 1):
            context += [PLACEHOLDER] if older in kept else [3]
            context += sampled[older] if older < number else []
        sampled.append([20 + number])
        turns.append(turn(context, sampled[-1], tuple(str(k) for k in kept)))
    forked = sequences(trajectory(turns))
    assert len(forked) == 3
    assert sum(len(s.image_keys) for s in forked) == 30


@st.composite
def episodes(draw) -> list[Turn]:
    """Turns that continue, drop the oldest tokens, or start over."""
    ids = st.lists(st.integers(10, 99), min_size=1, max_size=3)
    turns = [turn(draw(ids), draw(ids))]
    for _ in range(draw(st.integers(0, 4))):
        before = [*turns[-1].context_ids.tolist(), *turns[-1].token_ids.tolist()]
        kept = draw(st.sampled_from([before, before, before[1:], []]))
        turns.append(turn(kept + draw(ids), draw(ids)))
    return turns


@settings(deadline=None)
@given(episodes())
def test_sequences_hold_every_sampled_token_once_after_its_own_context(turns):
    found = sequences(trajectory(turns))
    assert len(found) <= len(turns)
    masked = [s.token_ids_t[s.completion_mask_t > 0] for s in found]
    assert np.concatenate(masked).tolist() == [i for t in turns for i in t.token_ids.tolist()]
    number = 0
    for sequence in found:
        filled = 0
        while number < len(turns) and filled < len(sequence.token_ids_t):
            context, sampled = turns[number].context_ids, turns[number].token_ids
            end = len(context) + len(sampled)
            assert sequence.token_ids_t[:end].tolist() == [*context, *sampled]
            assert sequence.completion_mask_t[filled : len(context)].sum() == 0
            assert sequence.completion_mask_t[len(context) : end].all()
            np.testing.assert_array_equal(
                sequence.behaviour_logprobs_t[len(context) : end], turns[number].logprobs
            )
            filled, number = end, number + 1
        assert filled == len(sequence.token_ids_t)
    assert number == len(turns)


# ---------------------------------------------------------------- the batch, by hand


def test_batch_of_one_image_is_the_table_of_the_design():
    """The ten-token row of types.TrainBatch, with the screenshot in the second image row."""
    first, second = png(1), png(2)
    batch = batch_of(
        [
            trajectory([turn([1, 9, 9], [50], (first[0],))], dict([first])),
            trajectory([turn([1, 2, 9, 9, 3, 4], [50, 51, 52], (second[0],))], dict([second])),
        ],
        [-0.5, 2.0],
        row_lengths=(10,),
    )
    assert batch.token_ids_bt[1].tolist() == [1, 2, 9, 9, 3, 4, 50, 51, 52, 0]
    assert batch.segment_ids_bt[1].tolist() == [1] * 9 + [0]
    assert batch.completion_mask_bt[1].tolist() == [0] * 6 + [1] * 3 + [0]
    assert batch.vision_index_bt[1].tolist() == [-1, -1, 2, 3, -1, -1, -1, -1, -1, -1]
    assert batch.advantages_bt[1].tolist() == [0] * 6 + [2] * 3 + [0]
    assert batch.advantages_bt[0].tolist() == [0, 0, 0, -0.5, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(
        batch.behaviour_logprobs_bt[1], [*[0] * 6, -50 / 8, -51 / 8, -52 / 8, 0]
    )
    # Text counts on; the image is one row of two visual tokens; text goes on after its largest.
    assert batch.positions_abt[:, 1].tolist() == [
        [0, 1, 2, 2, 4, 5, 6, 7, 8, 0],
        [0, 1, 2, 2, 4, 5, 6, 7, 8, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 0],
    ]
    assert batch.segment_ids_bt[2:].sum() == 0 and (batch.vision_index_bt[2:] == -1).all()
    assert batch.sampled_index_bs[:2, :4].tolist() == [[3, -1, -1, -1], [6, 7, 8, -1]]
    assert batch.sampled_index_bs.shape == (4, 10) and (batch.sampled_index_bs[2:] == -1).all()
    assert batch.prefix_segments_bt is None


def test_batch_images_are_the_processed_screenshots_padded():
    small, large = png(1), png(2, 56, 56)
    turns = [turn([9, 9, 1, 9, 9, 9, 9], [50], (small[0], large[0]))]
    batch = batch_of([trajectory(turns, dict([small, large]))])
    assert batch.vision["patches_ipc"].shape == (2, 16, 588)
    for row, (_, data) in enumerate([small, large]):
        image = decode_image(data)
        patches_pc, grid_thw = cut_image(image, IMAGE_CFG)
        count = len(patches_pc)
        np.testing.assert_array_equal(batch.vision["patches_ipc"][row, :count], patches_pc)
        np.testing.assert_array_equal(
            batch.vision["patch_positions_ip2"][row, :count], patch_positions(grid_thw, 2)
        )
        assert batch.vision["patch_segments_ip"][row].tolist() == [1] * count + [0] * (16 - count)
        assert (batch.vision["patches_ipc"][row, count:] == 0).all()
    # 16 patches a row are 4 visual tokens: the second screenshot's begin at row 4 of the table.
    assert batch.vision_index_bt[0, :7].tolist() == [0, 1, -1, 4, 5, 6, 7]


def test_batch_holds_a_screenshot_of_many_turns_and_episodes_once():
    shared, own = png(1), png(2)
    growing = [
        turn([9, 9], [50], (shared[0],)),
        turn([9, 9, 50, 9, 9], [51], (shared[0], shared[0])),  # nothing changed on the screen
    ]
    forking = [turn([1, 9, 9], [52], (own[0],)), turn([2, 9, 9], [53], (shared[0],))]
    batch = batch_of(
        [trajectory(growing, dict([shared])), trajectory(forking, dict([own, shared]))]
    )
    assert (batch.vision["patch_segments_ip"].sum(axis=1) > 0).sum() == 2
    assert batch.vision_index_bt[0, :5].tolist() == [0, 1, -1, 0, 1]
    assert batch.vision_index_bt[1:3, :3].tolist() == [[-1, 2, 3], [-1, 0, 1]]


def test_batch_without_screenshots_has_only_padding_in_its_image_rows():
    batch = batch_of([trajectory([turn([1], [50])])])
    assert batch.vision["patches_ipc"].shape == (2, 8, 588)
    assert batch.vision["patch_segments_ip"].sum() == 0


def test_batch_advantage_per_token_follows_the_turns_over_a_fork():
    forking = trajectory([turn([1], [50, 51]), turn([2], [52])])
    batch = batch_of([forking], [np.array([1, 2, 3], np.float32)])
    assert batch.advantages_bt[:2, :3].tolist() == [[0, 1, 2], [0, 3, 0]]


@pytest.mark.parametrize(("context_tokens", "row_length"), [(11, 12), (12, 24), (40, 48)])
def test_batch_takes_the_shortest_rows_that_fit(context_tokens, row_length):
    batch = batch_of([trajectory([turn([1] * context_tokens, [50])])])
    assert batch.token_ids_bt.shape == (4, row_length)


@pytest.mark.parametrize(("images", "image_rows"), [(0, 2), (1, 2), (2, 2), (3, 4), (5, 8)])
def test_batch_takes_the_fewest_image_rows_that_fit(images, image_rows):
    shots = [png(seed) for seed in range(images)]
    turns = [turn([9, 9, 1] * images, [50], tuple(key for key, _ in shots))]
    assert batch_of([trajectory(turns, dict(shots))]).vision["patches_ipc"].shape[0] == image_rows


# ---------------------------------------------------------------- packing


def test_pack_puts_the_long_first_and_the_rest_where_they_fill_most():
    lengths = [4, 7, 5, 6]  # of 12: 7 + 5, and 6 + 4
    batch = batch_of([trajectory([turn([1] * (n - 1), [50 + n])]) for n in lengths], pack=True)
    assert batch.segment_ids_bt.tolist()[:2] == [[1] * 7 + [2] * 5, [1] * 6 + [2] * 4 + [0] * 2]
    assert batch.segment_ids_bt[2:].sum() == 0
    assert batch.positions_abt[0, 0].tolist() == [*range(7), *range(5)]  # each from 0
    assert batch.sampled_index_bs[:2, :3].tolist() == [[6, 11, -1], [5, 9, -1]]


def test_pack_takes_the_row_length_that_pads_least():
    many = [trajectory([turn([1] * 9, [50])]) for _ in range(8)]
    # One batch of 4 x 24 or two of 4 x 12: the same slots, and fewer passes.
    assert [b.token_ids_bt.shape for b in batches_of(many, pack=True)] == [(4, 24)]
    assert [b.token_ids_bt.shape for b in batches_of(many[:4], pack=True)] == [(4, 12)]


def test_more_records_than_rows_or_screenshots_make_more_batches_and_lose_nothing():
    shots = [png(seed) for seed in range(6)]
    records = [
        trajectory([turn([1] * n + [9, 9], [50 + n], (key,))], {key: data})
        for n, (key, data) in enumerate(shots)
    ]
    by_rows = batches_of(records, rows=4, row_lengths=(16,))
    assert [np.count_nonzero(b.segment_ids_bt.sum(axis=1)) for b in by_rows] == [4, 2]
    by_images = batches_of(records, rows=4, row_lengths=(16,), image_rows=(1, 2))
    assert [np.count_nonzero(b.segment_ids_bt.sum(axis=1)) for b in by_images] == [2, 2, 2]
    for batches in (by_rows, by_images):
        tokens = np.concatenate([b.token_ids_bt[b.completion_mask_bt > 0] for b in batches])
        assert tokens.tolist() == [50, 51, 52, 53, 54, 55]
        for batch in batches:
            row, place = np.nonzero(batch.vision_index_bt >= 0)
            assert batch.vision["patch_segments_ip"][batch.vision_index_bt[row, place] // 2].all()


def group(prompt: list[int], answers: list[list[int]], shot=None) -> list[Trajectory]:
    keys, images = ((shot[0],), dict([shot])) if shot else ((), {})
    return [trajectory([turn(prompt, answer, keys)], images) for answer in answers]


def test_share_prompts_is_the_table_of_the_design():
    """The second row of types.TrainBatch: a prompt of four tokens, two answers."""
    batch = batch_of(
        group([1, 2, 3, 4], [[50, 51, 52], [60, 61]]),
        [2.0, -1.0],
        row_lengths=(10,),
        sampled_lengths=(6, 8),
        pack=True,
        share_prompts=True,
    )
    assert batch.token_ids_bt[0].tolist() == [1, 2, 3, 4, 50, 51, 52, 4, 60, 61]
    assert batch.segment_ids_bt[0].tolist() == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert batch.prefix_segments_bt[0].tolist() == [1] * 10
    assert batch.positions_abt[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5]
    assert batch.completion_mask_bt[0].tolist() == [0] * 4 + [1] * 3 + [0] + [1] * 2
    assert batch.advantages_bt[0].tolist() == [0] * 4 + [2] * 3 + [0] + [-1] * 2
    assert batch.sampled_index_bs[0].tolist() == [4, 5, 6, 8, 9, -1]


def test_share_prompts_only_where_the_same_screenshot_stands_behind_the_same_tokens():
    one, other = png(1), png(2)
    records = group([9, 9, 1, 2], [[50], [51]], one) + group([9, 9, 1, 2], [[52], [53]], other)
    shared = batch_of(records, row_lengths=(16,), pack=True, share_prompts=True)
    # Two prompts of three tokens, and four sequences of two.
    assert np.count_nonzero(shared.segment_ids_bt) == 2 * 3 + 4 * 2
    alone = batch_of(records[1:3], row_lengths=(16,), pack=True, share_prompts=True)
    assert np.count_nonzero(alone.segment_ids_bt) == 2 * 5
    np.testing.assert_array_equal(alone.prefix_segments_bt, alone.segment_ids_bt)


def test_share_prompts_of_questions_about_one_screenshot_holds_the_screenshot_once():
    """Two questions, and two members of a group with a third: each prompt is what it was alone."""
    shot = png(1)
    records = [
        *group([8, 9, 9, 1, 2], [[50, 51]], shot),
        *group([8, 9, 9, 3, 4, 5], [[60]], shot),
        *group([8, 9, 9, 6, 7], [[52], [53]], shot),
        *group([8, 9, 9, 1, 2], [[54]], png(2)),
    ]
    batch = batch_of(records, row_lengths=(40,), pack=True, share_prompts=True)
    ids_t, segments_t = batch.token_ids_bt[0], batch.segment_ids_bt[0]
    prefixes_t = batch.prefix_segments_bt[0]
    held = {
        tuple(ids_t[at].tolist()): (segments_t[at] - prefix + 1).tolist()
        for prefix in set(prefixes_t[segments_t > 0])
        for at in [(prefixes_t == prefix) & (segments_t > 0)]
    }
    assert held == {
        # The group's prompt whole; what the two others have in common ends with the screenshot.
        (8, 9, 9, 6, 7, 52, 7, 53): [1, 1, 1, 1, 2, 2, 3, 3],
        (8, 9, 9, 1, 2, 50, 51, 3, 4, 5, 60): [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
        (8, 9, 9, 1, 2, 54): [1] * 6,
    }
    assert (batch.vision_index_bt[0] >= 0).sum() == 3 * 2
    # A question's instruction goes on where the screenshot ended.
    at = np.flatnonzero(np.isin(ids_t, [3, 1]))
    alone = batch_of(records[1:2], row_lengths=(40,), pack=True, share_prompts=True)
    wanted = alone.positions_abt[:, 0, 3]
    for column in at:
        np.testing.assert_array_equal(batch.positions_abt[:, 0, column], wanted)


def test_share_prompts_of_a_group_that_fills_more_than_a_row_repeats_the_prompt():
    records = group([1, 2, 3, 4, 5], [[50 + n] * 3 for n in range(4)])
    batch = batch_of(records, row_lengths=(12,), pack=True, share_prompts=True)
    for b in range(2):
        assert batch.token_ids_bt[b, :4].tolist() == [1, 2, 3, 4]
        assert batch.segment_ids_bt[b].tolist() == [1] * 4 + [2] * 4 + [3] * 4
        assert batch.prefix_segments_bt[b].tolist() == [1] * 12
    assert batch.segment_ids_bt[2:].sum() == 0


def test_share_prompts_stops_before_what_was_sampled():
    """Two members sampled the same first token: it is trained for each of them."""
    later = [turn([1, 2, 3, 50, 4], [60]), turn([1, 2, 3, 50, 5], [61])]
    records = [trajectory([turn([1, 2, 3], [50]), second]) for second in later]
    batch = batch_of(records, [1.0, -1.0], row_lengths=(16,), pack=True, share_prompts=True)
    assert batch.token_ids_bt[0].tolist() == [1, 2, 3, 50, 4, 60, 3, 50, 5, 61] + [0] * 6
    assert batch.advantages_bt[0].tolist() == [0, 0, 0, 1, 0, 1, 0, -1, 0, -1] + [0] * 6


def test_pack_fills_nineteen_slots_of_twenty_on_a_mix_of_lengths():
    """Lengths drawn at random, from one short turn to ten long ones: not recorded by an actor."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(400):
        context, turns = [1] * int(rng.integers(20, 60)), []
        for _ in range(min(int(rng.geometric(0.3)), 10)):
            sampled = [50] * int(rng.integers(5, 30))
            turns.append(turn(list(context), sampled))
            context += [*sampled, *[1] * int(rng.integers(30, 90))]
        records.append(trajectory(turns))
    batches = batches_of(records, rows=8, row_lengths=(1536,), pack=True)
    filled = sum(np.count_nonzero(b.segment_ids_bt) for b in batches)
    assert filled == sum(len(s.token_ids_t) for r in records for s in sequences(r))
    slots = (
        sum(b.segment_ids_bt.size for b in batches[:-1])
        + np.count_nonzero(batches[-1].segment_ids_bt.any(axis=1)) * 1536
    )
    assert filled / slots >= 0.95


@settings(deadline=None, max_examples=40)
@given(st.lists(episodes(), min_size=1, max_size=5), st.booleans())
def test_batch_loses_and_adds_no_token_packed_or_not(episode_turns, pack):
    trajectories = [trajectory(turns) for turns in episode_turns]
    advantages = [float(number + 1) for number in range(len(trajectories))]
    rows = sum(len(sequences(t)) for t in trajectories)
    batch = batch_of(trajectories, advantages, rows=rows, row_lengths=(64,), pack=pack)

    expected, found = [], []
    for one, advantage in zip(trajectories, advantages, strict=True):
        for s in sequences(one):
            mask = s.completion_mask_t
            arrays = (s.token_ids_t, mask, s.behaviour_logprobs_t, mask * advantage)
            expected.append([array.tolist() for array in arrays])
    for row in range(rows):
        for segment in range(1, batch.segment_ids_bt[row].max() + 1):
            inside = batch.segment_ids_bt[row] == segment
            assert np.ptp(np.flatnonzero(inside)) == inside.sum() - 1  # one stretch
            assert batch.positions_abt[:, row, inside].tolist() == [list(range(inside.sum()))] * 3
            names = "token_ids", "completion_mask", "behaviour_logprobs", "advantages"
            found.append([getattr(batch, f"{n}_bt")[row, inside].tolist() for n in names])
    assert sorted(found) == sorted(expected)
    padding = batch.segment_ids_bt == 0
    for name in ("token_ids_bt", "completion_mask_bt", "behaviour_logprobs_bt", "advantages_bt"):
        assert not getattr(batch, name)[padding].any(), name


def test_pack_changes_no_sequence_with_screenshots():
    shots = [png(seed) for seed in range(3)]
    episodes_ = [
        trajectory([turn([1] * n + [9, 9], [50 + n], (key,))], {key: data})
        for n, (key, data) in enumerate(shots, start=1)
    ]
    apart, packed = (batch_of(episodes_, row_lengths=(16,), pack=pack) for pack in (False, True))
    start = 0
    for number in (2, 1, 0):  # the longest first
        length = number + 4
        visual = [packed.vision_index_bt[0, start:], apart.vision_index_bt[number]]
        for index_t, batch in zip(visual, (packed, apart), strict=True):
            (at,) = np.nonzero(index_t[:length] >= 0)
            assert at.tolist() == [number + 1, number + 2]
            row, token = np.divmod(index_t[at], 2)  # 8 patches a row are 2 visual tokens
            assert token.tolist() == [0, 1] and row[0] == row[1]
            image = decode_image(shots[number][1])
            patches_pc, _ = cut_image(image, IMAGE_CFG)
            np.testing.assert_array_equal(batch.vision["patches_ipc"][row[0]], patches_pc)
        for name in ("token_ids", "completion_mask"):
            np.testing.assert_array_equal(
                getattr(packed, f"{name}_bt")[0, start : start + length],
                getattr(apart, f"{name}_bt")[number, :length],
            )
        np.testing.assert_array_equal(
            packed.positions_abt[:, 0, start : start + length],
            apart.positions_abt[:, number, :length],
        )
        start += length


# ---------------------------------------------------------------- what does not fit

ONE, TWO = png(1), png(2)


def with_image(**changes) -> Trajectory:
    one = trajectory([turn([9, 9], [50], (ONE[0],))], dict([ONE]))
    return dataclasses.replace(one, **changes)


@pytest.mark.parametrize(
    ("trajectories", "changes", "message"),
    [
        (
            [trajectory([turn([1] * 48, [50])])],
            {},
            r"49 tokens, learner\.batch\.row_lengths=\(12, 24, 48\) accepts at most 48",
        ),
        (
            [trajectory([turn([9, 9, 1, 9, 9], [50], (ONE[0], TWO[0]))], dict([ONE, TWO]))],
            {"image_rows": (1,)},
            r"2 distinct screenshots .* learner\.batch\.image_rows=\(1,\) accepts at most 1: .*, "
            r"e\.g\. 2",
        ),
        (
            [with_image()],
            {"patch_lengths": (4,)},
            r"8 patches .* learner\.batch\.patch_lengths=\(4,\) accepts at most 4",
        ),
        ([with_image()], {"patch_lengths": (10,)}, "row of 10 patches.*to multiples of 4"),
    ],
)
def test_batch_that_fits_no_shape_raises_config_error(trajectories, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        batch_of(trajectories, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_image(images={ONE[0]: b"no image"}), f"e0: image {ONE[0][:16]}"),
        (with_image(image_tokens={ONE[0]: 4}), "read image .* as 4 visual tokens, .* give 2"),
        (
            with_image(turns=(turn([9, 9, 9], [50], (ONE[0],)),)),
            r"runs of .* \[3\], expected \[2\]",
        ),
        (with_image(turns=(turn([9, 1, 9], [50], (ONE[0],)),)), r"runs of .* \[1, 1\]"),
    ],
)
def test_batch_of_a_record_that_contradicts_itself_raises_record_error(broken, message):
    with pytest.raises(RecordError, match=message):
        batch_of([broken])


def test_turn_ids_are_a_turns_own_within_its_row():
    two = trajectory([turn([1], [50, 51]), turn([1, 50, 51, 2], [52])])
    batch = batch_of([two, trajectory([turn([3], [53, 54])])], row_lengths=(12,), pack=True)
    assert batch.token_ids_bt[0].tolist() == [1, 50, 51, 2, 52, 3, 53, 54, 0, 0, 0, 0]
    assert batch.turn_ids_bt[0].tolist() == [0, 1, 1, 0, 2, 0, 3, 3, 0, 0, 0, 0]
    later = batch_of([trajectory([turn([1], [50]), turn([2], [51])])], pack=True)
    assert batch_ids(later) == [1, 2]  # dense, although the second sequence begins with turn 1


def batch_ids(batch: TrainBatch) -> list[int]:
    return batch.turn_ids_bt[batch.turn_ids_bt > 0].tolist()


@settings(deadline=None, max_examples=40)
@given(st.lists(episodes(), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_gather_reads_what_fill_put_at_every_sampled_token(episode_turns, pack, share):
    """Rows, forks, packing and shared prompts: a token's number comes back to its trajectory."""
    records = [trajectory(turns) for turns in episode_turns]
    sampled = [[i for t in record.turns for i in t.token_ids.tolist()] for record in records]
    batches = batches_of(
        records, rows=2, row_lengths=(64,), pack=pack, share_prompts=share and pack
    )
    ids = gather(batches, [b.token_ids_bt for b in batches], [len(of) for of in sampled])
    assert [of.tolist() for of in ids] == sampled
    rng = np.random.default_rng(0)
    values = [rng.random(len(of)).astype(np.float32) for of in sampled]
    filled = fill(batches, weights_bt=values)
    back = gather(filled, [b.weights_bt for b in filled], [len(of) for of in sampled])
    for got, expected in zip(back, values, strict=True):
        np.testing.assert_array_equal(got, expected)
    for batch in filled:
        assert not batch.weights_bt[batch.completion_mask_bt == 0].any()


def test_batch_with_too_few_advantages_raises_config_error():
    with pytest.raises(ConfigError, match=r"shape \(1,\), expected one float or \[2\]"):
        batch_of([trajectory([turn([1], [50, 51])])], [np.zeros(1, np.float32)])


@pytest.mark.parametrize(
    "changes", [{"rows": 0}, {"row_lengths": ()}, {"row_lengths": (8, 4)}, {"image_rows": (0, 2)}]
)
def test_batch_config_that_is_impossible_raises_config_error(changes):
    with pytest.raises(ConfigError, match=f"learner.batch.{next(iter(changes))}"):
        dataclasses.replace(CFG, **changes)
