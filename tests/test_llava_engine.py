"""Greedy tokens of the engine against transformers' generate, with LLaVA-1.5."""

import pytest

from tests import family_engine


@pytest.mark.parametrize("config", ["llava_odd", "llava_last"])
def test_engine_chunks_inside_images_and_reused_prefixes_give_the_tokens_of_generate(config):
    family_engine.assert_greedy_tokens_equal_generate(config)


def test_engine_logprobs_equal_the_learners():
    family_engine.assert_logprobs_equal_the_learners("llava_odd")
