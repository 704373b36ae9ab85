"""The model's config.json: sizes, and ids of the tokenizer."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families import config_file


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    """Names of the text tower as in a Llama's config.json."""

    vocab_size: int
    image_token_id: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    channels: tuple[int, int] = (64, 128)  # of the convolutions, before those of hidden_size
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.07  # of the token embeddings
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        config_file.check(self)
        whole = len(self.channels) == 2 and all(type(n) is int and n > 0 for n in self.channels)
        problems = [] if whole else [f"channels={self.channels}, expected two positive integers"]
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim}, expected an even number")
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append("num_attention_heads is not a multiple of num_key_value_heads")
        if type(self.tie_word_embeddings) is not bool:
            problems.append(f"tie_word_embeddings={self.tie_word_embeddings!r}, expected a bool")
        config_file.check(problems=problems)


def read_config(model_dir: Path) -> OwnConfig:
    """Raises: ModelError."""
    return config_file.read_file(model_dir / "config.json", _from_dict)


def _from_dict(values: Mapping[str, Any]) -> OwnConfig:
    fields = {field.name for field in dataclasses.fields(OwnConfig)}
    if unknown := set(values) - fields - {"model_type", "torch_dtype"}:
        raise ModelError(f"config.json: nothing here computes {', '.join(sorted(unknown))}")
    config_file.check_complete(values, dataclasses.fields(OwnConfig))
    own = {name: value for name, value in values.items() if name in fields}
    return OwnConfig(**own | {"channels": tuple(values.get("channels", OwnConfig.channels))})


def to_json(cfg: OwnConfig) -> dict[str, Any]:
    return {"model_type": "own_model", **dataclasses.asdict(cfg)}
