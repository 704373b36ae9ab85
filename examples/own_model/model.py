"""The model in NNX: convolutions over the screen, then the decoder that families share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.own_model.config import OwnConfig
from examples.own_model.inputs import BLOCK_PX, TOKENS
from examples.own_model.names import WEIGHTS
from uirl_jax.families.border import TokenRows
from uirl_jax.models import decoder, layers
from uirl_jax.models.blocks import Remat, checkpointed
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain


class Stage(nnx.Module):
    """x + mix(gelu(3x3 convolution(norm(x)))), at one resolution."""

    def __init__(self, channels: int, **options: Any) -> None:
        self.norm = layers.RMSNorm(channels, eps=1e-6, param_dtype=options["param_dtype"])
        self.conv = adapted_linear("conv", 9 * channels, channels, use_bias=True, **options)
        self.mix = adapted_linear("mix", channels, channels, axes=("wide", None), **options)

    def __call__(
        self, x_ihwc: jax.Array, adapters: bool, dropout_key: jax.Array | None
    ) -> jax.Array:
        conv_key, mix_key = split_key(dropout_key, 2)
        y_ihwc = _neighbours(self.norm(x_ihwc))
        y_ihwc = layers.gelu_tanh(self.conv(y_ihwc, adapters=adapters, dropout_key=conv_key))
        return x_ihwc + self.mix(y_ihwc, adapters=adapters, dropout_key=mix_key)


class ScreenEncoder(nnx.Module):
    """Blocks of 8 x 8 pixels, a stage; half the resolution, a stage; half again, a stage."""

    def __init__(self, cfg: OwnConfig, *, lora: LoraConfig | None, **options: Any) -> None:
        first, second = cfg.channels
        dim = cfg.hidden_size
        whole = {"axes": (None, None), "use_bias": True, **options}
        adapted = {"lora": lora, "table": WEIGHTS, **options}
        self.stem = Linear(3 * BLOCK_PX**2, first, **whole)
        self.stage1 = Stage(first, **adapted)
        self.halve1 = Linear(4 * first, second, **whole)
        self.stage2 = Stage(second, **adapted)
        self.halve2 = Linear(4 * second, dim, **whole)
        self.stage3 = Stage(dim, **adapted)
        places_td = jax.random.normal(options["rngs"].params(), (TOKENS, dim), jnp.float32)
        self.places = nnx.Param(places_td.astype(options["param_dtype"]))
        self.norm = layers.RMSNorm(dim, eps=1e-6, param_dtype=options["param_dtype"])

    def __call__(
        self, x_ihwf: jax.Array, *, adapters: bool = True, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Pixels from -1 to 1, [I,H,W,F] -> visual tokens [I,T,D]."""
        keys = split_key(dropout_key, 3)
        x_ihwc = self.stage1(self.stem(x_ihwf), adapters, keys[0])
        x_ihwc = self.stage2(self.halve1(_squares(x_ihwc)), adapters, keys[1])
        x_ihwc = self.stage3(self.halve2(_squares(x_ihwc)), adapters, keys[2])
        x_itd = x_ihwc.reshape(len(x_ihwc), TOKENS, -1)
        return self.norm(x_itd + self.places[...].astype(x_itd.dtype))


def _neighbours(x_ihwc: jax.Array) -> jax.Array:
    """Every place with the eight around it, zeros beyond the edge: [I,H,W,9C]."""
    rows, columns = x_ihwc.shape[1:3]
    padded = jnp.pad(x_ihwc, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [
        padded[:, down : down + rows, right : right + columns]
        for down in range(3)
        for right in range(3)
    ]
    return jnp.concatenate(shifted, axis=-1)


def _squares(x_ihwc: jax.Array) -> jax.Array:
    """Four places as one: [I,H/2,W/2,4C]."""
    images, rows, columns, channels = x_ihwc.shape
    cut = x_ihwc.reshape(images, rows // 2, 2, columns // 2, 2, channels).swapaxes(2, 3)
    return cut.reshape(images, rows // 2, columns // 2, 4 * channels)


class OwnModel(nnx.Module):
    """See border.Model."""

    def __init__(
        self,
        cfg: OwnConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        remat: Remat = "none",
    ) -> None:
        self.cfg, self.lora, self.remat = cfg, lora, remat
        self.screen = ScreenEncoder(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = decoder.Decoder(
            decoder.DecoderConfig.from_config(cfg),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=param_dtype,
            remat=remat,
        )

    def encode_images(self, vision: Mapping[str, jax.Array], **options: Any) -> jax.Array:
        pixels_ihwf = vision["blocks_ihwc"].astype(self.text.compute_dtype) / 127.5 - 1
        encode = checkpointed(
            lambda pixels: self.screen(pixels, **options), self.remat, scanned=False
        )
        return constrain(encode(pixels_ihwf).reshape(-1, self.cfg.hidden_size), "visual", None)

    def hidden(self, rows: TokenRows, visual_md: jax.Array | None, **options: Any) -> jax.Array:
        x_btd = self.text.embed(
            rows.token_ids_bt,
            visual_md,
            rows.vision_index_bt,
            in_parts=True,
            adapters=options.get("adapters", True),
        )
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

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array:
        return self.text.logits(x_btd, adapters=adapters)

    def _rotary(self, positions_abt: jax.Array) -> decoder.Rotary:
        half = self.cfg.head_dim // 2
        return decoder.Rotary(
            *layers.mrope_angles(positions_abt, self.cfg.head_dim, 10_000.0, sections=(half,))
        )


def init_cache(cfg: OwnConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    sizes = decoder.DecoderConfig.from_config(cfg)
    return decoder.init_cache(sizes, slots, positions, dtype)
