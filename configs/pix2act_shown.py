"""How often a round of demonstrations shows each of the 59 tasks, by stage; no config itself.

The stages are those of pix2act_rounds.py. What a model solves is shown once, so that it is not
forgotten; what it does not solve, more often.
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


def shown(stage: str, name: str) -> int:
    """How many times in a round: once what is solved, more often what is not."""
    if stage == "more":
        return 1 if name in (*_EASY, *_EXACT, "unicode-test") else 3
    if stage in ("figures", "polish"):
        return _FIGURES.get(name, 1)
    if name in _LEFT_OUT:
        return 0
    if stage == "aim" and name in _AIM:
        return _AIM[name]
    if stage == "again" and name in _EXACT:
        return 1 if name == "circle-center" else 8
    return 1 if name in _SOLVED else 3
