"""Sixteen tasks of MiniWoB++ in Chromium, one model, on two CPU cores: a cold start, then GRPO.

    python -m uirl_jax.main --config=configs/miniwob_cpu.py --workdir=runs/miniwob

Screenshots (160x210) and the instruction, mouse and keyboard. docs/results.md has what came of it.
"""

from ml_collections import ConfigDict

from configs import quickstart

# By the turns that an episode may have; most need one less, or end with their first click.
TASKS = {
    2: (
        *("click-test", "click-test-2", "click-button", "click-dialog", "click-dialog-2"),
        *("focus-text", "focus-text-2", "click-tab", "click-shape", "click-color"),
        *("click-widget", "grid-coordinate", "identify-shape"),
    ),
    4: ("enter-text",),
    7: ("login-user",),
    8: ("click-checkboxes",),
}


def get_config() -> ConfigDict:
    cfg = quickstart.get_config()
    cfg.tasks = tuple(
        ConfigDict({"name": f"miniwob/{name}", "max_turns": turns})
        for turns, names in TASKS.items()
        for name in names
    )
    cfg.chat.max_screenshots = 8  # all of them: an episode is one sequence
    cfg.chat.drop_screenshots = 1

    cfg.cold_start = ConfigDict({"train": "all", "steps": 600, "episodes_per_step": 32})
    cfg.cold_start.episodes = 3200
    cfg.cold_start.optimizer = ConfigDict(
        {"name": "muon", "lr": 3e-3, "warmup_steps": 20, "schedule": "cosine"}
    )

    cfg.actor.concurrency = 16
    cfg.actor.rollout.max_new_tokens = 24

    cfg.engine.slots = 16
    cfg.engine.batch_sizes = (4, 16)
    cfg.engine.context_lengths = (160, 384, 736)
    cfg.engine.prefill_rows = (1, 4)
    cfg.engine.prefill_lengths = (80, 128)
    cfg.engine.image_rows = (1, 4)
    cfg.engine.image_row_patches = 192
    cfg.engine.max_new_tokens = 24

    cfg.learner.groups_per_step = 16
    cfg.learner.batch.rows = 8
    cfg.learner.batch.row_lengths = (768,)
    cfg.learner.batch.sampled_lengths = (160,)
    cfg.learner.batch.image_rows = (64,)
    cfg.learner.batch.patch_lengths = (192,)
    cfg.learner.batch.share_prompts = False

    cfg.evaluation.episodes = 800  # fifty of every task
    return cfg
