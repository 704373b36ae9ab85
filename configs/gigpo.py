"""GiGPO on the quickstart's task with three tries: turns on the same screen are compared, too.

    python -m uirl_jax.main --config=configs/gigpo.py --workdir=runs/gigpo

A click beside the buttons changes nothing and leaves two more turns, so that a group sees its
screen many times. With --config.algorithm.advantage.screen_weight=0 it is GRPO on the same task.
The quickstart's KL term stays. Source: arXiv:2505.10978 (its weight 1 and discount 0.95).
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config(task: str = "click_button,misses=2") -> ConfigDict:
    cfg = quickstart.get_config(task)
    cfg.algorithm.advantage = ConfigDict({"screen_weight": 1.0, "turn_discount": 0.95})
    if task.startswith("click_button,misses="):
        cfg.tasks[0].max_turns = 3
        cfg.engine.context_lengths = (80, 160, 240)
        cfg.engine.prefill_lengths = (80,)
        cfg.learner.batch.row_lengths = (512,)
        cfg.learner.batch.sampled_lengths = (256,)
    return cfg
