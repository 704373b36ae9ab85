"""A cold start on grounding data alone; its pointing at held-out components, before and after.

    python -m tools.make_grounding_data --out=grounding --screens=10000
    python -m tools.make_grounding_data --out=grounding-test --screens=500 --split=test
    python -m uirl_jax.main --config=configs/grounding.py --workdir=runs/grounding

The result is a base for GRPO: runs/grounding/cold_start/model. docs/grounding_data.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    cfg = ConfigDict()
    cfg.model = ConfigDict({"path": "asset:tiny-ui-base"})
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})
    cfg.verifier = ConfigDict({"task_dirs": ("grounding-test/pointing",)})
    cfg.tasks = (ConfigDict({"name": "own/pointing", "max_turns": 1}),)
    cfg.screen_px = (160, 210)  # --size of the data
    cfg.instruction_tokens = 64
    cfg.actor = ConfigDict({"group_size": 8, "concurrency": 64})
    cfg.actor.rollout = ConfigDict({"max_new_tokens": 16})

    cfg.cold_start = ConfigDict({"steps": 500, "episodes_per_step": 32, "train": "all"})
    cfg.cold_start.demonstrations = ("grounding",)
    optimizer = {"name": "muon", "lr": 2e-3, "warmup_steps": 20, "schedule": "cosine"}
    cfg.cold_start.optimizer = ConfigDict(optimizer)
    cfg.learner = ConfigDict({"steps": 0, "groups_per_step": 4})
    cfg.evaluation = ConfigDict({"episodes": 300, "temperature": 0.0})
    return cfg
