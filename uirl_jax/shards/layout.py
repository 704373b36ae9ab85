"""What a shard's header says about the model that sampled: the one place that derives it."""

from typing import Any

from uirl_jax.shards.record import TokenLayout


def layout_of(cfg: Any) -> TokenLayout:
    """The layout of the tokens that a model with this config (`Family.read_config`) samples."""
    return TokenLayout(cfg.vocab_size, cfg.image_token_id)
