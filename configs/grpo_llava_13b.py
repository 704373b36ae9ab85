"""GRPO on LLaVA-1.5-13B: configs/grpo_llava_7b.py with the larger model, on 16 chips.

    hf download llava-hf/llava-1.5-13b-hf --local-dir models/llava-1.5-13b-hf
    python -m uirl_jax.main --config=configs/grpo_llava_13b.py --workdir=runs/llava13b \
        --config.verifier.urls='("http://localhost:8000",)'
    python -m tools.plan --config=configs/grpo_llava_13b.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_llava_7b


def get_config() -> ConfigDict:
    cfg = grpo_llava_7b.get_config()
    cfg.model.path = "models/llava-1.5-13b-hf"
    return cfg
