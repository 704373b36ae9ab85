"""GSPO on the quickstart's task: one importance ratio a turn, and a narrow clip.

    python -m uirl_jax.main --config=configs/gspo.py --workdir=runs/gspo

The quickstart's KL term stays. Source: arXiv:2507.18071. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.loss.ratio = "turn"
    cfg.algorithm.loss.clip_low = 3e-4  # from the paper, section 5.1
    cfg.algorithm.loss.clip_high = 4e-4
    cfg.algorithm.aggregation = "trajectory_mean"
    cfg.algorithm.minibatches = 4  # as in the paper: with one update a step every ratio is 1
    return cfg
