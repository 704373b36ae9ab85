"""The toy's config.json: what the package asks of a config, and no more."""

import dataclasses
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.models.directory import read_json


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    vocab_size: int
    image_token_id: int
    hidden_size: int = 32
    head_dim: int = 16


def read_config(model_dir: Path) -> ToyConfig:
    """Raises: ModelError."""
    values = read_json(model_dir / "config.json")
    names = {field.name for field in dataclasses.fields(ToyConfig)}
    try:
        return ToyConfig(**{name: value for name, value in values.items() if name in names})
    except TypeError as error:
        raise ModelError(f"{model_dir / 'config.json'}: {error}") from error


def to_json(cfg: ToyConfig) -> dict[str, Any]:
    return {"model_type": "toy", **dataclasses.asdict(cfg)}
