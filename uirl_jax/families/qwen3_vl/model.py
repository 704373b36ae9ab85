"""Qwen3-VL in Flax NNX: its vision tower, and a `models.decoder` with DeepStack as text tower.

A visual token is 1 + K vectors side by side: what stands in place of its embedding, and what it
adds to the residual stream after each of the first K text blocks, from the outputs of K vision
blocks. Methods are pure; callers jit them. Patches and positions come from `inputs`, names of
tensors from `names`.

Source: transformers, models/qwen3_vl/modeling_qwen3_vl.py; DeepStack: arXiv:2406.04334.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.families.qwen.config import VISION_ROPE_THETA
from uirl_jax.families.qwen.model import QwenVL, image_pixels
from uirl_jax.families.qwen.vision import NORM_EPS, MergingTower, VisionBlock
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig, VisionConfig
from uirl_jax.families.qwen3_vl.names import WEIGHTS
from uirl_jax.models import layers
from uirl_jax.models.blocks import layer_keys, stack, through
from uirl_jax.models.decoder import DecoderConfig, Rotary
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain


class DeepstackMerger(nnx.Module):
    """Merged patches of an inner vision block -> what visual tokens add after a text block.

    Unlike the tower's own merger it norms after patches were put side by side.
    """

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        merged = cfg.merged_size
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.norm = layers.LayerNorm(merged, eps=NORM_EPS, param_dtype=param_dtype)
        self.deepstack_fc1 = linear("deepstack_fc1", merged, merged)
        self.deepstack_fc2 = linear(
            "deepstack_fc2", merged, cfg.out_hidden_size, axes=("wide", None)
        )

    def __call__(
        self, x_ime: jax.Array, *, adapters: bool, dropout_key: jax.Array | None
    ) -> jax.Array:
        fc1_key, fc2_key = split_key(dropout_key, 2)
        h_ime = self.deepstack_fc1(self.norm(x_ime), adapters=adapters, dropout_key=fc1_key)
        h_ime = jax.nn.gelu(h_ime, approximate=False)
        return self.deepstack_fc2(h_ime, adapters=adapters, dropout_key=fc2_key)


class VisionTower(MergingTower):
    """Patches -> visual tokens."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        # The reference's Conv3d with stride = kernel size is a matrix product on flat patches.
        self.patch_embed = Linear(
            cfg.patch_features,
            cfg.hidden_size,
            axes=(None, None),
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        table_nd = 0.02 * jax.random.normal(
            rngs.params(), (cfg.num_position_embeddings, cfg.hidden_size), jnp.float32
        )
        self.position_table = nnx.Param(table_nd.astype(param_dtype))
        self.blocks = stack(
            lambda key: VisionBlock(
                cfg.hidden_size,
                cfg.intermediate_size,
                cfg.num_heads,
                layers.gelu_tanh,
                table=WEIGHTS,
                lora=lora,
                rngs=nnx.Rngs(key),
                param_dtype=param_dtype,
            ),
            cfg.depth,
            rngs,
        )
        self.merger_norm = layers.LayerNorm(cfg.hidden_size, eps=NORM_EPS, param_dtype=param_dtype)
        self._add_merger(
            cfg.merged_size,
            cfg.out_hidden_size,
            table=WEIGHTS,
            lora=lora,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        levels = len(cfg.deepstack_visual_indexes)
        self.deepstack = (
            stack(
                lambda key: DeepstackMerger(
                    cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype
                ),
                levels,
                rngs,
            )
            if levels
            else None
        )

    def learned_positions(self, table_positions_ip2: jax.Array) -> jax.Array:
        """float32[I,P,D]: the table of positions between its four nearest entries.

        Args:
          table_positions_ip2: float32[I,P,2], (row, column) on the grid of the table.
        Source: transformers, vision_utils.py, get_vision_interpolation_indices_and_weights.
        """
        side = round(self.position_table.shape[0] ** 0.5)
        table_nd = constrain(self.position_table[...], None, None)
        floor_ip2 = jnp.floor(table_positions_ip2)
        share_ip2 = table_positions_ip2 - floor_ip2  # of the entry after the floor
        first_ip2 = floor_ip2.astype(jnp.int32)
        # One corner after the other: all four at once would be four arrays of this size.
        sum_ipd = jnp.zeros((), jnp.float32)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at_ip2 = jnp.minimum(first_ip2 + jnp.array([row, column]), side - 1)
            weight_ip2 = jnp.where(jnp.array([row, column]), share_ip2, 1 - share_ip2)
            corner_ipd = layers.lookup(table_nd, at_ip2[..., 0] * side + at_ip2[..., 1])
            weight_ip1 = (weight_ip2[..., 0] * weight_ip2[..., 1])[..., None]
            sum_ipd = sum_ipd + weight_ip1 * corner_ipd.astype(jnp.float32)
        return sum_ipd


class Qwen3VL(QwenVL):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: Qwen3VLConfig
    visual: VisionTower
    table = WEIGHTS
    decoder_config = staticmethod(lambda cfg: DecoderConfig.from_config(cfg, qk_norm=True))

    @staticmethod
    def make_visual(cfg: Any, **options: Any) -> VisionTower:
        return VisionTower(cfg.vision, **options)

    def rotary(self, positions_abt: jax.Array) -> Rotary:
        """The angles of positions, whose axes alternate from pair to pair of a head."""
        cfg = self.cfg
        return Rotary(
            *layers.interleaved_mrope_angles(
                positions_abt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section
            )
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
          vision: arrays of `inputs.pack_screens` or `inputs.from_processor`:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F];
            patch_positions_ip2: int32[I,P,2], (row, column) of the patch within its image;
            table_positions_ip2: float32[I,P,2], the same on the grid of learned positions;
            patch_segments_ip: int32[I,P], one number per image, 0 at padding. Patches attend to
            those of the same number; merge_size**2 consecutive patches belong to one image.
          adapters, dropout_key: see `hidden`; for adapters of the vision tower.
        Returns: visual_me, [I * P / merge_size**2, (1 + K) D], see decoder.VisualLevels; rows of
          padding are undefined.
        """
        blocks_key, fc1_key, fc2_key, deepstack_key = split_key(dropout_key, 4)
        x_ipd, kept_kipd, _ = _vision_blocks(
            self, vision, adapters=adapters, dropout_key=blocks_key, collect=False
        )
        tower, merged = self.visual, self.cfg.vision.merged_size
        images = len(x_ipd)
        keys = (fc1_key, fc2_key)
        levels = [tower.merge(x_ipd, adapters=adapters, dropout_keys=keys)]
        if tower.deepstack is not None:

            def body(_: None, level: Any) -> tuple[None, jax.Array]:
                merger, key, x_ipd = level
                x_ime = x_ipd.reshape(images, -1, merged)
                return None, merger(x_ime, adapters=adapters, dropout_key=key)

            count = len(self.cfg.vision.deepstack_visual_indexes)
            stacked = (tower.deepstack, layer_keys(deepstack_key, count), kept_kipd)
            levels += [*through(body, None, stacked, self.remat)[1]]
        visual_me = jnp.concatenate(levels, axis=-1).reshape(-1, len(levels) * self.cfg.hidden_size)
        return constrain(visual_me, "visual", None)


def _vision_blocks(
    model: Qwen3VL,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Outputs of the last block, of the DeepStack blocks [K,I,P,D], and of all if `collect`."""
    cfg, tower = model.cfg.vision, model.visual
    pixels_ipf = image_pixels(vision, model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(model.compute_dtype), "images", None, None)
    x_ipd = tower.patch_embed(pixels_ipf)
    x_ipd = x_ipd + tower.learned_positions(vision["table_positions_ip2"]).astype(x_ipd.dtype)
    angles = layers.axial_angles(vision["patch_positions_ip2"], cfg.head_dim, VISION_ROPE_THETA)
    rotary = Rotary(*angles)
    # Every block writes its output where the next one belongs that is kept, which overwrites it;
    # what comes after the last one goes to an entry of its own:
    #   block    0 1 2 3 4 5 6      kept are 1 and 4
    #   kept_at  0 0 1 1 1 2 2
    indexes = np.array(cfg.deepstack_visual_indexes, np.int32)
    kept_at_l = jnp.asarray(np.searchsorted(indexes, np.arange(cfg.depth)), jnp.int32)

    def body(
        carry: tuple[jax.Array, jax.Array],
        layer: tuple[VisionBlock, jax.Array | None, jax.Array],
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
        x_ipd, kept_kipd = carry
        block, key, kept_at = layer
        x_ipd = block(
            x_ipd, rotary, vision["patch_segments_ip"], adapters=adapters, dropout_key=key
        )
        kept_kipd = jax.lax.dynamic_update_index_in_dim(kept_kipd, x_ipd, kept_at, 0)
        return (x_ipd, kept_kipd), x_ipd if collect else None

    kept_kipd = constrain(
        jnp.zeros((len(indexes) + 1, *x_ipd.shape), x_ipd.dtype), None, "images", None, None
    )
    stacked = (tower.blocks, layer_keys(dropout_key, cfg.depth), kept_at_l)
    (x_ipd, kept_kipd), x_lipd = through(body, (x_ipd, kept_kipd), stacked, model.remat)
    return x_ipd, kept_kipd[:-1], x_lipd


def vision_block_outputs(model: Qwen3VL, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, adapters=True, dropout_key=None, collect=True)[2]
    assert x_lipd is not None  # collect=True
    return x_lipd
