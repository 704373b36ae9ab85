"""GRPO on Qwen3-VL-2B with ten screenshots of 1280x800 an episode: groups of 8, LoRA, one v5e-8.

    hf download Qwen/Qwen3-VL-2B-Instruct --local-dir models/Qwen3-VL-2B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen3_vl_2b.py --workdir=runs/2b \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot of 1280x800 keeps its size: 50 x 80 = 4,000 patches, 1,000 visual tokens of four
vectors each. Ten of them with their chat markers and 64 sampled tokens a turn are about 10,800
tokens, a row of 22 x 512. The answer is this package's text, in 0 to 1000 of the screen, in which
the model was trained to point; `--config.chat.action_format=computer_use_1000` is the published
tool call, whose prompt and answers are longer. `cfg.tasks` is a placeholder, as in
configs/grpo_qwen2vl_2b.py. Its learner was compiled for a v5e-4 (docs/notes/performance.md), never
run on one:

    python -m tools.plan --config=configs/grpo_qwen3_vl_2b.py --topology=v5e:2x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/Qwen3-VL-2B-Instruct"
    cfg.chat.coordinates = "0-1000"

    cfg.actor.rollout.max_context_tokens = 11200
    cfg.engine.context_lengths = (2048, 5632, 11200)
    cfg.engine.prefill_lengths = (512, 1152)  # a turn adds a screenshot of 1,000 tokens
    cfg.engine.image_tokens = 48 * 1000
    cfg.engine.image_row_patches = 4000
    cfg.learner.batch.row_lengths = (11264,)
    cfg.learner.batch.patch_lengths = (4000,)
    return cfg
