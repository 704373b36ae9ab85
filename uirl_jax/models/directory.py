"""A model directory in Hugging Face's format, besides its weights: JSON files, tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError

TOKENIZER_FILES = (  # and the processor's
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)


def read_json(path: Path, expected: str = "a model directory in Hugging Face's format") -> Any:
    """The object of a JSON file, a dict.

    Args:
      expected: what the file should have been part of, for the error.

    Raises: ModelError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error}); expected {expected}"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def copy_tokenizer(model_dir: Path, target: Path) -> None:
    """Copies the files of tokenizer and processor that the directory has."""
    for name in TOKENIZER_FILES:
        if (model_dir / name).exists():
            shutil.copyfile(model_dir / name, target / name)
