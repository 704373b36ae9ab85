"""The files of a model directory besides its weights: JSON, tokenizer, processor."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError

CHAT_FILE = "uirl_chat.json"  # see families.chat_config
TOKENIZER_FILES = (  # and those of the processor
    CHAT_FILE,
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)


def read_json(path: Path, expected: str = "a model directory in Hugging Face's format") -> Any:
    """Reads a JSON file that holds an object.

    Args:
      expected: the kind of directory that the file belongs to; named in the error.
    Returns: a dict.
    Raises: ModelError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error}); expected {expected}"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def is_finite_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number, also as a float: an integer may be too large."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def copy_tokenizer(model_dir: Path, target: Path) -> None:
    """Copies those of TOKENIZER_FILES that exist."""
    for name in TOKENIZER_FILES:
        if (model_dir / name).exists():
            shutil.copyfile(model_dir / name, target / name)
