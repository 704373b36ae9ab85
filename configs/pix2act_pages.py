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
what it solves, and how it is counted: `--role=eval --tasks=pix2act`. RL gained nothing so far.
"""

from ml_collections import ConfigDict

from configs import miniwob_pages, miniwob_tasks, pix2act_tasks

DEMONSTRATIONS = 150  # of each task in :base
_EASY = (
    *("click-button", "click-button-sequence", "click-collapsible-nodelay", "click-color"),
    *("click-dialog", "click-dialog-2", "click-tab", "click-test", "click-test-2"),
    *("click-test-transfer", "click-widget", "enter-date", "enter-text", "enter-text-2"),
    *("enter-time", "focus-text", "focus-text-2", "login-user", "use-autocomplete-nodelay"),
)
_EXACT = ("bisect-angle", "circle-center", "find-midpoint", "right-angle")  # one pixel pays 1
LESS_SHOWN = (*_EASY, *_EXACT, "unicode-test")  # in :more; but for _EXACT solved by :base
SOLVED = (  # by :more, nine of ten times or more
    *(*_EASY, "click-option", "click-shades", "grid-coordinate", "identify-shape"),
    *("number-checkboxes", "use-colorwheel"),
)
# Seed, steps, and rounds in each of which a task has three demonstrations, or one.
GOING_ON = {"more": (29, 620, 45), "last": (30, 720, 56)}
# Solved never, or 3 of 100 times; a demonstration of the first has up to 13 turns.
LEFT_OUT = ("choose-date-nodelay", "text-transform", "simple-algebra")


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
    # 40 screenshots a step: rows that take them are not half empty.
    cfg.learner.batch.rows = 4
    cfg.learner.batch.image_rows = (8, 10, 12)
    if stage == "base":
        cfg.cold_start.episodes = DEMONSTRATIONS * len(turns)
        cfg.model.path = f"{miniwob_pages.SHIPPED}/start"
        return cfg
    cfg.model.path = f"runs/pix2act-{'base' if stage == 'more' else 'more'}/cold_start/model"
    cfg.seed, cfg.cold_start.steps, rounds = GOING_ON[stage]  # another seed: other instances
    cfg.cold_start.episodes = rounds * len(cfg.tasks)
    cfg.curriculum.weight_by = "none"  # tasks that are there three times have no weight
    return cfg
