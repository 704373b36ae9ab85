"""GRPO on PaliGemma 2, 3B, at 448 pixels: as configs/grpo_paligemma_3b.py, on a Gemma 2.

    hf download google/paligemma2-3b-pt-448 --local-dir models/paligemma2-3b-pt-448
    python -m uirl_jax.main --config=configs/grpo_paligemma2_3b.py --workdir=runs/paligemma2 \
        --config.verifier.urls='("http://localhost:8000",)'

Keys and values of a token take 104 KiB in bfloat16, where PaliGemma's take 18. Compiled
for a v5e-8 as that one is (peak 4.03 of 15.75 GiB a chip, 2026-11-25), never run on a TPU.
"""

from ml_collections import ConfigDict

from configs import grpo_paligemma_3b


def get_config() -> ConfigDict:
    cfg = grpo_paligemma_3b.get_config()
    cfg.model.path = "models/paligemma2-3b-pt-448"
    return cfg
