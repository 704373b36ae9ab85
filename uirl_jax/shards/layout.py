"""What a shard's header says about the model that sampled: the one place that derives it."""

from uirl_jax.models.qwen2_vl_config import Qwen2VLConfig
from uirl_jax.shards.record import TokenLayout


def layout_of(cfg: Qwen2VLConfig) -> TokenLayout:
    """The layout of the tokens that a model with this config samples."""
    return TokenLayout(cfg.vocab_size, cfg.image_token_id, cfg.vision.spatial_merge_size)
