"""DAPO on the quickstart's task: higher upper clip, token mean, no KL, equal groups replaced.

    python -m uirl_jax.main --config=configs/dapo.py --workdir=runs/dapo

Source: arXiv:2503.14476. Results: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.loss = ConfigDict({"clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.0})
    cfg.algorithm.aggregation = "token_mean"
    cfg.algorithm.skip_equal_groups = True
    longest = cfg.tasks[0].max_turns * cfg.actor.rollout.max_new_tokens
    cfg.algorithm.reward = ConfigDict({"overlong_max_tokens": longest})
    cfg.algorithm.reward.overlong_buffer_tokens = longest // 4
    return cfg
