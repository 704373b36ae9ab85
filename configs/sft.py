"""Supervised training on scripted demonstrations of the quickstart's task, without RL.

    python -m uirl_jax.main --config=configs/sft.py --workdir=runs/sft

The trained model is a directory in Hugging Face's format: runs/sft/cold_start/model. With
--config.cold_start.demonstrations="('demos',)" it trains on recorded demonstrations instead
(docs/demonstrations.md).
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.learner.steps = 0
    cfg.cold_start = ConfigDict()
    cfg.cold_start.steps = 60
    cfg.cold_start.episodes_per_step = 32
    cfg.cold_start.quality = 1.0
    cfg.cold_start.optimizer = ConfigDict({"lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"})
    return cfg
