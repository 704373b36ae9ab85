"""How often each task is shown in the stages of pix2act_pages.py; not a config by itself.

A stage of demonstrations is a number of rounds. What a model before solved, by its tuning episodes,
is shown once in a round, so that it is not forgotten; what it did not, more often.
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
# The stage before, seed, steps and rounds.
GOING_ON = {
    "more": ("base", 29, 620, 45),
    "last": ("more", 30, 720, 56),
    "again": ("last", 31, 1000, 52),
    "aim": ("again", 32, 600, 32),
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


def shown(stage: str, name: str) -> int:
    """How many times in a round: once what is solved, more often what is not."""
    if stage == "more":
        return 1 if name in (*_EASY, *_EXACT, "unicode-test") else 3
    if name in _LEFT_OUT:
        return 0
    if stage == "aim" and name in _AIM:
        return _AIM[name]
    if stage == "again" and name in _EXACT:
        return 1 if name == "circle-center" else 8
    return 1 if name in _SOLVED else 3
