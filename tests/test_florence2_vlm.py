"""VLM.logits of rows for both of Florence-2's towers, padded on the left, against transformers."""

import dataclasses

import numpy as np
import pytest

import uirl_jax
from tests import family_world as world
from tests.oracles import florence2_torch
from uirl_jax.errors import ContextError


def test_logits_of_prompts_and_answers_equal_transformers():
    vlm = uirl_jax.VLM.from_pretrained(world.directory_of("florence2_odd"))
    inputs = vlm.model.inputs
    screens = [world.screen_of(inputs, (3, 2), seed) for seed in (0, 1)]
    pixels = world.pixels_of(inputs, screens)
    rng = np.random.default_rng(0)
    bos, end = florence2_torch.BOS, florence2_torch.END
    ids_bt, mask_bt = (np.zeros((2, 24), np.int64) for _ in range(2))
    rows = []
    for row, (words, answer) in enumerate(((6, 4), (2, 3))):
        text = rng.integers(3, 280, words + answer).tolist()
        prompt = [*[world.IMAGE_TOKEN] * inputs.tokens, bos, *text[:words], end]
        ids = [*prompt, end, bos, *text[words:]]
        ids_bt[row, -len(ids) :], mask_bt[row, -len(ids) :] = ids, 1
        rows.append((np.array(ids), len(ids) - len(prompt)))
    got_btv = vlm.logits(ids_bt, mask_bt, pixel_values=np.stack(pixels))
    reference = world.reference_of("florence2_odd")
    for row, (ids, decoders) in enumerate(rows):
        expected_tv = florence2_torch.run_row(reference, ids, pixels[row : row + 1]).logits_tv
        assert len(expected_tv) == decoders
        difference = np.abs(got_btv[row, -decoders:] - expected_tv).max()
        assert difference < 1e-5 * np.abs(expected_tv).max()


def test_row_is_as_long_as_the_longer_of_its_towers():
    vlm = uirl_jax.VLM.from_pretrained(world.directory_of("florence2_odd"))
    end = florence2_torch.END
    prompt, answer = [florence2_torch.BOS, 7, 8, 9, end], [end, florence2_torch.BOS, 11, 12]
    ids_bt = np.array([[*prompt, *answer]])

    def logits(limit):
        cfg = dataclasses.replace(vlm.model.cfg, max_position_embeddings=limit)
        vlm.model = dataclasses.replace(vlm.model, cfg=cfg)
        return vlm.logits(ids_bt, np.ones_like(ids_bt))

    assert np.isfinite(logits(len(prompt))).all()
    with pytest.raises(ContextError, match=r"a context of 5 tokens: .* takes 4 positions"):
        logits(len(prompt) - 1)
