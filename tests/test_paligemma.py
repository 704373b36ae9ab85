"""PaliGemma's forward pass against transformers, in float32; packed rows, shared prompts."""

import pytest

from tests import family_checks, family_world
from tests.oracles import paligemma_torch


@pytest.mark.parametrize("config", paligemma_torch.CONFIGS)
@pytest.mark.parametrize("name", family_world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    family_checks.assert_forward_equals_transformers(name, config)


def test_hidden_packed_segments_with_screens_equal_rows_of_their_own():
    family_checks.assert_packed_segments_equal_rows_of_their_own("paligemma_odd")


def test_hidden_two_replies_behind_one_shared_prompt_with_a_screen_equal_two_rows():
    family_checks.assert_two_replies_behind_one_shared_prompt_equal_two_rows("paligemma_2_odd")
