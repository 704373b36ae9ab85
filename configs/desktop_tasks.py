"""Changes of the quickstart for longer tasks of the drawn desktop; not a config by itself."""

from ml_collections import ConfigDict


def enter_text(cfg: ConfigDict, popup: bool = False) -> None:
    """Focus the field, type, press OK, one spare turn; with a popup two turns more."""
    cfg.tasks = (ConfigDict({"name": "desktop/enter_text", "max_turns": 6 if popup else 4}),)
    cfg.engine.context_lengths = (160, 320, 480) if popup else (160, 320)
    cfg.engine.prefill_lengths = (80,)
    cfg.learner.groups_per_step = 4
    cfg.learner.batch.row_lengths = (512,)
    cfg.learner.batch.sampled_lengths = (128,)
    cfg.learner.batch.image_rows = (32,)


def data_entry(cfg: ConfigDict) -> None:
    """A larger screen; a row of one column takes five turns and has two spare ones."""
    cfg.tasks = (ConfigDict({"name": "desktop/data_entry", "max_turns": 7}),)
    cfg.chat.max_screenshots, cfg.chat.drop_screenshots = 7, 1  # all of them
    cfg.engine.batch_sizes = (8, 32)
    cfg.engine.context_lengths = (320, 800, 1660)
    cfg.engine.prefill_lengths = (80, 240)
    cfg.engine.image_row_patches = 768  # 448x336
    cfg.actor.concurrency = 32
    cfg.learner.groups_per_step = 4
    cfg.learner.batch.rows = 4
    cfg.learner.batch.row_lengths = (1200, 1680)
    cfg.learner.batch.sampled_lengths = (128,)
    cfg.learner.batch.image_rows = (32,)
    cfg.learner.batch.patch_lengths = (768,)
    cfg.learner.batch.share_prompts = False
