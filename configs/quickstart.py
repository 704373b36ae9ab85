"""The first run: an agent learns, on a laptop's CPU, to click the button that it is told to.

    bash launch/local.sh

Starts from the 2.7 M parameter base model that ships with the package: it sees, but it was trained
on demonstrations of which most are wrong. See docs/quickstart.md for what was measured.

`quickstart.py:enter_text` (or `:enter_text,words=2`, a variant) is the same for a task of several
turns, `:data_entry,rows=1,columns=1` for a longer one and `:miniwob` for four of MiniWoB++. That
base does not know them yet: docs/algorithms.md says how one for enter_text is made, docs/results.md
how one for miniwob is; for data_entry none is known.
"""

from ml_collections import ConfigDict

from configs import desktop_tasks, miniwob_tasks


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = ConfigDict()
    cfg.seed = 0

    cfg.model = ConfigDict()
    cfg.model.path = "uirl_jax/assets/tiny-ui-base"
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})

    cfg.chat = ConfigDict()
    cfg.chat.system_prompt = ""  # as in the base model's demonstrations
    cfg.chat.prompt_template = "{instruction}"
    cfg.chat.max_screenshots = 6
    cfg.chat.drop_screenshots = 3

    cfg.tasks = (ConfigDict({"name": "desktop/click_button", "max_turns": 1}),)  # four buttons

    cfg.actor = ConfigDict()
    cfg.actor.group_size = 8
    cfg.actor.concurrency = 64
    cfg.actor.rollout = ConfigDict({"temperature": 1.0, "max_new_tokens": 16})

    cfg.engine = ConfigDict()
    cfg.engine.batch_sizes = (8, 64)
    cfg.engine.context_lengths = (80,)
    cfg.engine.prefill_rows = (8,)
    cfg.engine.prefill_lengths = (64,)
    cfg.engine.image_rows = (8,)
    cfg.engine.image_row_patches = 192
    cfg.engine.max_new_tokens = 16
    cfg.engine.decode_steps = 16

    cfg.learner = ConfigDict()
    cfg.learner.steps = 120
    cfg.learner.groups_per_step = 8
    cfg.learner.max_staleness = 0
    cfg.learner.batch = ConfigDict()
    cfg.learner.batch.rows = 8  # one group a row, its prompt once
    cfg.learner.batch.row_lengths = (192,)
    cfg.learner.batch.sampled_lengths = (112,)
    cfg.learner.batch.image_rows = (8,)
    cfg.learner.batch.patch_lengths = (192,)
    cfg.learner.batch.share_prompts = True
    cfg.learner.optimizer = ConfigDict({"lr": 1e-3, "warmup_steps": 5, "schedule": "cosine"})

    cfg.algorithm = ConfigDict()
    cfg.algorithm.loss = ConfigDict({"kl_coefficient": 0.01})

    cfg.evaluation = ConfigDict({"episodes": 200, "temperature": 0.0})
    name, _, variant = task.partition(",")
    if name == "enter_text":
        desktop_tasks.enter_text(cfg, popup="popup=1" in variant)
    elif name == "data_entry":
        desktop_tasks.data_entry(cfg)
    elif name == "miniwob":
        miniwob_tasks.miniwob(cfg, miniwob_tasks.FOUR)
    elif name != "click_button":
        raise ValueError(f"{task!r}, expected click_button, enter_text, data_entry or miniwob")
    for kind in cfg.tasks:
        kind.variant = variant
    return cfg
