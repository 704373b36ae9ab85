"""MaxRL on the quickstart's task: a rare success counts more, by the group's success rate.

    python -m uirl_jax.main --config=configs/maxrl.py --workdir=runs/maxrl

The quickstart's KL term stays. Source: arXiv:2602.02710.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"normalise": "group_ratio"})
    return cfg
