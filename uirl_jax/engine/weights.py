"""What the programs read of a model: its split halves, and on a CPU the text blocks one by one.

A scan over stacked layers multiplies by slices of the stacked weights. On TPU and GPU the slice is
part of the product; on the CPU XLA copies it first, and a decode step is little else than reading
weights once (measured 2026-11-21 on two cores, 16 rows through 318 MB of matrices: 26 ms stacked,
14 ms layer by layer). The price is a second copy of the text tower's blocks, and programs as long
as the model.
"""

import operator
from typing import NamedTuple

import jax
from flax import nnx

from uirl_jax.errors import PolicyError
from uirl_jax.models import qwen2_vl


class Weights(NamedTuple):
    """frozen and lora are `nnx.split`'s; the layers hold the text blocks of each once more."""

    frozen: nnx.State
    lora: nnx.State
    frozen_layers: tuple[nnx.State, ...] | None
    lora_layers: tuple[nnx.State, ...] | None


def prepare(frozen: nnx.State, lora: nnx.State, *, by_layer: bool) -> Weights:
    if not by_layer:
        return Weights(frozen, lora, None, None)
    layers = jax.tree.leaves(frozen["text"]["blocks"])[0].shape[0]
    return Weights(frozen, lora, _layers(frozen, layers), _layers(lora, layers))


def with_adapters(weights: Weights, lora: nnx.State) -> Weights:
    """The same base under another policy."""
    if weights.frozen_layers is None:
        return weights._replace(lora=lora)
    return weights._replace(lora=lora, lora_layers=_layers(lora, len(weights.frozen_layers)))


def check_fits(lora: nnx.State, old: nnx.State, version: int) -> None:
    """New adapters fit in the place of the old. Raises: PolicyError that names what differs."""
    if jax.tree.structure(lora) != jax.tree.structure(old):
        raise PolicyError(f"policy version {version}: not the adapters of this model")
    for (path, new_leaf), old_leaf in zip(
        jax.tree.leaves_with_path(lora), jax.tree.leaves(old), strict=True
    ):
        if (new_leaf.shape, new_leaf.dtype) != (old_leaf.shape, old_leaf.dtype):
            raise PolicyError(
                f"policy version {version}: {jax.tree_util.keystr(path)} is "
                f"{new_leaf.dtype}{list(new_leaf.shape)}, expected "
                f"{old_leaf.dtype}{list(old_leaf.shape)}"
            )


def merge(
    graphdef: nnx.GraphDef, weights: Weights
) -> tuple[qwen2_vl.Qwen2VL, tuple[qwen2_vl.TextBlock, ...] | None]:
    """(model, its text blocks one by one), as `qwen2_vl.extend` takes them; in a traced function.

    What is not used of the stacked ones is no argument of the compiled program.
    """
    model = nnx.merge(graphdef, weights.lora, weights.frozen)
    if weights.frozen_layers is None:
        return model, None
    block_graphdef = nnx.graphdef(model.text.blocks)
    pairs = zip(weights.lora_layers, weights.frozen_layers, strict=True)
    return model, tuple(nnx.merge(block_graphdef, *of_layer) for of_layer in pairs)


def _layers(tree: nnx.State, count: int) -> tuple[nnx.State, ...]:
    if "text" not in tree or "blocks" not in tree["text"]:  # adapters on the vision tower alone
        return (nnx.State({}),) * count
    return _unstack(tree["text"]["blocks"], count)


@jax.jit(static_argnames="count")
def _unstack(stacked: nnx.State, count: int) -> tuple[nnx.State, ...]:
    return tuple(jax.tree.map(operator.itemgetter(layer), stacked) for layer in range(count))
