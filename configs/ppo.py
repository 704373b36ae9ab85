"""PPO on the quickstart's task: a value head on the policy's trunk, GAE over turns, two epochs.

    python -m uirl_jax.main --config=configs/ppo.py --workdir=runs/ppo

The quickstart's KL term stays. Source: arXiv:1707.06347. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"estimator": "gae", "normalise": "batch"})
    cfg.algorithm.advantage.gae_lambda = 0.95
    cfg.algorithm.advantage.turn_discount = 0.99
    cfg.algorithm.loss.entropy_coefficient = 1e-3
    cfg.algorithm.critic = ConfigDict({"lr": 1e-3, "coefficient": 0.1, "clip": 0.2})
    cfg.algorithm.epochs = 2
    cfg.algorithm.minibatches = 2
    cfg.algorithm.stop_kl = 0.05
    # Four updates a step on normalised advantages. Once nearly all episodes succeed, these are
    # mostly noise, and with the quickstart's 1e-3 the policy unlearns (docs/notes/algorithms.md).
    cfg.learner.optimizer.lr = 3e-4
    return cfg
