"""The block of CLIP's and SigLIP's vision towers, which several families share, and a run of it.

What stands before and behind the blocks (patches, positions, connectors) is the family's.

Source: arXiv:2103.00020, arXiv:2303.15343 and transformers, models/clip/, models/siglip/.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models import layers
from uirl_jax.models.attention import attention
from uirl_jax.models.blocks import Remat, layer_keys, stack, through
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.weight_table import WeightTable


class BlockSizes(Protocol):
    """What is read here of a family's vision config."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def layer_norm_eps(self) -> float: ...


class VisionBlock(nnx.Module):
    """Pre-norm attention over the patches of an image, then an MLP.

    Args:
      activation: of the MLP: CLIP's quick_gelu, SigLIP's gelu_tanh.
      table: of the family; maps the targets of `lora` to projections.
    """

    def __init__(
        self,
        cfg: BlockSizes,
        activation: Callable[[jax.Array], jax.Array],
        *,
        lora: LoraConfig | None,
        table: WeightTable,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim = cfg.hidden_size
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=table,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        norm = functools.partial(
            layers.LayerNorm, dim, eps=cfg.layer_norm_eps, param_dtype=param_dtype
        )
        self.norm1 = norm()
        self.vision_q = linear("vision_q", dim, dim)
        self.vision_k = linear("vision_k", dim, dim)
        self.vision_v = linear("vision_v", dim, dim)
        self.vision_out = linear("vision_out", dim, dim, axes=("wide", None))
        self.norm2 = norm()
        self.fc1 = linear("fc1", dim, cfg.intermediate_size)
        self.fc2 = linear("fc2", cfg.intermediate_size, dim, axes=("wide", None))
        self.num_heads, self.activation = cfg.num_attention_heads, activation

    def __call__(
        self,
        x_ipd: jax.Array,
        segment_ids_ip: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        """x_ipd behind the block; patches attend within their segment of the row."""
        q_key, k_key, v_key, out_key, fc1_key, fc2_key = split_key(dropout_key, 6)
        h_ipd = self.norm1(x_ipd)

        def heads(projection: Linear, key: jax.Array | None) -> jax.Array:
            y = projection(h_ipd, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], self.num_heads, -1)

        out_ipnh = attention(
            heads(self.vision_q, q_key),
            heads(self.vision_k, k_key),
            heads(self.vision_v, v_key),
            segment_ids_ip,
            causal=False,
        )
        out_ipd = out_ipnh.reshape(x_ipd.shape)
        x_ipd = x_ipd + self.vision_out(out_ipd, adapters=adapters, dropout_key=out_key)
        wide_ipf = self.fc1(self.norm2(x_ipd), adapters=adapters, dropout_key=fc1_key)
        wide_ipf = self.activation(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)


def make_blocks(
    cfg: BlockSizes,
    depth: int,
    activation: Callable[[jax.Array], jax.Array],
    *,
    lora: LoraConfig | None,
    table: WeightTable,
    rngs: nnx.Rngs,
    param_dtype: jnp.dtype,
) -> nnx.Module:
    """`depth` blocks, stacked."""
    return stack(
        lambda key: VisionBlock(
            cfg,
            activation,
            lora=lora,
            table=table,
            rngs=nnx.Rngs(key),
            param_dtype=param_dtype,
        ),
        depth,
        rngs,
    )


def run_blocks(
    blocks: nnx.Module,
    x_ipd: jax.Array,
    segment_ids_ip: jax.Array | None,
    *,
    depth: int,
    remat: Remat,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
    collect: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the last of stacked blocks; with `collect`, [L,I,P,D] behind every block.

    Args:
      segment_ids_ip: as attention takes them; None: a row is one image.
    """
    if segment_ids_ip is None:
        segment_ids_ip = jnp.ones(x_ipd.shape[:2], jnp.int32)

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, segment_ids_ip, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    return through(body, x_ipd, (blocks, layer_keys(dropout_key, depth)), remat)
