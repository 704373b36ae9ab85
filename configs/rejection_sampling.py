"""Rejection sampling on the quickstart's task: trains on the episodes that succeed.

    python -m uirl_jax.main --config=configs/rejection_sampling.py --workdir=runs/rejection_sampling

Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.objective = "imitation"
    cfg.algorithm.keep_reward = 1.0
    cfg.algorithm.keep_per_group = 4  # so that easy instances do not dominate a step
    cfg.algorithm.min_kept = 8
    return cfg
