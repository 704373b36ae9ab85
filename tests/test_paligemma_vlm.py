"""VLM.logits of what PaliGemma's processor returns, padded on the left, against transformers."""

import numpy as np
import pytest
import torch

import uirl_jax
from tests import family_world as world


@pytest.mark.parametrize("config", ["paligemma_odd", "paligemma_2_odd"])
def test_logits_of_prompts_and_answers_equal_transformers(config):
    vlm = uirl_jax.VLM.from_pretrained(world.directory_of(config))
    inputs = vlm.model.inputs
    screens = [world.screen_of(inputs, (3, 2), seed) for seed in (0, 1)]
    rng = np.random.default_rng(0)
    ids_bt, mask_bt, types_bt = (np.zeros((2, 24), np.int64) for _ in range(3))
    for row, (words, answer) in enumerate(((6, 4), (2, 3))):
        text = rng.integers(3, 280, words + answer)
        ids = [*[world.IMAGE_TOKEN] * inputs.tokens, 2, *text]
        ids_bt[row, -len(ids) :], mask_bt[row, -len(ids) :] = ids, 1
        types_bt[row, -answer:] = 1
    given = {
        "input_ids": ids_bt,
        "attention_mask": mask_bt,
        "token_type_ids": types_bt,
        "labels": np.where(types_bt > 0, ids_bt, -100),
        "pixel_values": np.stack(world.pixels_of(inputs, screens)),
    }
    got_btv = vlm.logits(**given)
    # Given none, transformers 5.23 would count the padding's positions.
    positions = torch.tensor(mask_bt).cumsum(-1).clamp(min=1)
    with torch.no_grad():
        tensors = {name: torch.tensor(array) for name, array in given.items()}
        expected = world.reference_of(config)(**tensors, position_ids=positions).logits.numpy()
    real_bt = mask_bt > 0
    largest = np.abs(expected[real_bt]).max()
    assert np.abs(got_btv[real_bt] - expected[real_bt]).max() < 1e-5 * largest
    without = vlm.logits(**{n: a for n, a in given.items() if n not in ("token_type_ids",)})
    assert np.abs(without[real_bt] - expected[real_bt]).max() > 1e-3 * largest
