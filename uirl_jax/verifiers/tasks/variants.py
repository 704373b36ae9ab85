"""Variants of a task, as in "buttons=5,by=label": read against a table of what is known."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from uirl_jax.errors import VerifierError


def read(name: str, variant: str, known: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The values that a variant names, numbers as int.

    Args:
      name: of the task, for the message.
      known: key -> the values that it may have.

    Raises:
      VerifierError: unknown key or value; the nearest known one is named.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in variant.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise VerifierError(f"variant {variant!r} of {name}: {part!r} is not key=value")
        if key not in known:
            raise VerifierError(
                f"variant {variant!r} of {name}: unknown key {key!r}{nearest(key, known)}"
            )
        if key in values:
            raise VerifierError(f"variant {variant!r} of {name}: {key!r} is given twice")
        if value not in known[key]:
            raise VerifierError(
                f"variant {variant!r} of {name}: {key} is {value!r}, not one of "
                + ", ".join(known[key])
            )
        values[key] = int(value) if value.isdecimal() else value
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else f", known are {', '.join(words)}"
