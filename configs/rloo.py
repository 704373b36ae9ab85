"""RLOO on the quickstart's task: baseline is the mean of the other members, KL in the reward.

    python -m uirl_jax.main --config=configs/rloo.py --workdir=runs/rloo

Source: arXiv:2402.14740. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"normalise": "leave_one_out"})
    cfg.algorithm.loss.kl_in = "reward"
    cfg.algorithm.aggregation = "trajectory_mean"
    return cfg
