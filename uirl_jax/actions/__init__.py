"""Action text <-> Action in every format, and the coordinate spaces of models.

This package is the first to read sampled text, and does not trust it. Verifiers perform actions,
and the actor decides what a wrong one costs.
"""

from uirl_jax.actions.coordinates import SPACES
from uirl_jax.actions.formats import (
    FORMATS,
    TEXT,
    ActionFormat,
    cursor_after,
    find_format,
    format_action,
    parse,
)
from uirl_jax.actions.kinds import (
    CHARACTER_KEYS,
    DIRECTIONS,
    KINDS,
    MAX_ACTION_CHARS,
    MAX_SCROLL_PX,
    MAX_SECONDS,
    MAX_TEXT_CHARS,
    MODIFIERS,
    NAMED_KEYS,
    STATUSES,
    usage,
    validate,
)
from uirl_jax.actions.prompts import Prompt

__all__ = [
    "CHARACTER_KEYS",
    "DIRECTIONS",
    "FORMATS",
    "KINDS",
    "MAX_ACTION_CHARS",
    "MAX_SCROLL_PX",
    "MAX_SECONDS",
    "MAX_TEXT_CHARS",
    "MODIFIERS",
    "NAMED_KEYS",
    "SPACES",
    "STATUSES",
    "TEXT",
    "ActionFormat",
    "Prompt",
    "cursor_after",
    "find_format",
    "format_action",
    "parse",
    "usage",
    "validate",
]
