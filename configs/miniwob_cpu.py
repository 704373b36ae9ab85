"""Sixteen tasks of MiniWoB++ in Chromium, one model, on two CPU cores: two cold starts, then GRPO.

    python -m uirl_jax.main --config=configs/miniwob_cpu.py:base --workdir=runs/miniwob_base
    python -m uirl_jax.main --config=configs/miniwob_cpu.py --workdir=runs/miniwob

The base learns from a careful demonstrator. Then one whose clicks are often off by a thing spoils
it; GRPO, which sees rewards alone, makes it reliable. docs/results.md has what came of it.
"""

from ml_collections import ConfigDict

from configs import miniwob_tasks, quickstart


def get_config(stage: str = "grpo") -> ConfigDict:
    cfg = quickstart.get_config()
    miniwob_tasks.miniwob(cfg, tuple(miniwob_tasks.MAX_TURNS))

    cfg.cold_start = ConfigDict({"train": "all", "episodes_per_step": 32})
    cfg.cold_start.steps = 60
    cfg.cold_start.quality = 0.15
    cfg.cold_start.episodes = 640
    cfg.cold_start.optimizer = ConfigDict(
        {"name": "muon", "lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"}
    )

    cfg.algorithm.minibatches = 2

    # What fails is asked for more often; what this model will not learn must not take it all.
    cfg.curriculum = ConfigDict({"by_failure": True, "min_share": 0.3, "window": 32})

    cfg.learner.steps = 240
    cfg.learner.optimizer.clip_norm = 0.05  # as in simple_data_entry_cpu.py

    cfg.evaluation.episodes = 800  # fifty of every task
    cfg.evaluation.random = True
    if stage == "base":
        cfg.learner.steps = 0
        cfg.cold_start.update({"steps": 500, "quality": 1.0, "episodes": 3200})
        cfg.cold_start.optimizer.update({"lr": 3e-3, "warmup_steps": 20})
    elif stage == "grpo":
        cfg.model.path = "runs/miniwob_base/cold_start/model"
    else:
        raise ValueError(f"{stage!r}, expected base or grpo")
    return cfg
