"""GRPO on Qwen3-VL-8B: configs/grpo_qwen3_vl_2b.py, planned for 16 chips.

16 chips of a v5e or v6e are four hosts: the same command runs on each (docs/many_hosts.md).

    hf download Qwen/Qwen3-VL-8B-Instruct --local-dir models/Qwen3-VL-8B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen3_vl_8b.py --workdir=runs/8b \
        --config.verifier.urls='("http://localhost:8000",)'

The table of visual tokens is 5.2 GB of 160 screenshots, four vectors of 4,096 each: with it whole
on every chip `score` took 17.69 of 15.75 GiB. Four parts of the data axis hold a quarter each:
13.34 GiB, compiled 2026-11-25, never run on a TPU:

    python -m tools.plan --config=configs/grpo_qwen3_vl_8b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen3_vl_2b


def get_config() -> ConfigDict:
    cfg = grpo_qwen3_vl_2b.get_config()
    cfg.model.path = "models/Qwen3-VL-8B-Instruct"
    cfg.learner.batch.rows = 16  # one a chip
    cfg.learner.batch.image_rows = (160,)
    cfg.mesh.data = 4
    return cfg
