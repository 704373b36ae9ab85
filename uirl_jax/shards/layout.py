"""Derives the token layout in a shard's header from a model config."""

from typing import Any

from uirl_jax.shards.record import TokenLayout


def layout_of(cfg: Any) -> TokenLayout:
    """The layout of the tokens that a model with this config (`Family.read_config`) samples."""
    return TokenLayout(cfg.vocab_size, cfg.image_token_id)
