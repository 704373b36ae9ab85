"""The thermostat of examples/own_tasks: a cold start on its script, then GRPO on its reward.

    python -m uirl_jax.main --config=configs/own_task.py --workdir=runs/thermostat

Copy it for a task of your own; docs/own_task.md has the steps and the results.
"""

from ml_collections import ConfigDict

from configs import desktop_tasks, quickstart


def get_config() -> ConfigDict:
    cfg = quickstart.get_config()
    desktop_tasks.enter_text(cfg, popup=True)  # sizes for six turns of a screen of 224x168
    cfg.verifier = ConfigDict({"task_dirs": ("examples/own_tasks/thermostat",)})
    cfg.tasks = (ConfigDict({"name": "own/thermostat", "variant": "most=3", "max_turns": 6}),)

    cfg.cold_start = ConfigDict({"steps": 150, "episodes_per_step": 8, "train": "all"})
    cfg.cold_start.quality = 0.8  # one action in five is a mistake of the script
    cfg.cold_start.optimizer = ConfigDict({"name": "muon", "lr": 1e-3, "warmup_steps": 10})
    cfg.learner.batch.rows = 4
    cfg.learner.steps = 30
    return cfg
