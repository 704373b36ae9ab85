"""Qwen3-VL's forward pass against transformers, in float32; packed rows, shared prompts."""

import jax
import numpy as np
import pytest

from tests import qwen3_vl_world as world
from tests.oracles import qwen3_vl_torch
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen import model as qwen
from uirl_jax.families.qwen3_vl import model as qwen3_vl

CONFIGS = [*qwen3_vl_torch.CONFIGS]


@jax.jit
def all_outputs(model, rows, vision):
    visual_me = model.encode_images(vision)
    return (
        qwen3_vl.vision_block_outputs(model, vision),
        visual_me,
        qwen.block_outputs(model, rows, visual_me),
        model.logits(model.hidden(rows, visual_me)),
    )


def assert_close_to_largest(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Within 1e-5 of the tensor's largest value; 1e-6 is usual, so a wrong angle cannot hide."""
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert worst < 1e-5, f"{what}: {worst:.1e} of the largest value"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    policy = world.policy_of(config)
    case = world.make_case(policy.inputs, name)
    rows, width = len(case.lengths), max(case.lengths)
    expected = qwen3_vl_torch.run(
        world.reference_of(config),
        case.rows.token_ids_bt[:rows, :width],
        case.rows.segment_ids_bt[:rows, :width],
        world.pixels_of(policy.inputs, case.screens),
        [screen.layout for screen in case.screens],
    )
    vision_lipd, visual_me, text_lbtd, logits_btv = map(
        np.asarray, all_outputs(world.merged(policy), case.rows, case.vision)
    )
    # Padding holds nothing of use, but nothing that spreads either.
    assert np.isfinite(vision_lipd).all()
    assert np.isfinite(text_lbtd).all()
    if case.screens:
        vision_lpd = np.concatenate([vision_lipd[:, row, span] for row, span in case.spans], axis=1)
        for layer, expected_pd in enumerate(expected.vision_blocks_lpd):
            assert_close_to_largest(vision_lpd[layer], expected_pd, f"vision block {layer}")
        dim = policy.cfg.hidden_size
        levels = 1 + len(policy.cfg.vision.deepstack_visual_indexes)
        assert visual_me.shape[1] == levels * dim
        for level in range(levels):
            columns = slice(level * dim, (level + 1) * dim)
            assert_close_to_largest(
                visual_me[case.table_rows, columns],
                expected.visual_me[:, columns],
                f"vector {level} of visual tokens",
            )
    for row, length in enumerate(case.lengths):
        np.testing.assert_array_equal(
            case.rows.positions_abt[:, row, :length], expected.positions_3bt[:, row, :length]
        )
        for layer, expected_btd in enumerate(expected.text_blocks_lbtd):
            assert_close_to_largest(
                text_lbtd[layer, row, :length],
                expected_btd[row, :length],
                f"row {row} after text block {layer}",
            )
        assert_close_to_largest(
            logits_btv[row, :length], expected.logits_btv[row, :length], f"logits of row {row}"
        )


def test_hidden_packed_segments_with_screens_equal_rows_of_their_own():
    policy = world.policy_of("plain")
    model = world.merged(policy)
    case = world.make_case(policy.inputs, "two_rows_with_padding")
    visual_me = jax.jit(type(model).encode_images)(model, case.vision)
    hidden = jax.jit(type(model).hidden)
    alone_btd = hidden(model, case.rows, visual_me)
    first, second = case.lengths
    together = TokenRows(
        *(
            np.concatenate([array[..., 0, :first], array[..., 1, :second]], axis=-1)[..., None, :]
            for array in case.rows[:4]
        )
    )
    together.segment_ids_bt[0, first:] = 2
    packed_btd = hidden(model, together, visual_me)
    np.testing.assert_allclose(packed_btd[0, :first], alone_btd[0, :first], atol=1e-5)
    np.testing.assert_allclose(packed_btd[0, first:], alone_btd[1, :second], atol=1e-5)


def test_hidden_two_replies_behind_one_shared_prompt_with_a_screen_equal_two_rows():
    """[prompt 1 2], both replies attend to the prompt, whose screen adds its levels once."""
    policy = world.policy_of("odd")
    model = world.merged(policy)
    case = world.make_case(policy.inputs, "one_image")
    visual_me = jax.jit(type(model).encode_images)(model, case.vision)
    hidden = jax.jit(type(model).hidden)
    prompt = case.lengths[0]
    rng = np.random.default_rng(3)
    replies = [rng.integers(3, 280, count).astype(np.int32) for count in (4, 6)]
    next_position = case.rows.positions_abt[:, 0, :prompt].max() + 1
    alone, parts = [], []
    for number, reply in enumerate(replies):
        part = TokenRows(
            reply[None],
            np.broadcast_to(next_position + np.arange(len(reply)), (3, 1, len(reply))),
            np.full((1, len(reply)), 2 + number),
            np.full((1, len(reply)), -1, np.int32),
        )
        parts.append(part)
        same_segment = part._replace(segment_ids_bt=np.ones_like(reply)[None])
        row = joined([prompt_of(case, prompt), same_segment])
        alone.append(hidden(model, row, visual_me)[0, prompt:])
    row = joined([prompt_of(case, prompt), *parts])
    prefix_bt = np.ones_like(row.segment_ids_bt)
    shared_btd = hidden(model, row._replace(prefix_segments_bt=prefix_bt), visual_me)
    np.testing.assert_allclose(shared_btd[0, prompt : prompt + 4], alone[0], atol=1e-5)
    np.testing.assert_allclose(shared_btd[0, prompt + 4 :], alone[1], atol=1e-5)


def prompt_of(case: world.Case, length: int) -> TokenRows:
    return TokenRows(*(array[..., :1, :length] for array in case.rows[:4]))


def joined(parts: list[TokenRows]) -> TokenRows:
    return TokenRows(
        *(np.concatenate([part[field] for part in parts], axis=-1) for field in range(4))
    )
