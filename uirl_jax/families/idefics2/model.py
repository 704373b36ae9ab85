"""Idefics2 in Flax NNX: SigLIP for images of any shape, a resampler, Mistral (`models.decoder`).

The resampler reads a screen of any size into the same number of visual tokens. Methods are pure;
callers jit them. Screens and positions come from `inputs`, names of tensors from `names`.

Source: arXiv:2405.02246 and transformers, models/idefics2/modeling_idefics2.py.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.idefics2.config import Idefics2Config, PerceiverConfig
from uirl_jax.families.idefics2.images import ImageConfig
from uirl_jax.families.idefics2.names import WEIGHTS
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.models import decoder, layers
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.decoder import Decoder, DecoderBlock, DecoderConfig, Rotary
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.siglip import SiglipBlock


class LatentBlock(nnx.Module):
    """Latents attend to an image and to each other, then an MLP. Every block reads the image as it
    came, through a norm of its own."""

    def __init__(
        self,
        cfg: PerceiverConfig,
        dim: int,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        linear = functools.partial(
            adapted_linear, lora=lora, table=WEIGHTS, rngs=rngs, param_dtype=param_dtype
        )
        norm = functools.partial(layers.RMSNorm, dim, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        q, kv = (
            heads * cfg.resampler_head_dim
            for heads in (cfg.resampler_n_heads, cfg.num_key_value_heads)
        )
        self.latents_norm = norm()
        self.context_norm = norm()
        self.latent_q = linear("latent_q", dim, q)
        self.latent_k = linear("latent_k", dim, kv)
        self.latent_v = linear("latent_v", dim, kv)
        self.latent_o = linear("latent_o", q, dim, axes=("wide", None))
        self.post_attention_norm = norm()
        self.latent_gate = linear("latent_gate", dim, 4 * dim)
        self.latent_up = linear("latent_up", dim, 4 * dim)
        self.latent_down = linear("latent_down", 4 * dim, dim, axes=("wide", None))
        self.head_dim = cfg.resampler_head_dim

    def __call__(
        self,
        x_ied: jax.Array,
        context_ipd: jax.Array,
        mask_is: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        """x_ied: E latents of every image. mask_is: which of its patches and latents are read."""
        keys = split_key(dropout_key, 7)
        h_ied = self.latents_norm(x_ied)
        read_isd = jnp.concatenate([self.context_norm(context_ipd), h_ied], axis=1)

        def heads(projection: Linear, x: jax.Array, key: jax.Array | None) -> jax.Array:
            y = projection(x, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        out_ienh = jax.nn.dot_product_attention(
            heads(self.latent_q, h_ied, keys[0]),
            heads(self.latent_k, read_isd, keys[1]),
            heads(self.latent_v, read_isd, keys[2]),
            mask=mask_is[:, None, None],
        )
        out_iea = out_ienh.reshape(*x_ied.shape[:2], -1)
        x_ied = x_ied + self.latent_o(out_iea, adapters=adapters, dropout_key=keys[3])
        h_ied = self.post_attention_norm(x_ied)
        wide_ief = _gated(
            self.latent_gate, self.latent_up, h_ied, adapters=adapters, keys=(keys[4], keys[5])
        )
        x_ied = x_ied + self.latent_down(wide_ief, adapters=adapters, dropout_key=keys[6])
        return constrain(x_ied, "images", None, None)


def _gated(
    gate: Linear,
    up: Linear,
    x: jax.Array,
    *,
    adapters: bool,
    keys: tuple[jax.Array | None, jax.Array | None],
) -> jax.Array:
    gated = jax.nn.silu(gate(x, adapters=adapters, dropout_key=keys[0]))
    return gated * up(x, adapters=adapters, dropout_key=keys[1])


class VisionTower(nnx.Module):
    """Patches -> visual tokens of the text tower's width, by SigLIP, an MLP and the resampler."""

    def __init__(
        self,
        cfg: Idefics2Config,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        vision, perceiver, width = cfg.vision, cfg.perceiver, cfg.hidden_size
        dim = vision.hidden_size
        # The reference's Conv2d with stride = kernel size is a matrix product on flat patches.
        self.patch_embed = Linear(
            vision.patch_features,
            dim,
            axes=(None, None),
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        table = jax.random.normal(rngs.params(), (vision.table_side**2, dim), jnp.float32)
        self.position_table = nnx.Param((table * 0.02).astype(param_dtype))
        self.blocks = stack(
            lambda key: SiglipBlock(
                vision, lora=lora, table=WEIGHTS, rngs=nnx.Rngs(key), param_dtype=param_dtype
            ),
            vision.num_hidden_layers,
            rngs,
        )
        self.post_norm = layers.LayerNorm(dim, eps=vision.layer_norm_eps, param_dtype=param_dtype)
        linear = functools.partial(
            adapted_linear, lora=lora, table=WEIGHTS, rngs=rngs, param_dtype=param_dtype
        )
        self.connector_gate = linear("connector_gate", dim, cfg.intermediate_size)
        self.connector_up = linear("connector_up", dim, cfg.intermediate_size)
        self.connector_down = linear(
            "connector_down", cfg.intermediate_size, width, axes=("wide", None)
        )
        # The reference's ones would make all latents the same, for ever.
        latents = jax.random.normal(
            rngs.params(), (perceiver.resampler_n_latents, width), jnp.float32
        )
        self.latents = nnx.Param(latents.astype(param_dtype))
        self.latent_blocks = stack(
            lambda key: LatentBlock(
                perceiver, width, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype
            ),
            perceiver.resampler_depth,
            rngs,
        )
        self.latents_final_norm = layers.RMSNorm(
            width, eps=perceiver.rms_norm_eps, param_dtype=param_dtype
        )


class Idefics2(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      lora: targets of the adapters; None: no adapters.
      rngs: of the random initial weights.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None: param_dtype. Softmax, norms, angles and logprobs are
        always float32.
      remat: what the backward pass recomputes of a block.
    """

    def __init__(
        self,
        cfg: Idefics2Config,
        *,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
        remat: Remat = "full",
    ) -> None:
        self.cfg, self.lora = cfg, lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat: Remat = remat
        self.visual = VisionTower(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = Decoder(
            decoder_config(cfg),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: of `Idefics2Inputs.pack_screens` or `Idefics2Inputs.from_processor`; a row is one
            image.
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F].
            position_ids_ip: int32[I,P]. segment_ids_ip: int32[I,P], 0 at padding.
          adapters, dropout_key: see border.Model; for adapters of the vision tower.
        Returns: visual_md, [I * E, D], E latents of every row; without an image undefined.
        """
        blocks_key, *connector_keys, latents_key = split_key(dropout_key, 5)
        x_ipd, _ = _vision_blocks(
            self, vision, adapters=adapters, dropout_key=blocks_key, collect=False
        )
        tower = self.visual

        def connect(x_ipd: jax.Array, keys: list[Any]) -> jax.Array:
            wide_ipf = _gated(
                tower.connector_gate,
                tower.connector_up,
                tower.post_norm(x_ipd),
                adapters=adapters,
                keys=(keys[0], keys[1]),
            )
            return tower.connector_down(wide_ipf, adapters=adapters, dropout_key=keys[2])

        # As a block: its wide arrays, 86 MB a screen in the published model, are not kept.
        context_ipd = checkpointed(connect, self.remat, scanned=False)(x_ipd, connector_keys)
        x_ied = _latents(
            self,
            context_ipd,
            vision["segment_ids_ip"] > 0,
            adapters=adapters,
            dropout_key=latents_key,
        )
        return constrain(x_ied.reshape(-1, self.cfg.hidden_size), "visual", None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """See border.Model.hidden."""
        x_btd, _ = _text_rows(self, rows, visual_md, adapters=adapters, dropout_key=dropout_key)
        return self.text.final_norm(x_btd)

    def extend(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        positions_abt: jax.Array,
        cache: KVCache,
        start_b: jax.Array,
        *,
        slot_b: jax.Array | None = None,
        span: int | None = None,
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See border.Model.extend."""
        return self.text.extend(
            self.text.embed(token_ids_bt, visual_md, vision_index_bt),
            _rotary(self.cfg, positions_abt),
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
        )

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        return self.text.logits(x_btd)


def _rotary(cfg: Idefics2Config, positions_1bt: jax.Array) -> Rotary:
    sections = (cfg.head_dim // 2,)  # one axis of positions
    return Rotary(*layers.mrope_angles(positions_1bt, cfg.head_dim, cfg.rope_theta, sections))


def _text_rows(
    model: Idefics2, rows: TokenRows, visual_md: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    return model.text.rows(
        model.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True),
        _rotary(model.cfg, rows.positions_abt),
        rows.segment_ids_bt,
        rows.prefix_segments_bt,
        **options,
    )


def _vision_blocks(
    model: Idefics2,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the last block, [I,P,D]; with `collect`, [L,I,P,D] behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = vision.get("pixels_ipf")
    if pixels_ipf is None:
        pixels_ipf = pixel_values(vision["patches_ipc"], model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(dtype), "images", None, None)
    table_nd = constrain(tower.position_table[...], None, None)
    positions_ipd = layers.lookup(table_nd, vision["position_ids_ip"])
    x_ipd = constrain(
        tower.patch_embed(pixels_ipf) + positions_ipd.astype(dtype), "images", None, None
    )

    def body(
        x_ipd: jax.Array, layer: tuple[SiglipBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, vision["segment_ids_ip"], adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (tower.blocks, layer_keys(dropout_key, model.cfg.vision.num_hidden_layers))
    return jax.lax.scan(checkpointed(body, model.remat), x_ipd, stacked)


def _latents(
    model: Idefics2,
    context_ipd: jax.Array,
    is_patch_ip: jax.Array,
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """x_ied, what the latents have read of every image."""
    tower, images = model.visual, len(context_ipd)
    latents_ed = tower.latents[...].astype(context_ipd.dtype)
    x_ied = jnp.broadcast_to(latents_ed, (images, *latents_ed.shape))
    is_latent_ie = jnp.ones((images, len(latents_ed)), bool)
    mask_is = jnp.concatenate([is_patch_ip, is_latent_ie], axis=1)

    def body(
        x_ied: jax.Array, layer: tuple[LatentBlock, jax.Array | None]
    ) -> tuple[jax.Array, None]:
        block, key = layer
        return block(x_ied, context_ipd, mask_is, adapters=adapters, dropout_key=key), None

    stacked = (tower.latent_blocks, layer_keys(dropout_key, model.cfg.perceiver.resampler_depth))
    x_ied, _ = jax.lax.scan(checkpointed(body, model.remat), x_ied, stacked)
    return tower.latents_final_norm(x_ied)


def pixel_values(patches_ipc: jax.Array, images: ImageConfig) -> jax.Array:
    """float32[I,P,F] of uint8[I,P,C]: the processor's values bit for bit."""
    return layers.level_lookup(patches_ipc, level_values(images))


def vision_block_outputs(model: Idefics2, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, adapters=True, dropout_key=None, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd


def block_outputs(model: Idefics2, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D]; for tests."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def decoder_config(cfg: Idefics2Config) -> DecoderConfig:
    """The sizes of the text tower."""
    return DecoderConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        initializer_range=cfg.initializer_range,
        tie_word_embeddings=cfg.tie_word_embeddings,
    )


def init_cache(cfg: Idefics2Config, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)
