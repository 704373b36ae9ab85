"""GRPO on Idefics2-8B with ten screenshots of 1280x800 an episode: groups of 8, LoRA, 16 chips.

    hf download HuggingFaceM4/idefics2-8b --local-dir models/idefics2-8b
    python -m uirl_jax.main --config=configs/grpo_idefics2_8b.py --workdir=runs/idefics2 \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot of 1280x800 is resized to 980x612: 43 x 70 = 3,010 patches, which a resampler reads
into 64 visual tokens, whatever its size. So contexts are short, 1,500 tokens for ten turns of 64
sampled tokens; and the tower is most of the work. The model knows no points: it needs
demonstrations first (`cold_start`). `cfg.tasks` is a placeholder, as in configs/grpo_qwen2vl_2b.py.
Not compiled for a TPU yet, never run on one:

    python -m tools.plan --config=configs/grpo_idefics2_8b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/idefics2-8b"

    cfg.actor.rollout.max_context_tokens = 1984
    cfg.engine.context_lengths = (512, 1024, 1984)
    cfg.engine.prefill_rows = (16,)  # one a chip
    cfg.engine.prefill_lengths = (192, 512)
    cfg.engine.image_rows = (1, 16)
    cfg.engine.image_tokens = 192 * 64
    cfg.engine.image_row_patches = 3010
    cfg.learner.batch.rows = 16  # one a chip
    cfg.learner.batch.row_lengths = (2048,)
    cfg.learner.batch.image_rows = (160,)
    cfg.learner.batch.patch_lengths = (3010,)
    return cfg
