"""The toy in NNX: one linear layer over patches, then the decoder that families share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.toy_family.config import ToyConfig
from tests.toy_family.inputs import PATCH_PX
from tests.toy_family.names import WEIGHTS
from uirl_jax.families.border import TokenRows
from uirl_jax.models import decoder, layers
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import LoraConfig, adapted_linear


class Toy(nnx.Module):
    """See border.Model."""

    def __init__(
        self,
        cfg: ToyConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        remat: Any = "none",
    ) -> None:
        self.cfg, self.lora = cfg, lora
        self.patches = adapted_linear(
            *("patches", 3 * PATCH_PX**2, cfg.hidden_size),
            **dict(lora=lora, table=WEIGHTS, rngs=rngs, param_dtype=param_dtype),
        )
        self.text = decoder.Decoder(
            decoder_config(cfg),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=param_dtype,
            remat=remat,
        )

    def encode_images(self, vision: Mapping[str, jax.Array], **options: Any) -> jax.Array:
        pixels_ipc = vision["patches_ipc"].astype(self.text.compute_dtype) / 127.5 - 1
        return self.patches(pixels_ipc, **options).reshape(-1, self.cfg.hidden_size)

    def hidden(self, rows: TokenRows, visual_md: jax.Array | None, **options: Any) -> jax.Array:
        x_btd = self.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True)
        segments = (rows.segment_ids_bt, rows.prefix_segments_bt)
        x_btd, _ = self.text.rows(x_btd, self._rotary(rows.positions_abt), *segments, **options)
        return self.text.final_norm(x_btd)

    def extend(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        positions_abt: jax.Array,
        cache: KVCache,
        start_b: jax.Array,
        **options: Any,
    ) -> tuple[jax.Array, KVCache]:
        x_btd = self.text.embed(token_ids_bt, visual_md, vision_index_bt)
        return self.text.extend(x_btd, self._rotary(positions_abt), cache, start_b, **options)

    def logits(self, x_btd: jax.Array) -> jax.Array:
        return self.text.logits(x_btd)

    def _rotary(self, positions_abt: jax.Array) -> decoder.Rotary:
        half = self.cfg.head_dim // 2
        return decoder.Rotary(
            *layers.mrope_angles(positions_abt, self.cfg.head_dim, 10_000.0, sections=(half,))
        )


def decoder_config(cfg: ToyConfig) -> decoder.DecoderConfig:
    return decoder.DecoderConfig(
        cfg.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=cfg.head_dim,
        initializer_range=0.2,
    )


def init_cache(cfg: ToyConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)
