"""Florence-2's forward pass against transformers, in float32; packed rows, shared prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import family_world as world
from tests.family_checks import assert_close_to_largest
from tests.oracles import florence2_torch
from uirl_jax.families.border import TokenRows
from uirl_jax.families.florence2 import model as own


@jax.jit
def _all_outputs(model, rows, vision):
    visual_md = model.encode_images(vision)
    return (
        own.vision_block_outputs(model, vision),
        visual_md,
        own.text_block_outputs(model, rows, visual_md),
        model.logits(model.hidden(rows, visual_md)),
    )


@pytest.mark.parametrize("config", florence2_torch.CONFIGS)
@pytest.mark.parametrize("name", world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    policy = world.policy_of(config)
    case = world.make_case(policy.inputs, name)
    vision, visual_md, text, logits_btv = jax.tree.map(
        np.asarray, _all_outputs(world.merged(policy), case.rows, case.vision)
    )
    for array in jax.tree.leaves((vision, text, logits_btv)):
        assert np.isfinite(array).all()  # padding holds nothing of use, but nothing that spreads
    blocks_ipd = [block_ipd for stage in vision for block_ipd in stage]
    done = 0
    for row, (length, first) in enumerate(zip(case.lengths, case.firsts, strict=True)):
        ids_t = case.rows.token_ids_bt[row, :length]
        images = (ids_t == world.IMAGE_TOKEN).sum() // policy.inputs.tokens
        own_images = slice(done, done + images)
        pixels = world.pixels_of(policy.inputs, case.screens[own_images])
        expected = florence2_torch.run_row(world.reference_of(config), ids_t, pixels)
        assert len(expected.vision_lipd) == len(blocks_ipd) * bool(pixels)
        for layer, block_ipd in enumerate(expected.vision_lipd):
            got_ipd = blocks_ipd[layer][own_images]
            assert_close_to_largest(got_ipd, block_ipd, f"vision block {layer}")
        if pixels:
            rows_m = case.table_rows[own_images.start * policy.inputs.tokens :]
            got_md = visual_md[rows_m[: len(expected.visual_md)]]
            assert_close_to_largest(got_md, expected.visual_md, "visual tokens")
        encoder_lbtd, decoder_lbtd = text
        for layer, block_td in enumerate(expected.encoder_lsd):
            got_td = encoder_lbtd[layer, row, :first]
            assert_close_to_largest(got_td, block_td, f"row {row} after encoder block {layer}")
        for layer, block_td in enumerate(expected.decoder_ltd):
            got_td = decoder_lbtd[layer, row, first:length]
            assert_close_to_largest(got_td, block_td, f"row {row} after decoder block {layer}")
        got_tv = logits_btv[row, first:length]
        assert_close_to_largest(got_tv, expected.logits_tv, f"logits of row {row}")
        done += images
