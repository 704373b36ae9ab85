"""GRPO on sixteen tasks of MiniWoB++ in Chromium with one model, on two CPU cores.

    python -m uirl_jax.main --config=configs/miniwob_cpu.py --workdir=runs/miniwob

121 to 268 of 480 held-out episodes in 81 minutes (docs/results.md, 2026-11-23); needs Chromium
(docs/bundled_server.md). The start ships with the package. Three cold starts made it: `:base` and
`:more` on correct demonstrations, then `:start`, adapters alone, on demonstrations of which nine in
ten click the wrong element. The trained adapters ship, too; to evaluate them:

    python -m uirl_jax.main --role=eval --stage=trained --workdir=runs/miniwob-trained \
        --config=configs/miniwob_cpu.py:trained
"""

from ml_collections import ConfigDict

from configs import miniwob_tasks, quickstart

SHIPPED = "asset:miniwob"


def get_config(stage: str = "grpo") -> ConfigDict:
    cfg = quickstart.get_config()
    miniwob_tasks.miniwob(cfg, tuple(miniwob_tasks.MAX_TURNS))

    cfg.algorithm.minibatches = 2
    cfg.algorithm.drop_equal_groups = True
    cfg.learner.steps = 150
    cfg.learner.optimizer.clip_norm = 0.05  # as in simple_data_entry_cpu.py

    cfg.evaluation.episodes = 480  # thirty of every task
    cfg.evaluation.random = True
    if stage in ("grpo", "trained"):
        cfg.model.path = f"{SHIPPED}/start"
        cfg.model.adapter = f"{SHIPPED}/grpo" if stage == "trained" else ""
        # Prefer tasks solved now and then: those that always fail give no gradient and cost turns.
        cfg.curriculum = ConfigDict({"weight_by": "variance", "window": 32, "min_share": 0.3})
        return cfg

    cfg.learner.steps = 0
    cfg.evaluation.random = False
    cfg.evaluation.episodes = 320
    optimizer = ConfigDict({"name": "muon", "schedule": "cosine"})
    cfg.cold_start = ConfigDict({"train": "all", "episodes_per_step": 32, "optimizer": optimizer})
    if stage == "base":
        cfg.cold_start.update({"steps": 500, "episodes": 3200})
        optimizer.update({"lr": 3e-3, "warmup_steps": 20})
    elif stage == "more":
        cfg.model.path = "runs/miniwob-base/cold_start/model"
        cfg.cold_start.update({"steps": 700, "episodes": 6400})
        optimizer.update({"lr": 2e-3, "warmup_steps": 20})
    elif stage == "start":
        cfg.model.path = "runs/miniwob-more/cold_start/model"
        cfg.cold_start.update({"steps": 180, "episodes": 1280, "quality": 0.1, "train": "lora"})
        optimizer.update({"lr": 4e-3, "warmup_steps": 5})
    else:
        raise ValueError(f"{stage!r}, expected base, more, start, grpo or trained")
    return cfg
