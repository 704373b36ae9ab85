"""PaliGemma's forward pass against transformers, in float32; packed rows, shared prompts."""

import jax
import numpy as np
import pytest

from tests import family_checks
from tests import family_world as world
from tests.oracles import paligemma_torch
from uirl_jax.families.border import TokenRows


@pytest.mark.parametrize("config", paligemma_torch.CONFIGS)
@pytest.mark.parametrize("name", world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    family_checks.assert_forward_equals_transformers(name, config)


def test_hidden_packed_segments_with_screens_equal_rows_of_their_own():
    family_checks.assert_packed_segments_equal_rows_of_their_own("paligemma_odd")


def test_hidden_two_replies_behind_one_shared_prompt_with_a_screen_equal_two_rows():
    family_checks.assert_two_replies_behind_one_shared_prompt_equal_two_rows("paligemma_2_odd")


@pytest.mark.parametrize("config", ["paligemma", "paligemma_2", "paligemma_2_odd"])
def test_hidden_sequences_that_begin_with_the_last_token_of_a_shared_prompt_equal_rows(config):
    """As the learner packs a group: [prompt without its last token | last, reply | last, reply]."""
    policy = world.policy_of(config)
    model = world.merged(policy)
    case = world.make_case(policy.inputs, "one_image")
    visual_me = jax.jit(type(model).encode_images)(model, case.vision)
    hidden = jax.jit(type(model).hidden)
    prompt, first, second = case.lengths[0], 4, 6
    ids = case.rows.token_ids_bt[0, :prompt]
    rng = np.random.default_rng(3)

    def row(parts: list[tuple[int, int, np.ndarray | None]]) -> TokenRows:
        """Of (segment, prefix segment, reply); None: the prompt without its last token."""
        columns = []
        for segment, prefix, reply in parts:
            tokens = ids[:-1] if reply is None else np.concatenate([ids[-1:], reply])
            start = 1 if reply is None else prompt
            length, sampled = len(tokens), np.arange(len(tokens)) > 0
            columns.append(
                (
                    tokens,
                    start + np.arange(length),
                    np.full(length, segment),
                    case.rows.vision_index_bt[0, start - 1 : start - 1 + length]
                    if reply is None
                    else np.full(length, -1),
                    np.full(length, prefix),
                    np.where(sampled & (reply is not None), segment, 0),
                )
            )
        arrays = [np.concatenate(c).astype(np.int32)[None] for c in zip(*columns, strict=True)]
        return TokenRows(arrays[0], arrays[1][None], *arrays[2:])

    replies = [rng.integers(3, 280, count).astype(np.int32) for count in (first, second)]
    shared = row([(1, 1, None), (2, 1, replies[0]), (3, 1, replies[1])])
    shared_td = hidden(model, shared, visual_me)[0]
    start = prompt - 1
    for reply in replies:
        alone = row([(1, 1, None), (1, 1, reply)])
        alone_td = hidden(model, alone, visual_me)[0]
        end = start + 1 + len(reply)
        np.testing.assert_allclose(shared_td[start:end], alone_td[prompt - 1 :], atol=2e-5)
        np.testing.assert_allclose(shared_td[: prompt - 1], alone_td[: prompt - 1], atol=2e-5)
        start = end
