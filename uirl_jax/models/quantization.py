"""Symmetric int8 weights of the frozen projections, with a scale for each output channel.

    kernel int8[in, out] * kernel_scale float32[out]  ~  the kernel in float

The projections that may carry adapters (`WeightTable.projections`) are quantised: attention, MLP
and merger hold 89 % of the parameters of Qwen2-VL-2B and 87 % of those of 7B. The embedding, the
head, biases and norms keep their dtype. `Linear` multiplies by the int8 values in the compute
dtype, which represents them exactly, and scales the product; activations are not rounded. Adapters
are not quantised and train as on a float base (QLoRA, arXiv:2305.14314, with 8 bits instead of 4).
`weights` reads the files.
"""

from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.models.lora import Linear

Quantize = Literal["none", "int8"]
# Rows converted to float32 at a time: 9 MB at 8960 inputs.
_BLOCK_ROWS = 256


def quantize_rows(weight_oi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a weight in torch's layout, output channels first.

    Args:
      weight_oi: float[out, in].
    Returns: q int8[out, in] in -127 ... 127 and scale float32[out]; |weight - q * scale| is at most
      scale / 2. A channel of zeros has scale 1.
    """
    q_oi = np.empty(weight_oi.shape, np.int8)
    scale_o = np.ones(weight_oi.shape[0], np.float32)
    for start in range(0, len(weight_oi), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        block_oi = weight_oi[rows].astype(np.float32)
        largest_o = np.maximum(block_oi.max(axis=1), -block_oi.min(axis=1))
        scale_o[rows] = np.where(largest_o > 0, largest_o / 127, 1)
        # Otherwise a channel of subnormal values has scale 0, or quotients above 127.
        scale_o[rows] = np.maximum(scale_o[rows], np.finfo(np.float32).tiny)
        block_oi /= scale_o[rows, None]
        q_oi[rows] = np.rint(block_oi, out=block_oi).clip(-127, 127)
    return q_oi, scale_o


def quantized(model: nnx.Module, projections: Collection[str]) -> nnx.Module:
    """Quantises the model's projections in place; also an abstract model (nnx.eval_shape).

    Args:
      projections: names of the linear layers (`WeightTable.projections`).
    """
    for path, module in nnx.iter_graph(model):
        if isinstance(module, Linear) and path[-1] in projections:
            q, scale = _quantize_kernel(module.kernel.get_value())
            module.kernel = nnx.Param(q)
            module.kernel_scale = nnx.data(nnx.Param(scale))
    return model


def is_quantized(base: Any) -> bool:
    """Whether a tree of base weights holds int8 kernels."""
    return any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(base))


def _quantize_kernel(kernel: jax.Array) -> tuple[Any, Any]:
    """[..., in, out] -> int8 of that shape, float32[..., out]."""
    *layers, in_features, out_features = kernel.shape
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return (
            jax.ShapeDtypeStruct(kernel.shape, jnp.int8),
            jax.ShapeDtypeStruct((*layers, out_features), jnp.float32),
        )
    weight_oi = np.swapaxes(np.asarray(kernel), -1, -2).reshape(-1, in_features)
    q_oi, scale_o = quantize_rows(weight_oi)
    q = np.swapaxes(q_oi.reshape(*layers, out_features, in_features), -1, -2)
    return jnp.asarray(q), jnp.asarray(scale_o.reshape(*layers, out_features))
