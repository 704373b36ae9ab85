"""REINFORCE++ on the quickstart's task: the rewards after a token, normalised over the step.

    python -m uirl_jax.main --config=configs/reinforce_pp.py --workdir=runs/reinforce_pp

Source: arXiv:2501.03262. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"normalise": "batch", "credit": "token"})
    cfg.algorithm.loss.kl_in = "reward"
    return cfg
