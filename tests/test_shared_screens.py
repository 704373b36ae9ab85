"""Questions about one screen that share it in a row, in families of both kinds of attention."""

import dataclasses

import numpy as np
import pytest

from tests.family_life import ROW_PATCHES, write_tiny_model
from tests.recorded_rows import InMemory, click, row
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.learner import scripted_demonstrations, state, step
from uirl_jax.shards import batching
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.recorded.sets import RecordedSets

INSTRUCTIONS = ("Click the red button", "Click the blue text field", "Click green", "Click Cancel")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "paligemma", "florence2"])
def test_questions_about_one_screen_are_scored_as_each_alone(family, tmp_path, monkeypatch):
    write_tiny_model(family, tmp_path)
    model = loading.load(tmp_path, lora=None, seed=0)
    assert model.inputs.prefix_lm == model.family.prefix_lm
    played = _questions(model, monkeypatch)
    alone, alone_tokens = _logprobs(model, played, share=False)
    shared, shared_tokens = _logprobs(model, played, share=True)
    assert len(alone) == len(shared) == len(INSTRUCTIONS)
    for expected, found in zip(alone, shared, strict=True):
        # float32 sums in another order: 1.4e-6 was seen.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    # Where a context's tokens see each other, those of the screen depend on what is asked.
    assert (shared_tokens < alone_tokens) == (not model.family.prefix_lm)


def _questions(model, monkeypatch):
    rows = [
        dataclasses.replace(row(number, [click(size=(224, 168))]), instruction=instruction)
        for number, instruction in enumerate(INSTRUCTIONS)
    ]
    sets = RecordedSets({"made": InMemory(rows)})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    prompts = ChatConfig(system_prompt="", prompt_template="{instruction}")
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        demonstrations = scripted_demonstrations.ScriptedDemonstrations(
            demonstrator,
            model,
            Chat(model.path, prompts, model.family.chat),
            [TaskSpec("recorded/made", 0)],
            episodes=0,
            seed=0,
            quality=1.0,
        )
        return demonstrations.take(0, len(INSTRUCTIONS))


def _logprobs(model, played, *, share: bool):
    """Of the recorded tokens of every question, and how many tokens the rows hold."""
    cfg = batching.BatchConfig(
        rows=1,
        row_lengths=(768,),
        image_rows=(1,),
        patch_lengths=(ROW_PATCHES[model.family.model_type],),
        share_prompts=share,
    )
    batches = batching.make_batches(played, inputs=model.inputs, cfg=cfg)
    optimizer = state.make_optimizer(state.OptimizerConfig(lr=1e-3), 1)
    steps = step.make_steps(
        model.graphdef, optimizer, step.StepConfig(recompute_old=True, use_reference=False)
    )
    scored = [
        steps.score((model.trainable, None), model.frozen, step.to_device(batch, None))
        for batch in batches
    ]
    olds = [np.asarray(each.old_bt) for each in scored]
    tokens = [len(trajectory.turns[0].token_ids) for trajectory in played]
    filled = sum(int(np.count_nonzero(batch.segment_ids_bt)) for batch in batches)
    return batching.gather(batches, olds, tokens), filled
