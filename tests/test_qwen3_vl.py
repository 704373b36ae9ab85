"""Qwen3-VL's forward and backward pass against transformers and peft, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests import qwen3_vl_world as world
from tests.oracles import qwen3_vl_torch
from uirl_jax.errors import ModelError
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen3_vl import model as qwen3_vl
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig
from uirl_jax.models import peft_adapters, scoring, weights
from uirl_jax.models.lora import LoraConfig, LoRAParam

CONFIGS = [*qwen3_vl_torch.CONFIGS]


@jax.jit
def all_outputs(model, rows, vision):
    visual_me = model.encode_images(vision)
    return (
        qwen3_vl.vision_block_outputs(model, vision),
        visual_me,
        qwen3_vl.block_outputs(model, rows, visual_me),
        model.logits(model.hidden(rows, visual_me)),
    )


def merged(policy) -> qwen3_vl.Qwen3VL:
    return nnx.merge(policy.graphdef, policy.trainable, policy.frozen)


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
        np.asarray, all_outputs(merged(policy), case.rows, case.vision)
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
