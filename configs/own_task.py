"""The thermostat of examples/own_tasks: a cold start on its script, then GRPO on its reward.

    python -m uirl_jax.main --config=configs/own_task.py --workdir=runs/thermostat
    python -m uirl_jax.main --config=configs/own_task.py:groceries --workdir=runs/groceries

The second is a page in Chromium. Copy it for a task of your own; docs/own_task.md has the steps and
the results.
"""

from ml_collections import ConfigDict


def get_config(task: str = "thermostat") -> ConfigDict:
    cfg = ConfigDict()
    cfg.model = ConfigDict({"path": "asset:tiny-ui-base"})
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})
    cfg.verifier = ConfigDict({"task_dirs": (f"examples/own_tasks/{task}",)})
    if task == "thermostat":
        cfg.tasks = (ConfigDict({"name": "own/thermostat", "variant": "most=3", "max_turns": 6}),)
        cfg.screen_px = (224, 168)  # of task.py; the sizes of engine and batches follow from it
    else:
        cfg.tasks = (ConfigDict({"name": "own/groceries", "variant": "items=2", "max_turns": 5}),)
        cfg.screen_px = (320, 240)
    cfg.instruction_tokens = 64
    cfg.actor = ConfigDict({"group_size": 8, "concurrency": 64})
    cfg.actor.rollout = ConfigDict({"max_new_tokens": 16})

    cfg.cold_start = ConfigDict({"steps": 150, "episodes_per_step": 8, "train": "all"})
    cfg.cold_start.quality = 0.8  # one action in five is a mistake of the script
    cfg.cold_start.optimizer = ConfigDict({"name": "muon", "lr": 1e-3, "warmup_steps": 10})
    cfg.learner = ConfigDict({"steps": 30, "groups_per_step": 4})
    cfg.learner.optimizer = ConfigDict({"lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"})
    if task == "groceries":  # five words of eight to read: more to learn from
        cfg.cold_start.steps, cfg.cold_start.episodes_per_step = 400, 16
        cfg.cold_start.episodes = 600  # played once and repeated: the browser is slow
        cfg.cold_start.optimizer.schedule = "cosine"
        cfg.learner.steps, cfg.learner.optimizer.lr = 40, 3e-4
    cfg.evaluation = ConfigDict({"episodes": 200})
    return cfg
