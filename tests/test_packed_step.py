"""How trajectories are laid out in rows never changes a loss or a gradient."""

import dataclasses
import functools
import hashlib
import io
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests import test_step
from uirl_jax import vision_inputs
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.models import qwen2_vl, scoring
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.weights import token_weights
from uirl_jax.shards import batching
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

IMAGE_CFG = vision_inputs.ImageConfig(patch_size=4, min_pixels=8 * 8)
PLACEHOLDER = 60
LAYOUTS = {
    "one sequence a row": batching.BatchConfig(
        rows=20, row_lengths=(64,), image_rows=(12,), patch_lengths=(16,), pack=False
    ),
    "packed": batching.BatchConfig(
        rows=8, row_lengths=(96,), sampled_lengths=(24,), image_rows=(12,), patch_lengths=(16,)
    ),
    "packed, longer rows and more padding": batching.BatchConfig(
        rows=6, row_lengths=(128,), image_rows=(16,), patch_lengths=(32,)
    ),
    "prompts shared": batching.BatchConfig(
        rows=4,
        row_lengths=(112,),
        sampled_lengths=(56,),
        image_rows=(12,),
        patch_lengths=(16,),
        share_prompts=True,
    ),
    "prompts shared, a row at a time": batching.BatchConfig(
        rows=1, row_lengths=(64,), image_rows=(4, 8), patch_lengths=(16,), share_prompts=True
    ),
}


def screenshot(rng: np.random.Generator) -> tuple[str, bytes]:
    """16x16 pixels: 16 patches and 4 visual tokens."""
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest(), file.getvalue()


@functools.cache
def records() -> tuple[list[Trajectory], list[float]]:
    """Four groups of four: one prompt and screenshot a group, then one turn or two each."""
    rng = np.random.default_rng(0)
    trajectories = []
    for number in range(4):
        first = screenshot(rng)
        prompt = [*rng.integers(1, 60, 5), *[PLACEHOLDER] * 4, *rng.integers(1, 60, 3)]
        for member in range(4):
            images, context, turns = dict([first]), prompt, []
            for _ in range(1 + (number + member) % 2):
                sampled = rng.integers(4, 60, int(rng.integers(2, 6)))  # 3 is forbidden
                turns.append(
                    Turn(
                        context_ids=np.array(context, np.int32),
                        token_ids=sampled.astype(np.int32),
                        logprobs=-rng.exponential(4, len(sampled)).astype(np.float32),
                        full_logprobs=np.zeros(len(sampled), np.float32),
                        policy_versions=np.zeros(len(sampled), np.int32),
                        image_keys=tuple(images),
                        text="",
                        action=None,
                    )
                )
                images |= dict([screenshot(rng)])
                text = rng.integers(1, 60, int(rng.integers(1, 4)))
                context = [*context, *sampled, *[PLACEHOLDER] * 4, *text]
            used = {key: images[key] for key in turns[-1].image_keys}
            trajectories.append(
                Trajectory(
                    episode_id=f"{number}-{member}",
                    group_id=str(number),
                    task=TaskSpec("desktop/click_button", seed=0),
                    instruction="",
                    turns=tuple(turns),
                    images=used,
                    image_grids=dict.fromkeys(used, (1, 4, 4)),
                    stop_reason=StopReason.COMPLETED,
                    reward=0.0,
                    success=False,
                )
            )
    return trajectories, rng.normal(size=len(trajectories)).tolist()


@functools.cache
def gradients(layout: str, ratio: str = "token") -> tuple[Any, dict[str, float], int]:
    """Of the step's loss, its metrics, and the number of batches that the layout made."""
    graphdef, lora, frozen = test_step.make_model(targets=("all",))
    optimizer = learner_state.make_optimizer(test_step.OPTIMIZER, 10)
    cfg = PolicyLossConfig(kl_coefficient=0.1, ratio=ratio)
    step_cfg = learner_step.StepConfig(cfg, temperature=0.8, forbidden_ids=(3,))
    run = learner_step.make_steps(graphdef, optimizer, step_cfg)
    trajectories, advantages = records()
    batches = batching.make_batches(
        trajectories,
        image_cfg=IMAGE_CFG,
        image_token_id=PLACEHOLDER,
        cfg=LAYOUTS[layout],
    )
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
        (batch,) = batching.make_batches(
            trajectories,
            image_cfg=IMAGE_CFG,
            image_token_id=PLACEHOLDER,
            cfg=LAYOUTS[layout],
        )
        slots[layout] = np.count_nonzero(batch.segment_ids_bt)
    # Twelve of sixteen prompts of 11 tokens are gone.
    assert slots["packed"] - slots["prompts shared"] == 12 * 11


def test_compiled_step_holds_no_array_of_rows_by_tokens_by_vocabulary(monkeypatch):
    """Of the optimized program, whatever its shape: the largest buffer is a chunk of logits."""
    cfg = dataclasses.replace(test_step.tiny_config(), vocab_size=8192)
    model = qwen2_vl.Qwen2VL(cfg, lora=LoraConfig(rank=4), rngs=nnx.Rngs(0))
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    optimizer = learner_state.make_optimizer(test_step.OPTIMIZER, 10)
    batch = test_step.make_batch(rows=4, tokens=48)
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
