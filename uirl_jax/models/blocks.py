"""Stacked blocks of a tower: made by one vmap, run by one scan, recomputed in the backward pass."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

# What a block keeps for its backward pass: none recomputes nothing (most memory), dots recomputes
# everything but the outputs of projections, full keeps the block's input alone (least memory).
Remat = Literal["none", "dots", "full"]


def stack(make: Callable[[jax.Array], nnx.Module], depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """One block whose every leaf has a leading layer axis."""
    return jax.vmap(make)(jax.random.split(rngs.params(), depth))


def checkpointed(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The scan's body under jax.checkpoint, as `remat` says."""
    if remat == "none":
        return body
    policy = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }[remat]
    # Inside a scan XLA cannot merge the two computations, so the guard against it is only a cost.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def layer_keys(dropout_key: jax.Array | None, depth: int) -> jax.Array | None:
    """Keys with a leading layer axis, so that a scan hands every layer its own."""
    return None if dropout_key is None else jax.random.split(dropout_key, depth)
