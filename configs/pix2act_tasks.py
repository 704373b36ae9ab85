"""The 59 tasks of MiniWoB++ that Pix2Act was measured on; not a config by itself.

From google-deepmind/pix2act (fedaad6), pix2act/tasks/miniwob/eval/tasks.txt. The package `miniwob`
1.1 calls its drag-item drag-circle: the same page. docs/miniwob_tasks.md says what differs.
"""

from ml_collections import ConfigDict

from configs import miniwob_tasks

# By the turns of an episode: the longest of a script's over 20 seeds (2026-11-25; over 60 where it
# looks for something, 2026-11-30), one more where that is 1 or 2, and two where it is longer; the
# tasks of miniwob_tasks.py have theirs.
_NAMES = {
    2: (
        *("click-button", "click-color", "click-dialog", "click-dialog-2", "click-link"),
        *("click-shape", "click-tab", "click-tab-2-easy", "click-tab-2-medium", "click-test"),
        *("click-test-2", "click-test-transfer", "click-widget", "count-shape", "count-sides"),
        *("drag-items", "drag-items-grid", "email-inbox-delete", "email-inbox-important"),
        *("grid-coordinate", "identify-shape", "unicode-test"),
    ),
    3: (
        *("bisect-angle", "circle-center", "click-button-sequence", "click-collapsible-nodelay"),
        *("click-option", "click-pie-nodelay", "drag-box", "drag-circle", "find-midpoint"),
        *("resize-textarea", "right-angle"),
    ),
    5: (
        *("click-tab-2", "drag-shapes", "enter-date", "enter-text-2", "enter-time"),
        *("simple-algebra", "simple-arithmetic", "text-transform", "visual-addition"),
    ),
    6: (
        *("click-checkboxes-transfer", "click-collapsible-2-nodelay", "drag-sort-numbers"),
        *("navigate-tree", "use-autocomplete-nodelay", "use-slider", "use-slider-2"),
    ),
    7: ("tic-tac-toe", "use-colorwheel", "use-colorwheel-2"),
    8: ("click-checkboxes", "click-checkboxes-soft", "click-shades", "click-tab-2-hard"),
    15: ("click-checkboxes-large",),
    16: ("choose-date-nodelay",),
    17: ("number-checkboxes",),
}
MAX_TURNS = {name: turns for turns, names in _NAMES.items() for name in names}


def pix2act(cfg: ConfigDict) -> None:
    """All of them, as miniwob_tasks.miniwob; of a long episode the last 8 screenshots are seen."""
    miniwob_tasks.miniwob(cfg, tuple(MAX_TURNS), MAX_TURNS)
    cfg.engine.context_lengths = (160, 384, 736, 1088)
    cfg.learner.batch.row_lengths = (768, 1120)
