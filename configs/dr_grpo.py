"""Dr. GRPO on the quickstart's task: no deviation; a token's weight does not depend on length.

    python -m uirl_jax.main --config=configs/dr_grpo.py --workdir=runs/dr_grpo

Source: arXiv:2503.20783. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"normalise": "group_mean"})
    cfg.algorithm.aggregation = "constant_length"
    cfg.algorithm.max_tokens = cfg.tasks[0].max_turns * cfg.actor.rollout.max_new_tokens
    cfg.algorithm.loss.kl_coefficient = 0.0  # as in the paper
    return cfg
