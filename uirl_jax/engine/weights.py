"""What the programs read of a model: its split halves, and on a CPU the text blocks one by one.

A scan over stacked layers multiplies by slices of the stacked weights. On TPU and GPU the slice is
part of the product; on the CPU XLA copies it first, and a decode step is little else than reading
weights once (measured 2026-11-21 on two cores, 16 rows through 318 MB of matrices: 26 ms stacked,
14 ms layer by layer). The price is programs as long as the model: a layer of frozen weights is an
array on the memory of the stacked one, not a copy of it.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.errors import PolicyError
from uirl_jax.families.loading import PolicyModel


class Weights(NamedTuple):
    """frozen and trainable are `nnx.split`'s; the layers hold the text blocks of each once more."""

    frozen: nnx.State
    trainable: nnx.State
    frozen_layers: tuple[nnx.State, ...] | None
    trainable_layers: tuple[nnx.State, ...] | None


def prepare(model: PolicyModel, trainable: nnx.State, *, by_layer: bool) -> Weights:
    if not by_layer:
        return Weights(model.frozen, trainable, None, None)
    frozen_blocks, trainable_blocks = (
        _under(tree, model.family.text_blocks) for tree in (model.frozen, trainable)
    )
    layers = jax.tree.leaves((frozen_blocks, trainable_blocks))[0].shape[0]
    return Weights(
        model.frozen, trainable, _views(frozen_blocks, layers), _layers(trainable_blocks, layers)
    )


def compiler_options(model: PolicyModel, *, by_layer: bool) -> dict[str, str]:
    """XLA's options of programs that read the weights of `prepare`.

    XLA multiplies bfloat16 on the CPU by converting weights to float32. Its scheduler for
    concurrency begins with all conversions, and holds twice the model's size beside it (measured
    2026-11-24, 420 MiB of weights: 840 MiB and 550 ms a row, 53 MiB and 120 ms with this option).
    In float32 a token took 12 to 26 % longer with it, in one run of each.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((model.frozen, model.trainable))}
    if by_layer and jnp.dtype("bfloat16") in dtypes:
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return {}


def with_adapters(model: PolicyModel, weights: Weights, trainable: nnx.State) -> Weights:
    """The same base under another policy."""
    if weights.frozen_layers is None:
        return weights._replace(trainable=trainable)
    blocks = _under(trainable, model.family.text_blocks)
    layers = _layers(blocks, len(weights.frozen_layers))
    return weights._replace(trainable=trainable, trainable_layers=layers)


def check_fits(trainable: nnx.State, old: nnx.State, version: int) -> None:
    """The new policy fits in the place of the old. Raises: PolicyError that names what differs."""
    if jax.tree.structure(trainable) != jax.tree.structure(old):
        raise PolicyError(f"policy version {version}: not the weights that this model trains")
    for (path, new_leaf), old_leaf in zip(
        jax.tree.leaves_with_path(trainable), jax.tree.leaves(old), strict=True
    ):
        if (new_leaf.shape, new_leaf.dtype) != (old_leaf.shape, old_leaf.dtype):
            raise PolicyError(
                f"policy version {version}: {jax.tree_util.keystr(path)} is "
                f"{new_leaf.dtype}{list(new_leaf.shape)}, expected "
                f"{old_leaf.dtype}{list(old_leaf.shape)}"
            )


def merge(model: PolicyModel, weights: Weights) -> tuple[Any, tuple[Any, ...] | None]:
    """(module, its text blocks one by one), as `border.Model.extend` takes them; when traced.

    Stacked blocks that are not used are not arguments of the compiled program.
    """
    module = nnx.merge(model.graphdef, weights.trainable, weights.frozen)
    if weights.frozen_layers is None or weights.trainable_layers is None:
        return module, None
    blocks = functools.reduce(getattr, model.family.text_blocks, module)
    block_graphdef = nnx.graphdef(blocks)
    pairs = zip(weights.trainable_layers, weights.frozen_layers, strict=True)
    return module, tuple(nnx.merge(block_graphdef, *pair) for pair in pairs)


def used_now(weights: Weights, token_b: jax.Array) -> tuple[Weights, jax.Array]:
    """The arguments, to be used in the body of a loop over sampled tokens.

    Without a dependence on the loop XLA converts all layers to float32 before it (see
    `compiler_options`).
    """
    if weights.frozen_layers is None:
        return weights, token_b
    frozen, trainable, token_b = jax.lax.optimization_barrier(
        (weights.frozen_layers, weights.trainable_layers, token_b)
    )
    return weights._replace(frozen_layers=frozen, trainable_layers=trainable), token_b


def _under(tree: nnx.State, path: tuple[str, ...]) -> nnx.State | None:
    for name in path:
        if name not in tree:  # adapters on the vision tower alone
            return None
        tree = tree[name]
    return tree


def _layers(blocks: nnx.State | None, count: int) -> tuple[nnx.State, ...]:
    if blocks is None:
        return (nnx.State({}),) * count
    return _unstack(blocks, count)


def _views(blocks: nnx.State | None, count: int) -> tuple[nnx.State, ...]:
    """As `_layers`, of arrays on the CPU that nobody donates: aligned layers are not copied.

    A layer whose address XLA cannot use (its size is no multiple of 64 bytes) is copied.
    """
    host = jax.tree.map(np.asarray, blocks)

    def view(layer: int) -> nnx.State:
        return jax.tree.map(
            lambda array, leaf: jax.device_put(array[layer], leaf.sharding, may_alias=True),
            host,
            blocks,
        )

    return tuple(view(layer) for layer in range(count)) if blocks else (nnx.State({}),) * count


@jax.jit(static_argnames="count")
def _unstack(stacked: nnx.State, count: int) -> tuple[nnx.State, ...]:
    return tuple(jax.tree.map(operator.itemgetter(layer), stacked) for layer in range(count))
