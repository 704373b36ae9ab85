"""How the start of pix2act_pages.py was made, and how often each task is shown; no config itself.

    python -m uirl_jax.main --config=configs/pix2act_pages.py:base --workdir=runs/pix2act-base
    python -m uirl_jax.main --config=configs/pix2act_pages.py:more --workdir=runs/pix2act-more
    python -m uirl_jax.main --config=configs/pix2act_pages.py:last --workdir=runs/pix2act-last
    python -m uirl_jax.main --config=configs/pix2act_pages.py:again --workdir=runs/pix2act-again
    python -m uirl_jax.main --config=configs/pix2act_pages.py:aim --workdir=runs/pix2act-aim
    python -m tools.average_models --out=runs/pix2act-mean runs/pix2act-last/cold_start/model \
        runs/pix2act-again/cold_start/model runs/pix2act-aim/cold_start/model
    python -m uirl_jax.main --config=configs/pix2act_pages.py:figures --workdir=runs/pix2act-figures
    python -m tools.average_models --out=runs/pix2act-half runs/pix2act-mean \
        runs/pix2act-figures/cold_start/model
    python -m uirl_jax.main --config=configs/pix2act_pages.py:polish --workdir=runs/pix2act-polish
    python -m tools.average_models --out=runs/pix2act-start runs/pix2act-mean \
        runs/pix2act-figures/cold_start/model runs/pix2act-polish/cold_start/model

`:base` is a cold start on 150 correct demonstrations of each task, played first (Chromium), of the
start of miniwob_pages.py. The others go on from it on other demonstrations, a number of rounds:
what a model before solved, by its tuning episodes, is shown once in a round, so that it is not
forgotten; what it did not, more often. `:polish` sees those of `:figures` once more.
"""

_EASY = (
    *("click-button", "click-button-sequence", "click-collapsible-nodelay", "click-color"),
    *("click-dialog", "click-dialog-2", "click-tab", "click-test", "click-test-2"),
    *("click-test-transfer", "click-widget", "enter-date", "enter-text", "enter-text-2"),
    *("enter-time", "focus-text", "focus-text-2", "login-user", "use-autocomplete-nodelay"),
)
_EXACT = ("bisect-angle", "circle-center", "find-midpoint", "right-angle")  # one pixel pays 1
_SOLVED = (  # by :more, nine of ten times or more
    *(*_EASY, "click-option", "click-shades", "grid-coordinate", "identify-shape"),
    *("number-checkboxes", "use-colorwheel"),
)
# Solved never, or 3 of 100 times; a demonstration of the first has up to 13 turns.
_LEFT_OUT = ("choose-date-nodelay", "text-transform", "simple-algebra")
# The model before, seed, steps, rounds and learning rate.
GOING_ON = {
    "more": ("base/cold_start/model", 29, 620, 45, 1.5e-3),
    "last": ("more/cold_start/model", 30, 720, 56, 1.5e-3),
    "again": ("last/cold_start/model", 31, 1000, 52, 1.5e-3),
    "aim": ("again/cold_start/model", 32, 600, 32, 1.5e-3),
    "figures": ("mean", 33, 800, 45, 1.2e-3),
    "polish": ("half", 34, 220, 0, 6e-4),  # the demonstrations of :figures once more
    "sums": ("start", 35, 720, 40, 1.2e-3),
}
# How often a round of :aim shows a task: most where :again misses the place, less where it misreads
# a text, least what it solved; tasks that are not here as in the stages before.
_AIM = {
    **dict.fromkeys(("right-angle", "use-slider"), 8),
    **dict.fromkeys(("drag-shapes", "drag-sort-numbers", "visual-addition"), 6),
    **dict.fromkeys(("bisect-angle", "find-midpoint", "use-slider-2", "drag-items"), 4),
    **dict.fromkeys(("drag-items-grid", "count-shape", "tic-tac-toe"), 4),
    **dict.fromkeys(("click-tab-2", "click-tab-2-hard", "click-collapsible-2-nodelay"), 2),
    **dict.fromkeys(("simple-arithmetic", "resize-textarea", "click-widget"), 2),
    **dict.fromkeys(("click-option", "use-autocomplete-nodelay"), 2),
    **dict.fromkeys(("count-sides", "drag-box", "drag-circle", "unicode-test"), 1),
    "circle-center": 1,
}
# Of :figures: most where figures or letters in large type are misread.
_FIGURES = {
    **{"simple-arithmetic": 32, "click-pie-nodelay": 16},
    **dict.fromkeys(("use-slider", "simple-algebra", "text-transform"), 4),
    **dict.fromkeys(("visual-addition", "use-slider-2", "drag-shapes", "drag-sort-numbers"), 2),
    "choose-date-nodelay": 0,
}
# Of :sums: the same again with algebra, and what needs a word of a text to be found.
_SUMS = {
    **dict.fromkeys(("simple-arithmetic", "simple-algebra"), 24),
    **{"click-pie-nodelay": 12, "use-slider": 8, "click-shape": 6, "choose-date-nodelay": 0},
    **dict.fromkeys(("text-transform", "drag-items-grid"), 4),
    **dict.fromkeys(("click-tab-2", "click-tab-2-hard", "click-tab-2-medium"), 3),
    **dict.fromkeys(("click-tab-2-easy", "click-collapsible-2-nodelay"), 3),
    **dict.fromkeys(("email-inbox-delete", "email-inbox-important"), 3),
    **dict.fromkeys(("click-link", "click-option", "navigate-tree", "drag-items"), 2),
}


def shown(stage: str, name: str) -> int:
    """How many times in a round: once what is solved, more often what is not."""
    if stage == "more":
        return 1 if name in (*_EASY, *_EXACT, "unicode-test") else 3
    if stage in ("figures", "polish"):
        return _FIGURES.get(name, 1)
    if stage == "sums":
        return _SUMS.get(name, 1)
    if name in _LEFT_OUT:
        return 0
    if stage == "aim" and name in _AIM:
        return _AIM[name]
    if stage == "again" and name in _EXACT:
        return 1 if name == "circle-center" else 8
    return 1 if name in _SOLVED else 3
