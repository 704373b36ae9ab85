"""GRPO on Florence-2 large, episodes of ten turns: groups of 8, LoRA, eight chips.

    hf download florence-community/Florence-2-large --local-dir models/Florence-2-large
    python -m uirl_jax.main --config=configs/grpo_florence2_large.py --workdir=runs/florence2 \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot is squashed to 768x768, 577 visual tokens, whatever its size. A turn is a sequence of
its own, of up to 992 tokens: the newest screenshot, the task, the history as text, then what the
decoder says. The model knows places (`<loc_512>`) and no actions: it needs demonstrations first
(`cold_start`). `cfg.tasks` is a placeholder, as in configs/grpo_qwen2vl_2b.py. Florence-2 base fits
as well. Traced, never compiled for a TPU or run on one; `tools.plan` has no formula of it.
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/Florence-2-large"
    cfg.chat.action_format = "loc_1000"  # its prompt has the history as text

    cfg.actor.rollout.max_new_tokens = 32
    cfg.actor.rollout.max_context_tokens = 960
    cfg.engine.context_lengths = (960,)
    cfg.engine.prefill_lengths = (960,)  # a context is one call: its encoder sees all of it
    cfg.engine.image_tokens = 48 * 577
    cfg.engine.image_row_patches = 576  # of 32x32 pixels
    cfg.engine.max_new_tokens = 32
    cfg.learner.batch.rows = 16  # two a chip
    cfg.learner.batch.row_lengths = (992, 1984)
    cfg.learner.batch.sampled_lengths = (64, 256)
    cfg.learner.batch.image_rows = (32,)
    cfg.learner.batch.patch_lengths = (576,)
    return cfg
