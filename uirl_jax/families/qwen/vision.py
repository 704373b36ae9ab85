"""What the vision towers of the Qwen-VL families share: a block, and how patches become tokens.

Source: transformers, models/qwen2_vl/modeling_qwen2_vl.py, with those of qwen2_5_vl and qwen3_vl.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models import layers
from uirl_jax.models.attention import attention
from uirl_jax.models.decoder import Rotary
from uirl_jax.models.lora import LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.weight_table import WeightTable

NORM_EPS = 1e-6  # of the vision towers' norms: a constant in the reference, too


class MergingTower(nnx.Module):
    """A vision tower that makes one visual token of merge_size**2 patches next to each other.

    `_add_merger` makes its last modules; a family calls it after those before.
    """

    merger_norm: Callable[[jax.Array], jax.Array]

    def _add_merger(
        self,
        merged_size: int,
        token_size: int,
        *,
        table: WeightTable,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=table,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.merged_size = merged_size
        self.merger_fc1 = linear("merger_fc1", merged_size, merged_size)
        self.merger_fc2 = linear("merger_fc2", merged_size, token_size, axes=("wide", None))

    def merge(
        self,
        x_ipd: jax.Array,
        *,
        adapters: bool,
        dropout_keys: tuple[jax.Array | None, jax.Array | None],
    ) -> jax.Array:
        """Visual tokens, [I,M,token_size], of patches whose neighbours are consecutive."""
        fc1_key, fc2_key = dropout_keys
        h_ime = self.merger_norm(x_ipd).reshape(len(x_ipd), -1, self.merged_size)
        h_ime = self.merger_fc1(h_ime, adapters=adapters, dropout_key=fc1_key)
        h_ime = jax.nn.gelu(h_ime, approximate=False)
        return self.merger_fc2(h_ime, adapters=adapters, dropout_key=fc2_key)


class VisionBlock(nnx.Module):
    """Of Qwen2-VL and Qwen3-VL, which differ in its activation alone.

    Pre-norm attention over an image's patches, then a two-layer MLP.

    Args:
      activation: of the MLP; a named function, as stacked blocks are compared by it.
      table: of the family; names the projections qkv, proj, fc1 and fc2.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        num_heads: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        table: WeightTable,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=table,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.norm1 = layers.LayerNorm(dim, eps=NORM_EPS, param_dtype=param_dtype)
        self.qkv = linear("qkv", dim, 3 * dim)
        self.proj = linear("proj", dim, dim, axes=("wide", None))
        self.norm2 = layers.LayerNorm(dim, eps=NORM_EPS, param_dtype=param_dtype)
        self.fc1 = linear("fc1", dim, mlp_dim)
        self.fc2 = linear("fc2", mlp_dim, dim, axes=("wide", None))
        self.num_heads, self.activation = num_heads, activation

    def __call__(
        self,
        x_ipd: jax.Array,
        rotary: Rotary,
        segments_ip: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        images, patches, dim = x_ipd.shape
        qkv_key, proj_key, fc1_key, fc2_key = split_key(dropout_key, 4)
        qkv_ipe = self.qkv(self.norm1(x_ipd), adapters=adapters, dropout_key=qkv_key)
        qkv_ip3nh = qkv_ipe.reshape(images, patches, 3, self.num_heads, -1)
        q_ipnh, k_ipnh, v_ipnh = (qkv_ip3nh[:, :, i] for i in range(3))
        q_ipnh, k_ipnh = (layers.rotate(x, *rotary) for x in (q_ipnh, k_ipnh))
        out_ipnh = attention(q_ipnh, k_ipnh, v_ipnh, segments_ip, causal=False)
        out_ipd = out_ipnh.reshape(images, patches, dim)
        x_ipd = x_ipd + self.proj(out_ipd, adapters=adapters, dropout_key=proj_key)
        wide_ipf = self.fc1(self.norm2(x_ipd), adapters=adapters, dropout_key=fc1_key)
        wide_ipf = self.activation(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)
