"""Sixteen tasks of MiniWoB++ in Chromium, one model, learnt with GRPO on two CPU cores.

    python -m uirl_jax.main --config=configs/miniwob_cpu.py --workdir=runs/miniwob

Two cold starts come first: from a careful demonstrator, then from one whose clicks are often off by
a thing and spoil it:

    python -m uirl_jax.main --config=configs/miniwob_cpu.py:base --workdir=runs/base
    python -m uirl_jax.main --config=configs/miniwob_cpu.py:start --workdir=runs/start

docs/results.md has what GRPO, which sees rewards alone, made of it.
"""

from ml_collections import ConfigDict

from configs import miniwob_tasks, quickstart

START = "runs/start/cold_start/model"


def get_config(stage: str = "grpo") -> ConfigDict:
    cfg = quickstart.get_config()
    miniwob_tasks.miniwob(cfg, tuple(miniwob_tasks.MAX_TURNS))

    cfg.algorithm.minibatches = 2
    cfg.algorithm.drop_equal_groups = True
    cfg.learner.steps = 240
    cfg.learner.optimizer.clip_norm = 0.05  # as in simple_data_entry_cpu.py

    cfg.evaluation.episodes = 800  # fifty of every task
    cfg.evaluation.random = True
    if stage == "grpo":
        cfg.model.path = START
        # What fails is asked for more often; what this model will not learn must not take it all.
        cfg.curriculum = ConfigDict({"by_failure": True, "min_share": 0.3, "window": 32})
        return cfg

    cfg.learner.steps = 0
    cfg.evaluation.random = False
    cfg.evaluation.episodes = 160
    optimizer = ConfigDict({"name": "muon", "schedule": "cosine"})
    cfg.cold_start = ConfigDict({"train": "all", "episodes_per_step": 32, "optimizer": optimizer})
    if stage == "base":
        cfg.cold_start.update({"steps": 500, "episodes": 3200})
        optimizer.update({"lr": 3e-3, "warmup_steps": 20})
    elif stage == "start":
        cfg.model.path = "runs/base/cold_start/model"
        cfg.cold_start.update({"steps": 60, "episodes": 640, "quality": 0.15})
        optimizer.update({"lr": 1e-3, "warmup_steps": 5})
    else:
        raise ValueError(f"{stage!r}, expected base, start or grpo")
    return cfg
