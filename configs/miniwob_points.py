"""The sixteen tasks of MiniWoB++ with point tokens: a click is `<x_12><y_30> click`.

    python -m tools.add_point_tokens uirl_jax/assets/tiny-ui-base --out=models/tiny-points
    python -m uirl_jax.main --config=configs/miniwob_points.py:base --workdir=runs/points-base
    python -m uirl_jax.main --config=configs/miniwob_points.py --workdir=runs/points

`:base` is the cold start of configs/miniwob_cpu.py:base with the same demonstrations, written in
the other format; RL starts from what it makes. What it gives beside the text format:
docs/point_tokens.md.
"""

from ml_collections import ConfigDict

from configs import miniwob_cpu


def get_config(stage: str = "grpo") -> ConfigDict:
    if stage not in ("base", "grpo"):
        raise ValueError(f"{stage!r}, expected base or grpo")
    cfg = miniwob_cpu.get_config(stage)
    cfg.model.path = (
        "models/tiny-points" if stage == "base" else "runs/points-base/cold_start/model"
    )
    cfg.chat.action_format = "points_64"
    return cfg
