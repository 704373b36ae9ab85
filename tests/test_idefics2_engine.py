"""Greedy tokens of the engine against transformers' generate, with Idefics2."""

import pytest

from tests import family_engine


@pytest.mark.parametrize("config", ["idefics2_odd", "idefics2_tied"])
def test_engine_chunks_inside_images_and_reused_prefixes_give_the_tokens_of_generate(config):
    family_engine.assert_greedy_tokens_equal_generate(config)


def test_engine_logprobs_equal_the_learners():
    family_engine.assert_logprobs_equal_the_learners("idefics2_odd")
