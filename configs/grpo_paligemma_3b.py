"""GRPO on PaliGemma-3B at 448 pixels, episodes of ten turns: groups of 8, LoRA, one v5e-8.

    hf download google/paligemma-3b-pt-448 --local-dir models/paligemma-3b-pt-448
    python -m uirl_jax.main --config=configs/grpo_paligemma_3b.py --workdir=runs/paligemma \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot is squashed to 448x448, 1,024 visual tokens, whatever its size. A turn is a sequence of
its own: the newest screenshot, the task, and the history as text; so a step of 16 episodes has up
to 160 sequences of up to 1,408 tokens. The model knows places (`<loc0512>`) and no actions: it
needs demonstrations first (`cold_start`). `cfg.tasks` is a placeholder, as in
configs/grpo_qwen2vl_2b.py. Compiled for a TPU slice (peak 3.67 of 15.75 GiB a chip, 2026-11-30),
never run on one:

    python -m tools.plan --config=configs/grpo_paligemma_3b.py --topology=v5e:2x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/paligemma-3b-pt-448"
    cfg.chat.action_format = "loc"  # its prompt has the history as text

    cfg.actor.rollout.max_new_tokens = 32
    cfg.actor.rollout.max_context_tokens = 1376
    cfg.engine.context_lengths = (1376,)
    cfg.engine.prefill_lengths = (1376,)  # a context is one call: its tokens see each other
    cfg.engine.image_tokens = 48 * 1024
    cfg.engine.image_row_patches = 1024
    cfg.engine.max_new_tokens = 32
    cfg.learner.batch.rows = 16  # two a chip
    cfg.learner.batch.row_lengths = (1408, 2816)
    cfg.learner.batch.sampled_lengths = (64, 256)
    cfg.learner.batch.image_rows = (32,)
    cfg.learner.batch.patch_lengths = (1024,)
    return cfg
