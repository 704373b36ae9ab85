"""Idefics2's forward pass against transformers, in float32; packed rows, shared prompts."""

import jax
import pytest
from flax import nnx

from tests import family_checks, family_world
from tests.oracles import idefics2_torch


@pytest.mark.parametrize("config", idefics2_torch.CONFIGS)
@pytest.mark.parametrize("name", family_world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    family_checks.assert_forward_equals_transformers(name, config)


def test_hidden_packed_segments_with_screens_equal_rows_of_their_own():
    family_checks.assert_packed_segments_equal_rows_of_their_own("idefics2")


def test_hidden_two_replies_behind_one_shared_prompt_with_a_screen_equal_two_rows():
    family_checks.assert_two_replies_behind_one_shared_prompt_equal_two_rows("idefics2_odd")


def test_backward_pass_keeps_none_of_the_connectors_wide_arrays():
    """It recomputes them, as a block's; outside a scan XLA must be kept from undoing that."""
    policy = family_world.policy_of("idefics2_odd", remat="full")
    case = family_world.make_case(policy.inputs, "one_image")

    def encode(weights):
        model = nnx.merge(policy.graphdef, weights, policy.frozen)
        return model.encode_images(case.vision)

    kept = jax.eval_shape(lambda weights: jax.vjp(encode, weights)[1], policy.trainable)
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(kept)}
    patches, cfg = next(iter(case.vision.values())).shape[1], policy.cfg
    assert (patches, cfg.vision.hidden_size) in shapes  # what enters it
    assert (patches, cfg.intermediate_size) not in shapes
    assert "prevent_cse=True" in str(jax.make_jaxpr(encode)(policy.trainable))
