"""GRPO on Qwen2-VL-7B: configs/grpo_qwen2vl_2b.py, planned for 16 chips.

16 chips of a v5e or v6e are four hosts: the same command runs on each (docs/many_hosts.md). The
config was compiled for such slices and never run on one.

    hf download Qwen/Qwen2-VL-7B-Instruct --local-dir models/Qwen2-VL-7B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen2vl_7b.py --workdir=runs/7b \
        --config.verifier.urls='("http://localhost:8000",)'

Memory and bounds by the TPU's own compiler (docs/performance.md):

    python -m tools.plan --config=configs/grpo_qwen2vl_7b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2vl_2b.get_config()
    cfg.model.path = "models/Qwen2-VL-7B-Instruct"
    cfg.learner.batch.rows = 16  # one a chip
    cfg.learner.batch.image_rows = (160,)
    return cfg
