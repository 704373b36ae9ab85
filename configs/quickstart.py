"""The first run: an agent learns on a CPU to click the button that the instruction names.

    bash launch/local.sh

Starts from the 2.7 M parameter base model that ships with the package. It finds the buttons, but
most of its demonstrations were wrong on purpose. Results: docs/quickstart.md.

`quickstart.py:enter_text` (or a variant, `:enter_text,words=2`) is a task of several turns,
`:data_entry,rows=1,columns=1` a longer one, and `:miniwob` four tasks of MiniWoB++. The shipped
base cannot do these: docs/notes/algorithms.md describes a base for enter_text, and
configs/miniwob_cpu.py:base one for miniwob; no working base for data_entry is known.
"""

from ml_collections import ConfigDict

from configs import desktop_tasks, miniwob_tasks


def get_config(task: str = "click_button") -> ConfigDict:
    cfg = ConfigDict()
    cfg.seed = 0

    cfg.model = ConfigDict()
    cfg.model.path = "asset:tiny-ui-base"
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})

    cfg.chat = ConfigDict()  # prompts: the base model's own, of its uirl_chat.json
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
    cfg.engine.prefill_lengths = (64, 80)  # 80: of families that read a context in one call
    cfg.engine.image_rows = (8,)
    cfg.engine.image_row_patches = 192
    cfg.engine.max_new_tokens = 16
    cfg.engine.decode_steps = 16

    cfg.learner = ConfigDict()
    cfg.learner.steps = 120
    cfg.learner.groups_per_step = 8
    cfg.learner.max_staleness = 0
    cfg.learner.batch = ConfigDict()
    cfg.learner.batch.rows = 8  # a row holds one group, its prompt once
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
