"""GRPO on LLaVA-1.5-7B, six screenshots of any size a context: groups of 8, LoRA, 16 chips.

    hf download llava-hf/llava-1.5-7b-hf --local-dir models/llava-1.5-7b-hf
    python -m uirl_jax.main --config=configs/grpo_llava_7b.py --workdir=runs/llava7b \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot is padded to a square and resized to 336x336: 576 patches and as many visual tokens,
whatever its size. The model was trained on 4,096 positions: six screenshots and what is written
between them; the oldest three are dropped at once. It knows neither screens nor points, so that it
needs demonstrations first (`cold_start`), and a screen of 1280x800 is shown at a quarter of its
resolution: small texts cannot be read. `cfg.tasks` is a placeholder, as in
configs/grpo_qwen2vl_2b.py. Not compiled for a TPU yet, never run on one:

    python -m tools.plan --config=configs/grpo_llava_7b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/llava-1.5-7b-hf"
    cfg.chat.max_screenshots = 6
    cfg.chat.drop_screenshots = 3

    cfg.actor.rollout.max_context_tokens = 4032
    cfg.engine.context_lengths = (1024, 2048, 4032)
    cfg.engine.prefill_rows = (16,)  # one a chip
    cfg.engine.prefill_lengths = (256, 704)  # a turn adds a screenshot of 576 tokens
    cfg.engine.image_rows = (1, 16)
    cfg.engine.image_tokens = 128 * 576
    cfg.engine.image_row_patches = 576
    cfg.learner.batch.rows = 16  # one a chip
    cfg.learner.batch.row_lengths = (4096,)
    cfg.learner.batch.sampled_lengths = (384,)  # six turns of 64 tokens
    cfg.learner.batch.image_rows = (96,)
    cfg.learner.batch.patch_lengths = (576,)
    return cfg
