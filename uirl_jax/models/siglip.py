"""The block of a SigLIP vision tower, which several families share.

What stands before and behind the blocks (patches, positions, connectors) is the family's.

Source: arXiv:2303.15343 and transformers, models/siglip/modeling_siglip.py.
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models import layers
from uirl_jax.models.attention import attention
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


class SiglipBlock(nnx.Module):
    """Pre-norm attention over the patches of an image, then an MLP.

    Args:
      table: of the family; maps the targets of `lora` to projections.
    """

    def __init__(
        self,
        cfg: BlockSizes,
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
        self.num_heads = cfg.num_attention_heads

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
        wide_ipf = layers.gelu_tanh(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)
