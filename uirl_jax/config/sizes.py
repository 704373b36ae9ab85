"""Sizes of engine and learner batches, derived from the screen and the tasks.

A config with `screen_px` needs none of the sizes below: each that it leaves at its default is
computed from the longest episode that its tasks allow, printed with the reason, and checked like a
given one. Sizes that the config sets stay.

The longest context is measured with the run's own tokenizer and context policy: instruction_tokens
for the instruction, a screenshot of screen_px in every turn, and max_new_tokens sampled in each.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from uirl_jax.config.schema import RunConfig
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.log_lines import key_values
from uirl_jax.shards.batching import BatchConfig

STEP_TOKENS = 16  # lengths are multiples of it
MEASURED_TURNS = 200  # beyond them the growth is continued
BATCH_TOKENS = 16_384  # of a learner's batch, where one row is not longer


@dataclasses.dataclass(frozen=True)
class _Episode:
    """The longest episode of the run's tasks, in tokens."""

    first: int  # context of the first turn
    turn: int  # what a turn adds to the context
    longest: int  # context of any turn


def derived(
    cfg: RunConfig,
    chat: Chat,
    inputs: Inputs,
    say: Callable[[str], None],
    *,
    chunked_prefill: bool = True,
) -> RunConfig:
    """The config with all its sizes; unchanged if it has no screen_px.

    Args:
      chunked_prefill: of the family's capabilities; False: a call takes the longest context whole.
      say: called with a line for every size: its key, its value and the reason.
    Raises: ConfigError: a screen that the family cannot read, or an episode that is longer than
      actor.rollout.max_context_tokens.
    """
    if not cfg.screen_px:
        return cfg
    try:
        screen = inputs.plan_screen((cfg.screen_px[0], cfg.screen_px[1]))
    except ImageError as error:
        raise ConfigError(f"screen_px={cfg.screen_px}: {error}") from error
    new_tokens = cfg.actor.rollout.max_new_tokens
    episode = _longest_episode(cfg, chat, screen, new_tokens)
    limit = cfg.actor.rollout.max_context_tokens
    if episode.longest > limit:
        raise ConfigError(
            f"an episode of {max(task.max_turns for task in cfg.tasks)} turns with screens of "
            f"{cfg.screen_px[0]}x{cfg.screen_px[1]} has up to {episode.longest} tokens of "
            f"context, {screen.tokens} of them for each screenshot; "
            f"actor.rollout.max_context_tokens={limit} would end it: raise that, or lower "
            "chat.max_screenshots or chat.history_turns"
        )
    context = _rounded(episode.longest)
    if cfg.engine.context_lengths != EngineConfig().context_lengths:
        context = cfg.engine.context_lengths[-1]  # given: the rows must hold it
    row = _rounded(context + new_tokens)
    # Most episodes are shorter than the longest and share a row: half as many rows as episodes.
    episodes = cfg.learner.groups_per_step * cfg.actor.group_size // cfg.algorithm.minibatches
    if cfg.cold_start.steps:
        episodes = min(episodes, cfg.cold_start.episodes_per_step)
    rows = max(1, min(64, BATCH_TOKENS // row, episodes // 2))
    in_flight = cfg.actor.concurrency
    screens = rows * max(1, row // max(1, screen.tokens + 4))
    prefill = (
        _sizes(_rounded(episode.turn), _rounded(episode.first)),
        "what one turn adds, and the first turn",
    )
    if not chunked_prefill:
        prefill = (_sizes(_rounded(episode.first), context), "whole contexts: the family needs it")
    engine = {
        "max_new_tokens": (new_tokens, "as actor.rollout.max_new_tokens"),
        "context_lengths": (
            _sizes(_rounded(episode.first), _rounded((episode.first + context) / 2), context),
            f"first turn {episode.first} tokens, {episode.turn} a turn, at most {episode.longest}",
        ),
        "prefill_lengths": prefill,
        "batch_sizes": (_sizes(min(8, in_flight), min(64, in_flight)), "of actor.concurrency"),
        "prefill_rows": (_sizes(1, min(8, in_flight)), "of actor.concurrency"),
        "image_rows": (_sizes(1, min(8, in_flight)), "of actor.concurrency"),
        "image_row_patches": (screen.patches, "one screenshot"),
    }
    shown = screen.tokens * min(
        cfg.chat.most_screenshots, max(task.max_turns for task in cfg.tasks)
    )
    # Without it the engine keeps four calls' worth: few where few episodes are played at a time.
    if shown > 4 * screen.tokens * engine["image_rows"][0][-1]:
        engine["image_tokens"] = (shown, "the screenshots of one context")
    batch = {
        "rows": (rows, f"half of {episodes} episodes, at most {BATCH_TOKENS} tokens"),
        "row_lengths": (_sizes(_rounded(row / 2), row), "the longest context and what it samples"),
        "image_rows": (_sizes(_half(screens), screens), "screenshots that such rows can hold"),
        "patch_lengths": ((screen.patches,), "one screenshot"),
    }
    learner = dataclasses.replace(
        cfg.learner, batch=_replaced("learner.batch", cfg.learner.batch, BatchConfig(), batch, say)
    )
    return dataclasses.replace(
        cfg,
        engine=_replaced("engine", cfg.engine, EngineConfig(), engine, say),
        learner=learner,
        screen_px=(),  # from here on the sizes are checked as given ones
    )


def _longest_episode(cfg: RunConfig, chat: Chat, screen: Any, new_tokens: int) -> _Episode:
    turns = max(task.max_turns for task in cfg.tasks)
    if cfg.chat.history_turns is not None:
        turns = min(turns, 1 + cfg.chat.history_turns)  # later contexts are as long
    measured = min(turns, MEASURED_TURNS)
    sampled = chat.longest_reply(new_tokens)
    contexts = [
        chat.context("", [screen] * (turn + 1), [sampled] * turn) for turn in range(measured)
    ]
    lengths = [len(context.ids) + cfg.instruction_tokens for context in contexts]
    grown = [after - before for before, after in itertools.pairwise(lengths)]
    longest = max(lengths)
    if turns > measured:  # what is sampled stays in the context, also of dropped screenshots
        longest += round((longest - lengths[0]) / len(grown) * (turns - measured))
    return _Episode(first=lengths[0], turn=max([*grown, screen.tokens]), longest=longest)


def _replaced(
    section: str,
    given: Any,
    default: Any,
    found: dict[str, tuple[Any, str]],
    say: Callable[[str], None],
) -> Any:
    """The section with what was left at its default replaced."""
    changes = {}
    for name, (value, reason) in found.items():
        if getattr(given, name) == getattr(default, name):
            changes[name] = value
            shown = str(value).replace(" ", "")
            say(key_values("derived", key=f"{section}.{name}", value=shown, reason=reason))
    return dataclasses.replace(given, **changes)


def _rounded(tokens: float) -> int:
    return -(-int(np.ceil(tokens)) // STEP_TOKENS) * STEP_TOKENS


def _half(number: int) -> int:
    return max(1, number // 2)


def _sizes(*sizes: int) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))
