"""The sixteen tasks of MiniWoB++ from a model that can read pages: visual tokens of 16 pixels.

    python -m uirl_jax.main --config=configs/miniwob_pages.py --workdir=runs/pages

GRPO takes the start that ships from 87.5 to 92.3 % of the held-out episodes of the suite miniwob16
in 65 minutes (docs/page_model.md). Its adapters ship, too; to evaluate them:

    python -m uirl_jax.main --role=eval --stage=trained --workdir=runs/pages-trained \
        --config=configs/miniwob_pages.py:trained

Two commands make a model for small pages (docs/page_model.md), this one teaches it the tasks:

    python -m uirl_jax.main --config=configs/miniwob_pages.py:base --workdir=runs/pages-base

`:base` is a cold start on correct demonstrations, nothing spoilt. A screenshot is 130 visual
tokens, and only the newest is seen: the page shows what was done (docs/page_model.md).
"""

from ml_collections import ConfigDict

from configs import miniwob_cpu

SHIPPED = "asset:miniwob-pages"


def get_config(stage: str = "grpo") -> ConfigDict:
    if stage not in ("base", "grpo", "trained"):
        raise ValueError(f"{stage!r}, expected base, grpo or trained")
    cfg = miniwob_cpu.get_config("base" if stage == "base" else "grpo")
    cfg.model.path = "models/tiny-pages" if stage == "base" else f"{SHIPPED}/start"
    if stage == "trained":
        cfg.model.adapter = f"{SHIPPED}/grpo"
    cfg.chat.action_format = "points_64"
    cfg.chat.max_screenshots = 1
    cfg.chat.drop_screenshots = 1

    # A click is three tokens, each letter that is typed one. The eighth turn of click-checkboxes is
    # behind seven actions, without their screenshots: 515 tokens.
    cfg.actor.rollout.max_new_tokens = 24
    cfg.engine.max_new_tokens = 24
    cfg.engine.context_lengths = (192, 256, 384, 576)
    cfg.engine.prefill_lengths = (192, 576)
    cfg.engine.image_row_patches = 520  # 160x208
    # An episode of one turn in most tasks, and each turn has a context of its own: a group's screen
    # stands in a row once (14 s a step of 128 episodes on one core; 36 s without). Few groups have
    # a signal, and an update sees a part of them: more rows than two would mostly be padding.
    cfg.learner.batch.share_prompts = True
    cfg.learner.batch.rows = 2
    cfg.learner.batch.row_lengths = (608,)
    cfg.learner.batch.sampled_lengths = (96,)
    cfg.learner.batch.image_rows = (2, 4)
    cfg.learner.batch.patch_lengths = (520,)
    # Eight updates a step: with one, grid-coordinate alone went from 47 to 52 %, with four to 90
    # (docs/notes/page_model.md).
    cfg.learner.groups_per_step = 32
    cfg.algorithm.epochs = 2
    cfg.algorithm.minibatches = 4
    cfg.algorithm.stop_kl = 0.05
    # What settings of the quickstart left unlearnt (docs/notes/page_model.md): short tasks, whose
    # few tokens weigh little beside an episode of eight turns, and instances that fail alike eight
    # times. A virtual success in every group's baseline makes those a signal, so that tasks are
    # drawn by their failures.
    cfg.algorithm.aggregation = "trajectory_mean"
    cfg.algorithm.advantage = ConfigDict({"virtual_return": 1.0})
    cfg.curriculum = ConfigDict({"weight_by": "failure", "window": 32, "min_share": 0.03})
    cfg.learner.steps = 100
    if stage == "base":
        cfg.learner.steps = 0
        # 16 demonstrations have some 30 screenshots: two of these batches, or three.
        cfg.learner.batch.rows = 4
        cfg.learner.batch.image_rows = (4, 8, 12)
        cfg.cold_start.steps = 400
        cfg.cold_start.episodes = 4800
        cfg.cold_start.episodes_per_step = 16
        cfg.cold_start.optimizer.lr = 1e-3
    return cfg
