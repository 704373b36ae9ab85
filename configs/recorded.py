"""GRPO on recorded screens: a touch in the recorded box pays 1. No browser, no server, no HTTP.

    python -m tools.make_grounding_data --out=grounding --screens=10000
    python -m tools.make_grounding_data --out=grounding-test --screens=500 --split=test
    python -m tools.prepare_gui_data grounding grounding-test --kind=grounding --out=gui
    python -m uirl_jax.main --config=configs/recorded.py:gui/rows.parquet --workdir=runs/recorded

The part after the colon is the set's file. A recorded step names one of several right actions, so a
failure says little: the KL to the base is on and negative advantages count half (GUI-Libra,
arXiv:2602.22190). docs/recorded.md has the other rules, walks, and the limits.
"""

from ml_collections import ConfigDict


def get_config(path: str = "gui/rows.parquet") -> ConfigDict:
    cfg = ConfigDict()
    cfg.model = ConfigDict({"path": "asset:tiny-ui-base"})
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})
    cfg.verifier = ConfigDict()
    cfg.verifier.recorded = ConfigDict({"sets": {"gui": path}, "rewards": {"point_in_box": 1.0}})
    cfg.tasks = (ConfigDict({"name": "recorded/gui", "max_turns": 1}),)
    cfg.screen_px = (160, 210)  # the largest picture of the set
    cfg.instruction_tokens = 64
    cfg.actor = ConfigDict({"group_size": 8, "concurrency": 64})
    cfg.actor.rollout = ConfigDict({"temperature": 1.0, "max_new_tokens": 16})

    cfg.learner = ConfigDict({"steps": 100, "groups_per_step": 8})
    cfg.learner.optimizer = ConfigDict({"lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"})
    cfg.algorithm = ConfigDict()
    cfg.algorithm.advantage = ConfigDict({"negative_weight": 0.5})
    cfg.algorithm.loss = ConfigDict({"kl_coefficient": 0.01})
    cfg.evaluation = ConfigDict({"episodes": 200, "temperature": 0.0})
    return cfg
