"""JSON from the other side of a socket, or from a model, parsed with limits.

Python's own parser accepts NaN, 1e999, duplicate keys, integers of any length and lone surrogates,
and raises RecursionError on deep nesting; this module refuses all of these with ValueError.
"""

import json
import math
import unicodedata
from typing import Any

MAX_DEPTH = 16
MAX_INTEGER_CHARS = 20
MAX_VALUES = 3_000_000  # as objects, of which {} is the largest, some 300 MB


def parse(body: bytes) -> dict[str, Any]:
    """Reads one JSON object, as `parse_text` does.

    Args:
      body: UTF-8. Its size is the caller's to bound, before reading it.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    return parse_text(text)


def parse_text(text: str) -> dict[str, Any]:
    """Reads one JSON object.

    Returns:
      dict, list, str, finite float, int, bool and None, at most MAX_DEPTH deep.

    Raises:
      ValueError: with a printable reason that continues "the text ...".
    """
    if (values := text.count(",") + text.count("{") + text.count("[")) > MAX_VALUES:
        raise ValueError(f"holds up to {values} values, at most {MAX_VALUES} are read")
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short_integer,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}, expected an object")
    _check(value)
    return value


def printable(text: str, max_chars: int = 80) -> str:
    """`text` as it may stand in a log or an error: one line, no control or direction characters."""
    shown = "".join(
        "?" if unicodedata.category(char)[0] == "C" or char in "\u2028\u2029" else char
        for char in text[: max_chars + 1]
    )
    return shown if len(shown) <= max_chars else shown[: max_chars - 3] + "..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"holds {printable(digits, 20)}, which is infinite")
    return value


def _short_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_CHARS:
        raise ValueError(f"holds an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"holds the key {printable(key)!r} twice")
        found[key] = value
    return found


def _check(value: object) -> None:
    """Walks without recursion: the depth, and that every string can be written as UTF-8 again."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif (
                isinstance(item, str)
                and not item.isascii()  # a screenshot is, of megabytes
                and any("\ud800" <= char <= "\udfff" for char in item)
            ):
                raise ValueError("holds a lone surrogate")
        level = below
