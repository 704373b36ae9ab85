"""Idefics2 in Flax NNX: SigLIP for images of any shape, a resampler, Mistral (`models.decoder`).

The resampler reads a screen of any size into the same number of visual tokens. Screens and
positions come from `inputs`, names of tensors from `names`, the text tower from `two_towers`.

Source: arXiv:2405.02246 and transformers, models/idefics2/modeling_idefics2.py.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.idefics2.config import Idefics2Config, PerceiverConfig
from uirl_jax.families.idefics2.names import WEIGHTS
from uirl_jax.families.two_towers import TwoTowers, image_pixels
from uirl_jax.models import layers
from uirl_jax.models.blocks import checkpointed, layer_keys, stack, through
from uirl_jax.models.decoder import DecoderConfig
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.vision_block import make_blocks, run_blocks


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
        table = jax.random.normal(rngs.params(), (vision.patches, dim), jnp.float32)
        self.position_table = nnx.Param((table * 0.02).astype(param_dtype))
        self.blocks = make_blocks(
            vision,
            vision.num_hidden_layers,
            layers.gelu_tanh,
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
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


class Idefics2(TwoTowers):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: Idefics2Config
    visual: VisionTower
    table = WEIGHTS
    make_visual = VisionTower
    decoder_config = staticmethod(DecoderConfig.from_config)

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
        context_key, latents_key = split_key(dropout_key, 2)
        context_ipd = context(self, vision, adapters=adapters, dropout_key=context_key)
        x_ied = _latents(
            self,
            context_ipd,
            vision["segment_ids_ip"] > 0,
            adapters=adapters,
            dropout_key=latents_key,
        )
        return constrain(x_ied.reshape(-1, self.cfg.hidden_size), "visual", None)


def context(
    model: Idefics2,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """What the latents read, [I,P,D]: patches behind SigLIP, at the text tower's width."""
    blocks_key, *keys = split_key(dropout_key, 4)
    x_ipd, _ = _vision_blocks(model, vision, adapters=adapters, dropout_key=blocks_key)
    tower = model.visual

    def connect(x_ipd: jax.Array) -> jax.Array:
        wide_ipf = _gated(
            tower.connector_gate,
            tower.connector_up,
            tower.post_norm(x_ipd),
            adapters=adapters,
            keys=(keys[0], keys[1]),
        )
        return tower.connector_down(wide_ipf, adapters=adapters, dropout_key=keys[2])

    # As a block: its wide arrays, 86 MB a screen in the published model, are not kept.
    return checkpointed(connect, model.remat, scanned=False)(x_ipd)


def _vision_blocks(
    model: Idefics2, vision: Mapping[str, jax.Array], **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the last block, [I,P,D]; with `collect`, [L,I,P,D] behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = image_pixels(vision, model.cfg.images).astype(dtype)
    pixels_ipf = constrain(pixels_ipf, "images", None, None)
    table_nd = constrain(tower.position_table[...], None, None)
    positions_ipd = layers.lookup(table_nd, vision["position_ids_ip"])
    x_ipd = constrain(
        tower.patch_embed(pixels_ipf) + positions_ipd.astype(dtype), "images", None, None
    )
    return run_blocks(
        tower.blocks,
        x_ipd,
        vision["segment_ids_ip"],
        depth=model.cfg.vision.num_hidden_layers,
        remat=model.remat,
        **options,
    )


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
    x_ied, _ = through(body, x_ied, stacked, model.remat)
    return tower.latents_final_norm(x_ied)


def vision_block_outputs(model: Idefics2, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd
