"""GRPO on Qwen3-VL-4B: configs/grpo_qwen3_vl_2b.py with the larger text tower, one v5e-8.

    hf download Qwen/Qwen3-VL-4B-Instruct --local-dir models/Qwen3-VL-4B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen3_vl_4b.py --workdir=runs/4b \
        --config.verifier.urls='("http://localhost:8000",)'

Not compiled for a TPU yet, never run on one:

    python -m tools.plan --config=configs/grpo_qwen3_vl_4b.py --topology=v5e:2x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen3_vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen3_vl_2b.get_config()
    cfg.model.path = "models/Qwen3-VL-4B-Instruct"
    return cfg
