"""GRPO on Qwen2.5-VL-7B: configs/grpo_qwen2_5_vl_3b.py, planned for 16 chips.

16 chips of a v5e or v6e are four hosts: the same command runs on each (docs/many_hosts.md). Not
compiled for a TPU yet, never run on one.

    hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir models/Qwen2.5-VL-7B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen2_5_vl_7b.py --workdir=runs/7b \
        --config.verifier.urls='("http://localhost:8000",)'
    python -m tools.plan --config=configs/grpo_qwen2_5_vl_7b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2_5_vl_3b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2_5_vl_3b.get_config()
    cfg.model.path = "models/Qwen2.5-VL-7B-Instruct"
    cfg.learner.batch.rows = 16  # one a chip
    cfg.learner.batch.image_rows = (160,)
    return cfg
