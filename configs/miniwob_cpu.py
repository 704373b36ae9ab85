"""Sixteen tasks of MiniWoB++ in Chromium with one Qwen2-VL of 2.7 M parameters, on two CPU cores.

    python -m uirl_jax.main --config=configs/miniwob_cpu.py:base --workdir=runs/miniwob-base
    python -m uirl_jax.main --config=configs/miniwob_cpu.py --workdir=runs/miniwob

`:base` is a cold start on correct demonstrations, RL starts from what it makes. Actions are the
text format. A model that sees more of a small page solves far more: configs/miniwob_pages.py, which
ships with its start and its result. Needs Chromium (docs/bundled_server.md).
"""

from ml_collections import ConfigDict

from configs import miniwob_tasks, quickstart


def get_config(stage: str = "grpo") -> ConfigDict:
    if stage not in ("base", "grpo"):
        raise ValueError(f"{stage!r}, expected base or grpo")
    cfg = quickstart.get_config()
    miniwob_tasks.miniwob(cfg, tuple(miniwob_tasks.MAX_TURNS))

    cfg.algorithm.minibatches = 2
    cfg.algorithm.drop_equal_groups = True
    cfg.learner.steps = 150
    cfg.learner.optimizer.clip_norm = 0.05  # as in simple_data_entry_cpu.py

    cfg.evaluation.episodes = 480  # thirty of every task
    cfg.evaluation.random = True
    if stage == "grpo":
        cfg.model.path = "runs/miniwob-base/cold_start/model"
        # Prefer tasks solved now and then: those that always fail give no gradient and cost turns.
        cfg.curriculum = ConfigDict({"weight_by": "variance", "window": 32, "min_share": 0.3})
        return cfg

    cfg.learner.steps = 0
    cfg.evaluation.random = False
    cfg.evaluation.episodes = 320
    optimizer = ConfigDict({"name": "muon", "schedule": "cosine", "lr": 3e-3, "warmup_steps": 20})
    cfg.cold_start = ConfigDict(
        {
            "train": "all",
            "steps": 500,
            "episodes": 3200,
            "episodes_per_step": 32,
            "optimizer": optimizer,
        }
    )
    return cfg
