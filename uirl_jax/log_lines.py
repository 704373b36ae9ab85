"""The form of log lines: key=value, and text from elsewhere never starts a line of its own."""

import json
import re

_PLAIN = re.compile(r"[^\s\"=]+")


def key_values(event: str, **fields: object) -> str:
    """A log line: `event=shard_quarantined path=shards/a3.tfrecord reason="no footer"`.

    Values with blanks, quotes or control characters are quoted and escaped, so that text from a
    model or verifier cannot start a new line or send terminal control codes.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in {"event": event, **fields}.items())


def _value(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)
