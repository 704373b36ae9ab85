"""GRPO on UI-TARS-1.5-7B: `simple_data_entry` in Chromium at 1280x800, planned for 16 chips.

    hf download ByteDance-Seed/UI-TARS-1.5-7B --local-dir models/UI-TARS-1.5-7B
    python -m uirl_jax.main --config=configs/ui_tars_1_5_7b_data_entry.py --workdir=runs/ui-tars

The model is a Qwen2.5-VL, asked and read in its own format: a thought and an action, in pixels of
the resized image (docs/action_formats.md). UI-TARS's clients limit an image to 2,116,800 pixels,
which a screenshot of 1280x800 does not reach: 1288x812, 5,336 patches, 1,334 visual tokens. Ten of
them with 128 sampled tokens a turn and the prompt are about 15,100 tokens, a row of 30 x 512. Needs
Chromium (docs/bundled_server.md). Not compiled for a TPU yet, never run on one:

    python -m tools.plan --config=configs/ui_tars_1_5_7b_data_entry.py --topology=v5e:4x4
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2_5_vl_7b


def get_config() -> ConfigDict:
    cfg = grpo_qwen2_5_vl_7b.get_config()
    cfg.model.path = "models/UI-TARS-1.5-7B"
    cfg.chat.action_format = "ui_tars"
    # One of the first eight rows: four fields, a click and a text each, and the button.
    cfg.tasks = (ConfigDict({"name": "simple_data_entry", "max_turns": 14, "variant": "within=8"}),)

    cfg.actor.rollout.max_new_tokens = 128  # a thought comes first
    cfg.actor.rollout.max_context_tokens = 15232
    cfg.engine.max_new_tokens = 128
    cfg.engine.context_lengths = (2048, 7168, 15232)
    cfg.learner.batch.row_lengths = (15360,)
    cfg.learner.batch.sampled_lengths = (1280,)  # ten turns of 128 tokens
    return cfg
