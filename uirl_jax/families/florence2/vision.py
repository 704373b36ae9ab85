"""Florence-2's vision tower: a DaViT of four stages, learned positions, a projector.

A stage is a convolution that shrinks the picture, then blocks whose first half attends within
windows of places and whose second half attends between channels, over all places. Pictures are
squares; places stand row by row.

Source: arXiv:2204.03645, arXiv:2311.06242 and transformers, models/florence2/modeling_florence2.py,
Florence2VisionBackbone and Florence2MultiModalProjector.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.florence2.config import STAGES, Florence2Config, VisionConfig
from uirl_jax.families.florence2.names import WEIGHTS
from uirl_jax.models import layers
from uirl_jax.models.attention import attention
from uirl_jax.models.blocks import Remat, layer_keys, stack, through
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain

_EPS = 1e-5  # of every norm


class DepthwiseConv(nnx.Module):
    """3x3, one filter a channel; zeros around the picture."""

    def __init__(self, width: int, *, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> None:
        kernel_xd = jax.random.normal(rngs.params(), (9, width), jnp.float32) / 3
        self.kernel = nnx.Param(kernel_xd.astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype))

    def __call__(self, x_ipd: jax.Array, side: int) -> jax.Array:
        """Nine shifted pictures, each times its weights, added up in float32: XLA fuses them."""
        x_iyxd = x_ipd.reshape(len(x_ipd), side, side, -1)
        padded = jnp.pad(x_iyxd, ((0, 0), (1, 1), (1, 1), (0, 0))).astype(jnp.float32)
        kernel_xd = self.kernel[...].astype(jnp.float32)
        y_iyxd = self.bias[...].astype(jnp.float32)
        for row in range(3):
            for column in range(3):
                shifted = padded[:, row : row + side, column : column + side]
                y_iyxd = y_iyxd + shifted * kernel_xd[3 * row + column]
        return y_iyxd.astype(x_ipd.dtype).reshape(x_ipd.shape)


class Block(nnx.Module):
    """A block of one stage: attention within windows, then between channels, an MLP after each.

    Args: stage: its number.
    """

    def __init__(
        self,
        cfg: VisionConfig,
        stage: int,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim, wide = cfg.embed_dim[stage], cfg.mlp_width(stage)
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        conv = functools.partial(DepthwiseConv, dim, rngs=rngs, param_dtype=param_dtype)
        norm = functools.partial(layers.LayerNorm, dim, eps=_EPS, param_dtype=param_dtype)
        self.window_conv1, self.window_norm1 = conv(), norm()
        self.window_qkv = linear("window_qkv", dim, 3 * dim)
        self.window_out = linear("window_out", dim, dim, axes=("wide", None))
        self.window_conv2, self.window_norm2 = conv(), norm()
        self.window_fc1 = linear("window_fc1", dim, wide)
        self.window_fc2 = linear("window_fc2", wide, dim, axes=("wide", None))
        self.channel_conv1, self.channel_norm1 = conv(), norm()
        self.channel_qkv = linear("channel_qkv", dim, 3 * dim)
        self.channel_out = linear("channel_out", dim, dim, axes=("wide", None))
        self.channel_conv2, self.channel_norm2 = conv(), norm()
        self.channel_fc1 = linear("channel_fc1", dim, wide)
        self.channel_fc2 = linear("channel_fc2", wide, dim, axes=("wide", None))
        self.window, self.heads = cfg.window_size, cfg.num_heads[stage]
        self.groups = cfg.num_groups[stage]

    def __call__(
        self, x_ipd: jax.Array, side: int, *, adapters: bool, dropout_key: jax.Array | None
    ) -> jax.Array:
        """x_ipd behind the block, of pictures of side x side places."""
        keys = split_key(dropout_key, 8)

        def run(layer: Linear, x: jax.Array, key: int) -> jax.Array:
            return layer(x, adapters=adapters, dropout_key=keys[key])

        x_ipd = x_ipd + self.window_conv1(x_ipd, side)
        windows_xpd = _windows(self.window_norm1(x_ipd), side, self.window)
        out_xpd = _within_windows(run(self.window_qkv, windows_xpd, 0), self.heads)
        out_xpd = run(self.window_out, out_xpd, 1)
        x_ipd = x_ipd + _from_windows(out_xpd, side, self.window)
        x_ipd = x_ipd + self.window_conv2(x_ipd, side)
        wide_ipf = jax.nn.gelu(run(self.window_fc1, self.window_norm2(x_ipd), 2), approximate=False)
        x_ipd = x_ipd + run(self.window_fc2, wide_ipf, 3)

        x_ipd = x_ipd + self.channel_conv1(x_ipd, side)
        qkv_ipe = run(self.channel_qkv, self.channel_norm1(x_ipd), 4)
        x_ipd = x_ipd + run(self.channel_out, _between_channels(qkv_ipe, self.groups), 5)
        x_ipd = x_ipd + self.channel_conv2(x_ipd, side)
        wide_ipf = run(self.channel_fc1, self.channel_norm2(x_ipd), 6)
        x_ipd = x_ipd + run(self.channel_fc2, jax.nn.gelu(wide_ipf, approximate=False), 7)
        return constrain(x_ipd, "images", None, None)


def _windows(x_ipd: jax.Array, side: int, window: int) -> jax.Array:
    """[I * windows, window * window, D]; zeros are put to the right and below, as places that are
    attended to like any other."""
    images, _, dim = x_ipd.shape
    more, across = -side % window, -(-side // window)
    x_iyxd = x_ipd.reshape(images, side, side, dim)
    x_iyxd = jnp.pad(x_iyxd, ((0, 0), (0, more), (0, more), (0, 0)))
    blocks = x_iyxd.reshape(images, across, window, across, window, dim)
    return blocks.transpose(0, 1, 3, 2, 4, 5).reshape(-1, window * window, dim)


def _from_windows(x_xpd: jax.Array, side: int, window: int) -> jax.Array:
    """The reverse of _windows."""
    across, dim = -(-side // window), x_xpd.shape[-1]
    blocks = x_xpd.reshape(-1, across, across, window, window, dim)
    x_iyxd = blocks.transpose(0, 1, 3, 2, 4, 5).reshape(-1, across * window, across * window, dim)
    return x_iyxd[:, :side, :side].reshape(-1, side * side, dim)


def _within_windows(qkv_xpe: jax.Array, heads: int) -> jax.Array:
    """Every place of a window sees all of the window."""
    rows, places, width = qkv_xpe.shape
    q_xpnh, k_xpnh, v_xpnh = jnp.unstack(qkv_xpe.reshape(rows, places, 3, heads, -1), axis=2)
    one_xp = jnp.ones((rows, places), jnp.int32)
    # Windows of 144 places: whole tiles of a kernel would be mostly padding.
    out_xpnh = attention(q_xpnh, k_xpnh, v_xpnh, one_xp, causal=False, implementation="xla")
    return out_xpnh.reshape(rows, places, width // 3)


def _between_channels(qkv_ipe: jax.Array, groups: int) -> jax.Array:
    """The channels of a group see each other; what they hold at all places is query, key, value."""
    images, places, width = qkv_ipe.shape
    q_ipgc, k_ipgc, v_ipgc = jnp.unstack(qkv_ipe.reshape(images, places, 3, groups, -1), axis=2)
    scores_igce = jnp.einsum(
        "ipgc,ipge->igce",
        q_ipgc * places**-0.5,
        k_ipgc,
        preferred_element_type=jnp.float32,
    )
    weights_igce = jax.nn.softmax(scores_igce, axis=-1).astype(v_ipgc.dtype)
    out_ipgc = jnp.einsum("igce,ipge->ipgc", weights_igce, v_ipgc)
    return out_ipgc.reshape(images, places, width // 3)


class Stage(nnx.Module):
    """The convolution before a stage, its norm, and the stage's blocks, stacked."""

    def __init__(
        self,
        cfg: VisionConfig,
        stage: int,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        channels, dim = cfg.embed_dim[stage - 1] if stage else 3, cfg.embed_dim[stage]
        self.norm_first = cfg.patch_prenorm[stage]
        self.size, self.stride = cfg.patch_size[stage], cfg.patch_stride[stage]
        self.padding, self.depth = cfg.patch_padding[stage], cfg.depths[stage]
        # Its kernel on flat patches, (channel, row, column).
        self.conv = Linear(
            channels * self.size**2,
            dim,
            axes=(None, None),
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        width = channels if self.norm_first else dim
        self.norm = layers.LayerNorm(width, eps=_EPS, param_dtype=param_dtype)
        self.blocks = stack(
            lambda key: Block(cfg, stage, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            self.depth,
            rngs,
        )

    def shrunk(self, x_iyxd: jax.Array) -> jax.Array:
        """[I,Y/stride,X/stride,D]: the convolution and its norm."""
        x_iyxd = self.norm(x_iyxd) if self.norm_first else x_iyxd
        channels = x_iyxd.shape[-1]
        kernel = self.conv.kernel[...].astype(x_iyxd.dtype)
        padding = (self.padding, self.padding)
        y_iyxd = jax.lax.conv_general_dilated(
            x_iyxd,
            kernel.reshape(channels, self.size, self.size, -1),
            window_strides=(self.stride, self.stride),
            padding=(padding, padding),
            dimension_numbers=("NHWC", "IHWO", "NHWC"),
        )
        assert self.conv.bias is not None  # use_bias=True
        y_iyxd = y_iyxd + self.conv.bias[...].astype(x_iyxd.dtype)
        return y_iyxd if self.norm_first else self.norm(y_iyxd)

    def __call__(
        self,
        x_iyxd: jax.Array,
        *,
        remat: Remat,
        adapters: bool,
        dropout_key: jax.Array | None,
        collect: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The picture behind the stage; with `collect`, [L,I,P,D] behind every block."""
        x_iyxd = self.shrunk(x_iyxd)
        shape, side = x_iyxd.shape, x_iyxd.shape[1]
        x_ipd = constrain(x_iyxd.reshape(shape[0], -1, shape[-1]), "images", None, None)

        def body(
            x_ipd: jax.Array, layer: tuple[Block, jax.Array | None]
        ) -> tuple[jax.Array, jax.Array | None]:
            block, key = layer
            x_ipd = block(x_ipd, side, adapters=adapters, dropout_key=key)
            return x_ipd, x_ipd if collect else None

        stacked = (self.blocks, layer_keys(dropout_key, self.depth))
        x_ipd, collected = through(body, x_ipd, stacked, remat)
        return x_ipd.reshape(shape), collected


class VisionTower(nnx.Module):
    """Pictures -> visual tokens of the text towers' width."""

    def __init__(
        self,
        cfg: Florence2Config,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        vision = cfg.vision
        for stage in range(STAGES):
            made = Stage(vision, stage, lora=lora, rngs=rngs, param_dtype=param_dtype)
            setattr(self, f"stage{stage}", made)
        dim = vision.embed_dim[-1]

        def table(width: int) -> nnx.Param:
            shape = (vision.max_position_embeddings, width)
            table_pd = jax.random.normal(rngs.params(), shape, jnp.float32) * dim**-0.5
            return nnx.Param(table_pd.astype(param_dtype))

        self.row_table, self.column_table = table(dim // 2), table(dim - dim // 2)
        # Of the frames of a video, and never trained; a picture is the first.
        self.time_table = nnx.Variable(
            _sinusoids(vision.max_temporal_embeddings, dim).astype(param_dtype)
        )
        self.projector = adapted_linear(
            "projector",
            dim,
            cfg.hidden_size,
            axes=("wide", None),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.projector_norm = layers.LayerNorm(cfg.hidden_size, eps=_EPS, param_dtype=param_dtype)

    def stages(
        self,
        x_iyxd: jax.Array,
        *,
        remat: Remat,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, list[Any]]:
        """The picture behind the last stage and, with `collect`, of each [L,I,P,D]."""
        collected = []
        for stage, key in enumerate(split_key(dropout_key, STAGES)):
            x_iyxd, blocks_lipd = getattr(self, f"stage{stage}")(
                x_iyxd, remat=remat, adapters=adapters, dropout_key=key, collect=collect
            )
            collected.append(blocks_lipd)
        return x_iyxd, collected

    def project(
        self, x_iyxd: jax.Array, *, adapters: bool, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Visual tokens [I,1+P,D]: the mean of all places, then each place."""
        images, side = x_iyxd.shape[:2]
        dtype = x_iyxd.dtype
        columns_xd = jnp.broadcast_to(
            self.column_table[...][None, :side], (side, side, self.column_table.shape[-1])
        )
        rows_yd = jnp.broadcast_to(
            self.row_table[...][:side, None], (side, side, self.row_table.shape[-1])
        )
        x_iyxd = x_iyxd + jnp.concatenate([columns_xd, rows_yd], axis=-1).astype(dtype)
        x_ipd = x_iyxd.reshape(images, side * side, -1) + self.time_table[...][0].astype(dtype)
        mean_i1d = jnp.mean(x_ipd.astype(jnp.float32), axis=1, keepdims=True).astype(dtype)
        x_itd = jnp.concatenate([mean_i1d, x_ipd], axis=1)
        return self.projector_norm(
            self.projector(x_itd, adapters=adapters, dropout_key=dropout_key)
        )


def _sinusoids(frames: int, width: int) -> jax.Array:
    """float32[frames,width], sine and cosine in turn."""
    half = width // 2
    frequency_h = jnp.exp(jnp.arange(half, dtype=jnp.float32) * -(math.log(10_000) / half))
    angle_fh = jnp.arange(frames, dtype=jnp.float32)[:, None] * frequency_h
    return jnp.stack([jnp.sin(angle_fh), jnp.cos(angle_fh)], axis=-1).reshape(frames, 2 * half)
