"""Changes of the quickstart for tasks of MiniWoB++ in Chromium; not a config by itself."""

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

# By the turns of an episode; most tasks need one less, or end with their first click.
_NAMES = {
    2: (
        *("click-test", "click-test-2", "click-button", "click-dialog", "click-dialog-2"),
        *("focus-text", "focus-text-2", "click-tab", "click-shape", "click-color"),
        *("click-widget", "grid-coordinate", "identify-shape"),
    ),
    4: ("enter-text",),
    7: ("login-user",),
    8: ("click-checkboxes",),
}
MAX_TURNS = {name: turns for turns, names in _NAMES.items() for name in names}
FOUR = ("click-dialog-2", "click-tab", "focus-text-2", "enter-text")  # for comparing algorithms


def miniwob(
    cfg: ConfigDict, names: Sequence[str], max_turns: Mapping[str, int] = MAX_TURNS
) -> None:
    """Screenshots (160x210) and the instruction, mouse and keyboard."""
    cfg.tasks = tuple(
        ConfigDict({"name": f"miniwob/{name}", "max_turns": max_turns[name]}) for name in names
    )
    cfg.chat.max_screenshots = 8  # all of them: an episode is one sequence
    cfg.chat.drop_screenshots = 1

    cfg.actor.concurrency = 16
    cfg.actor.rollout.max_new_tokens = 24

    cfg.engine.slots = 16
    cfg.engine.batch_sizes = (4, 16)
    cfg.engine.context_lengths = (160, 384, 736)
    cfg.engine.prefill_rows = (1, 4)
    cfg.engine.prefill_lengths = (80, 128)
    cfg.engine.image_rows = (1, 4)
    cfg.engine.image_row_patches = 192
    cfg.engine.max_new_tokens = 24

    cfg.learner.groups_per_step = 16
    cfg.learner.batch.rows = 8
    cfg.learner.batch.row_lengths = (768,)
    cfg.learner.batch.sampled_lengths = (160,)
    cfg.learner.batch.image_rows = (64,)
    cfg.learner.batch.patch_lengths = (192,)
    cfg.learner.batch.share_prompts = False
