"""GRPO on `simple_data_entry` in Chromium, on two CPU cores.

    python -m uirl_jax.main --config=configs/simple_data_entry_cpu.py --workdir=runs/entry

One row an episode, any of the sheet's hundred: 112 to 300 of 300 in 51 minutes (docs/results.md,
2026-11-23); needs Chromium (docs/bundled_server.md). The start ships: `:base`, then `:start` on
demonstrations that are mostly off by a line. The trained adapters ship, too; to evaluate them:

    python -m uirl_jax.main --role=eval --stage=trained --workdir=runs/entry-trained \
        --config=configs/simple_data_entry_cpu.py:trained
"""

from ml_collections import ConfigDict

from configs import quickstart

SHIPPED = "asset:simple-data-entry"


def get_config(stage: str = "grpo") -> ConfigDict:
    cfg = quickstart.get_config()
    task = {"name": "simple_data_entry", "max_turns": 12}
    cfg.tasks = tuple(
        ConfigDict({**task, "variant": f"size=small,row={row}"}) for row in range(2, 102)
    )
    cfg.chat.max_screenshots = 12  # all of them: an episode is one sequence
    cfg.chat.drop_screenshots = 1
    cfg.actor.group_size = 4
    cfg.actor.concurrency = 16
    cfg.actor.rollout.max_new_tokens = 20

    cfg.engine.max_new_tokens = 20
    cfg.engine.slots = 16
    cfg.engine.batch_sizes = (4, 16)
    cfg.engine.context_lengths = (192, 384, 640, 1000)
    cfg.engine.prefill_rows = (1, 4)
    cfg.engine.prefill_lengths = (80, 128)
    cfg.engine.image_rows = (1, 4)
    cfg.engine.image_row_patches = 192

    cfg.algorithm.minibatches = 2
    cfg.algorithm.drop_equal_groups = True
    cfg.learner.steps = 110
    cfg.learner.groups_per_step = 16
    cfg.learner.optimizer.clip_norm = 0.05  # usual norm 0.03: a rare token must not decide a step
    cfg.learner.batch.rows = 8
    cfg.learner.batch.row_lengths = (832, 928, 1024)
    cfg.learner.batch.sampled_lengths = (192,)
    cfg.learner.batch.image_rows = (96,)
    cfg.learner.batch.patch_lengths = (192,)
    cfg.learner.batch.share_prompts = False

    cfg.evaluation.episodes = 300  # three of every row
    if stage in ("grpo", "trained"):
        cfg.model.path = f"{SHIPPED}/start"
        cfg.model.adapter = f"{SHIPPED}/grpo" if stage == "trained" else ""
        # Rows that hardly ever succeed come first, and a stored success joins a failed group: later
        # the policy, trained on other rows, may no longer sample their right actions at all.
        cfg.learner.optimizer.warmup_steps = 25
        curriculum = {"weight_by": "failure", "sharpness": 8.0, "window": 16, "instances": 1}
        cfg.curriculum = ConfigDict(curriculum)
        cfg.algorithm.replay = True
        cfg.algorithm.loss.importance_floor = 1.0
        return cfg
    cfg.learner.steps = 0
    cfg.evaluation.episodes = 100
    optimizer = ConfigDict({"name": "muon", "schedule": "cosine"})
    cfg.cold_start = ConfigDict({"train": "all", "episodes_per_step": 8, "optimizer": optimizer})
    if stage == "base":
        cfg.tasks = (ConfigDict({**task, "variant": "size=small"}),)
        cfg.cold_start.update({"steps": 400, "episodes": 800})
        optimizer.update({"lr": 3e-3, "warmup_steps": 20})
    elif stage == "start":
        cfg.model.path = "runs/entry-base/cold_start/model"
        cfg.cold_start.update({"steps": 45, "episodes": 360})  # each demonstration once
        cfg.cold_start.quality = 0.05  # 19 of 20 demonstrations copy the row above or below
        optimizer.update({"lr": 1.5e-3, "warmup_steps": 5})
    else:
        raise ValueError(f"{stage!r}, expected base, start, grpo or trained")
    return cfg
