"""GRPO on Qwen2.5-VL-3B with ten screenshots of 1280x800 an episode: groups of 8, LoRA, one v5e-8.

    hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir models/Qwen2.5-VL-3B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen2_5_vl_3b.py --workdir=runs/3b \
        --config.verifier.urls='("http://localhost:8000",)'

Sizes are those of configs/grpo_qwen2vl_2b.py: a screenshot has as many patches and visual tokens.
The answer is this package's text, in pixels of the resized image, in which the model was trained to
point; `--config.chat.action_format=computer_use` is the published tool call, whose prompt and
answers are longer. Not compiled for a TPU yet, never run on one:

    python -m tools.plan --config=configs/grpo_qwen2_5_vl_3b.py --topology=v5e:2x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/Qwen2.5-VL-3B-Instruct"
    cfg.chat.coordinates = "image"
    return cfg
