"""How trajectories are laid out in rows never changes a loss or a gradient."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests import step_world
from tests.packed_records import INPUTS, LAYOUTS, records
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.weights import token_weights
from uirl_jax.shards import batching


@functools.cache
def gradients(layout: str, ratio: str = "token") -> tuple[Any, dict[str, float], int]:
    """Of the step's loss, its metrics, and the number of batches that the layout made."""
    graphdef, lora, frozen = step_world.make_model(targets=("all",))
    optimizer = learner_state.make_optimizer(step_world.OPTIMIZER, 10)
    cfg = PolicyLossConfig(kl_coefficient=0.1, ratio=ratio)
    step_cfg = learner_step.StepConfig(cfg, temperature=0.8, forbidden_ids=(3,))
    run = learner_step.make_steps(graphdef, optimizer, step_cfg)
    trajectories, advantages = records()
    batches = batching.make_batches(trajectories, inputs=INPUTS, cfg=LAYOUTS[layout])
    tokens = [sum(len(turn.token_ids) for turn in of.turns) for of in trajectories]
    batches = batching.fill(
        batches,
        advantages_bt=advantages,
        weights_bt=token_weights(tokens, "trajectory_mean"),
    )
    total = None
    for number, batch in enumerate(batches):
        arrays = learner_step.to_device(batch, None)
        scored = run.score((lora, None), frozen, arrays)
        one = run.policy_gradients(
            (lora, None), frozen, arrays, scored, (np.int32(0), np.int32(0), np.int32(number))
        )
        total = one if total is None else run.add(total, one)
    return jax.device_get(total[0]), learner_step.to_floats(total[1]), len(batches)


@pytest.mark.parametrize("ratio", ["token", "turn"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one sequence a row"])
def test_loss_and_gradients_of_any_layout_are_those_of_a_sequence_a_row(layout, ratio):
    expected, expected_sums, _ = gradients("one sequence a row", ratio)
    got, sums, _ = gradients(layout, ratio)
    assert sums["tokens"] == sum(len(t.token_ids) for r in records()[0] for t in r.turns)
    assert expected_sums["actor/kl_loss"] > 1 and expected_sums["offpolicy/drift"] > 100
    for name, value in expected_sums.items():
        assert math.isfinite(value), name
        assert sums[name] == pytest.approx(value, rel=1e-5, abs=1e-4), name
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        atol = 1e-5 * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_layouts_of_the_test_above_do_what_they_say():
    assert [gradients(layout)[2] > 1 for layout in LAYOUTS] == [False, False, False, False, True]
    trajectories, _ = records()
    slots = {}
    for layout in ("packed", "prompts shared"):
        (batch,) = batching.make_batches(trajectories, inputs=INPUTS, cfg=LAYOUTS[layout])
        slots[layout] = np.count_nonzero(batch.segment_ids_bt)
    # Nine of twelve prompts of 11 tokens are gone, and three of four screenshots with what is
    # before them, 9 tokens.
    assert slots["packed"] - slots["prompts shared"] == 9 * 11 + 3 * 9


def test_compiled_step_holds_no_array_of_rows_by_tokens_by_vocabulary(monkeypatch):
    """Of the optimized program, whatever its shape: the largest buffer is a chunk of logits."""
    cfg = dataclasses.replace(step_world.tiny_config(), vocab_size=8192)
    model = Qwen2VL(cfg, lora=LoraConfig(rank=4), rngs=nnx.Rngs(0))
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    optimizer = learner_state.make_optimizer(step_world.OPTIMIZER, 10)
    batch = step_world.make_batch(rows=4, tokens=48)
    sampled = batch.sampled_index_bs.shape[1]  # all but the prompt's
    assert sampled == 38
    arrays = learner_step.to_device(batch, None)

    def largest_elements(max_logits_bytes: int) -> int:
        monkeypatch.setattr(scoring, "MAX_LOGITS_BYTES", max_logits_bytes)
        run = learner_step.make_steps(graphdef, optimizer, learner_step.StepConfig())
        scored = run.score.lower((lora, None), frozen, arrays)
        at = (np.int32(0), np.int32(0), np.int32(0))
        gradients = run.policy_gradients.lower(
            (lora, None),
            frozen,
            arrays,
            jax.eval_shape(run.score, (lora, None), frozen, arrays),
            at,
        )
        texts = [lowered.compile().as_text() for lowered in (scored, gradients)]
        shapes = re.findall(r"\b(?:f|s|u|pred|bf)\d*\[([\d,]+)\]", "".join(texts))
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest_elements(2**30) == 4 * 38 * 8192
    # 7 tokens of 4 rows; the embedding itself, 32 wide, is 8192 * 32.
    assert largest_elements(4 * 4 * 7 * 8192) == max(4 * 7 * 8192, 8192 * 32)
