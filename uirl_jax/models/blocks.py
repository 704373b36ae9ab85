"""Stacked blocks of a tower: initialised by one vmap, run one after another, rematerialised.

They run as a scan, whose program has one block whatever the depth; the few blocks of a small model
on the CPU as a loop.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models.sharding import platform

# What is recomputed in the backward pass: nothing (none, most memory), all but the outputs of
# projections (dots), or all, from the block's input (full, least memory).
Remat = Literal["none", "dots", "full"]

# Up to so many blocks are a loop on the CPU: a scan's backward pass takes what it needs from arrays
# of all layers, and clearing and filling those was a fifth of a training step of one small model
# (docs/notes/performance.md).
_LOOP_BLOCKS = 8


def stack(make: Callable[[jax.Array], nnx.Module], depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """One block whose every leaf has a leading layer axis."""
    return jax.vmap(make)(jax.random.split(rngs.params(), depth))


def checkpointed(
    body: Callable[..., Any], remat: Remat, *, scanned: bool = True
) -> Callable[..., Any]:
    """A function, mostly a scan's body, under jax.checkpoint with the policy that `remat` names."""
    if remat == "none":
        return body
    policy = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }[remat]
    # XLA cannot merge the forward and the recomputed pass across a scan: preventing it only costs.
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)


def through(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, stacked: Any, remat: Remat
) -> tuple[Any, Any]:
    """`jax.lax.scan(body, carry, stacked)` of a tower's blocks, each under `checkpointed`."""
    depth = jax.tree.leaves(stacked)[0].shape[0]
    if platform() != "cpu" or depth > _LOOP_BLOCKS:
        return jax.lax.scan(checkpointed(body, remat), carry, stacked)
    body = checkpointed(body, remat, scanned=False)
    outputs = []
    for layer in range(depth):
        at_layer = jax.tree.map(lambda leaf_l, layer=layer: leaf_l[layer], stacked)
        carry, output = body(carry, at_layer)
        outputs.append(output)
    return carry, jax.tree.map(lambda *outputs: jnp.stack(outputs), *outputs)


def layer_keys(dropout_key: jax.Array | None, depth: int) -> jax.Array | None:
    """A dropout key per layer, [depth], to scan over; None without a key."""
    return None if dropout_key is None else jax.random.split(dropout_key, depth)
