"""The 59 tasks of MiniWoB++ on which Pix2Act was measured, from a model that can read pages.

    mkdir -p runs && tar -xf configs/pix2act_start.tar.xz -C runs  # the result of the next three
    python -m uirl_jax.main --config=configs/pix2act_pages.py:base --workdir=runs/pix2act-base
    python -m uirl_jax.main --config=configs/pix2act_pages.py:more --workdir=runs/pix2act-more
    python -m uirl_jax.main --config=configs/pix2act_pages.py:last --workdir=runs/pix2act-last
    python -m uirl_jax.main --config=configs/pix2act_pages.py --workdir=runs/pix2act

`:base` is a cold start on 150 correct demonstrations of each task, played first (Chromium), of the
start of miniwob_pages.py; also of the four tasks that config has and the list has not, so that RL
on either set can start from the result. `:more` goes on from that on others: 45 of each task of
LESS_SHOWN, 135 of the rest; `:last` from that, 56 of each task of SOLVED, 168 of the rest. Only the
newest of the screenshots is seen, and of the two turns before it the actions. docs/pix2act.md has
what it solves, and how the suite is counted: `--role=eval --tasks=pix2act`. RL was run for 20, 23
and 29 steps with different settings, without a gain.
"""

from ml_collections import ConfigDict

from configs import miniwob_pages, miniwob_tasks, pix2act_tasks

DEMONSTRATIONS = 150  # of each task in :base
# In :more. Solved at least nine of ten times by :base, unicode-test eight times; or, by the exact
# pixel alone, never.
LESS_SHOWN = (
    *("bisect-angle", "circle-center", "click-button", "click-button-sequence"),
    *("click-collapsible-nodelay", "click-color", "click-dialog", "click-dialog-2", "click-tab"),
    *("click-test", "click-test-2", "click-test-transfer", "click-widget", "enter-date"),
    *("enter-text", "enter-text-2", "enter-time", "find-midpoint", "focus-text", "focus-text-2"),
    *("login-user", "right-angle", "unicode-test", "use-autocomplete-nodelay"),
)
ROUNDS = 45  # of :more; in each a task has three demonstrations, or one
# In :last. Solved nine of ten times or more by :more.
SOLVED = (
    *("click-button", "click-button-sequence", "click-collapsible-nodelay", "click-color"),
    *("click-dialog", "click-dialog-2", "click-option", "click-shades", "click-tab", "click-test"),
    *("click-test-2", "click-test-transfer", "click-widget", "enter-date", "enter-text"),
    *("enter-text-2", "enter-time", "focus-text", "focus-text-2", "grid-coordinate"),
    *("identify-shape", "login-user", "number-checkboxes", "use-autocomplete-nodelay"),
    "use-colorwheel",
)
# Solved never, or 3 of 100 times; a demonstration of the first has up to 13 turns.
LEFT_OUT = ("choose-date-nodelay", "text-transform", "simple-algebra")
LAST_ROUNDS = 56  # as ROUNDS


def get_config(stage: str = "grpo") -> ConfigDict:
    if stage not in ("base", "more", "last", "grpo"):
        raise ValueError(f"{stage!r}, expected base, more, last or grpo")
    cfg = miniwob_pages.get_config("grpo" if stage == "grpo" else "base")
    turns = pix2act_tasks.MAX_TURNS
    if stage != "grpo":
        turns = miniwob_tasks.MAX_TURNS | turns
    once = {"more": LESS_SHOWN, "last": SOLVED}.get(stage, tuple(turns))
    cfg.tasks = tuple(
        ConfigDict({"name": f"miniwob/{name}", "max_turns": most})
        for name, most in turns.items()
        if stage != "last" or name not in LEFT_OUT
        for _ in range(1 if name in once else 3)
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
    # 40 screenshots a step, 2.5 of a demonstration: rows that take them are not half empty.
    cfg.learner.batch.rows = 4
    cfg.learner.batch.image_rows = (8, 10, 12)
    if stage == "base":
        cfg.cold_start.episodes = DEMONSTRATIONS * len(turns)
        cfg.model.path = f"{miniwob_pages.SHIPPED}/start"
        return cfg
    before = {"more": "base", "last": "more"}[stage]
    cfg.model.path = f"runs/pix2act-{before}/cold_start/model"
    cfg.cold_start.episodes = {"more": ROUNDS, "last": LAST_ROUNDS}[stage] * len(cfg.tasks)
    cfg.seed = {"more": 29, "last": 30}[stage]  # other instances
    cfg.curriculum.weight_by = "none"  # tasks that are there three times have no weight
    if stage == "last":
        cfg.cold_start.steps = 720
    return cfg
