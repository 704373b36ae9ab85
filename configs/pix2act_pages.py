"""The 59 tasks of MiniWoB++ on which Pix2Act was measured, from a model that can read pages.

    mkdir -p runs && tar -xf configs/pix2act_start.tar.xz -C runs
    python -m uirl_jax.main --config=configs/pix2act_pages.py --workdir=runs/pix2act

The start was made in stages of demonstrations (`:base` and others), whose commands are in
pix2act_rounds.py; they also show the four tasks of miniwob_pages.py that the list has not, so that
RL on either set can start from the result. Only the newest of the screenshots is seen, and of the
two turns before it the actions. docs/pix2act.md has what it solves, and how it is counted. RL on
many tasks gained nothing so far; on one, as by configs/pix2act_pages.py:right-angle, it did, and
others fell.
"""

from ml_collections import ConfigDict

from configs import miniwob_pages, miniwob_tasks, pix2act_tasks
from configs.pix2act_rounds import GOING_ON
from configs.pix2act_shown import shown


def get_config(stage: str = "grpo") -> ConfigDict:
    if stage not in ("base", *GOING_ON, "grpo"):
        return _one_task(stage)
    cfg = miniwob_pages.get_config("grpo" if stage == "grpo" else "base")
    turns = pix2act_tasks.MAX_TURNS
    if stage != "grpo":
        turns = miniwob_tasks.MAX_TURNS | turns
    cfg.tasks = tuple(
        ConfigDict({"name": f"miniwob/{name}", "max_turns": most})
        for name, most in turns.items()
        for _ in range(shown(stage, name) if stage in GOING_ON else 1)
    )
    # Nearly every page shows what was done. The 17th turn of number-checkboxes would be behind
    # sixteen others: 905 tokens.
    cfg.chat.history_turns = 2
    cfg.engine.context_lengths = (192, 256, 384)
    cfg.engine.prefill_lengths = (192, 384)
    cfg.evaluation.episodes = 10 * len(turns)
    if stage == "grpo":
        cfg.model.path = "runs/pix2act-start"
        # A turn is a screenshot and few sampled tokens: with at most four screenshots a batch of
        # two rows was half empty, and learning took 69 s a step, not 42.
        cfg.learner.batch.image_rows = (4, 8)
        cfg.learner.groups_per_step = len(turns)  # on average one of each task
        return cfg
    cfg.cold_start.steps = 620
    cfg.cold_start.optimizer.lr = 1.5e-3
    # 40 screenshots a step: rows that take them are not half empty.
    cfg.learner.batch.rows = 4
    cfg.learner.batch.image_rows = (8, 10, 12)
    if stage == "base":
        cfg.cold_start.episodes = 150 * len(turns)
        cfg.model.path = f"{miniwob_pages.SHIPPED}/start"
        return cfg
    before, cfg.seed, cfg.cold_start.steps, rounds, lr = GOING_ON[stage]  # another seed: others
    cfg.model.path = f"runs/pix2act-{before}"
    cfg.cold_start.optimizer.lr = lr
    cfg.cold_start.episodes = rounds * len(cfg.tasks)
    if stage == "polish":
        cfg.cold_start.demonstrations = ("runs/pix2act-figures/cold_start/demonstrations",)
    cfg.curriculum.weight_by = "none"  # tasks that are there three times have no weight
    return cfg


def _one_task(name: str) -> ConfigDict:
    """GRPO on one of the 59 tasks; settings of docs/notes/page_model.md, "right-angle alone"."""
    if name not in pix2act_tasks.MAX_TURNS:
        raise ValueError(f"{name!r}, expected {', '.join(('base', *GOING_ON))}, a task or grpo")
    cfg = get_config("grpo")
    cfg.tasks = tuple(task for task in cfg.tasks if task.name == f"miniwob/{name}")
    cfg.curriculum.weight_by = "none"
    cfg.learner.steps, cfg.learner.groups_per_step = 60, 8
    cfg.algorithm.minibatches = 2
    cfg.algorithm.advantage = ConfigDict({})
    cfg.algorithm.loss.kl_estimator = "k2"  # single tokens of a large KL would fill a step
    cfg.evaluation.episodes = 100
    return cfg
