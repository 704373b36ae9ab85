"""GRPO as in its paper on the quickstart's task: every trajectory has the same weight.

    python -m uirl_jax.main --config=configs/grpo.py --workdir=runs/grpo

Source: arXiv:2402.03300. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"normalise": "group_std"})
    cfg.algorithm.aggregation = "trajectory_mean"
    return cfg
