"""Stacked blocks of a tower: initialised by one vmap, run by one scan, with rematerialisation."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

# What is recomputed in the backward pass: nothing (none, most memory), all but the outputs of
# projections (dots), or all, from the block's input (full, least memory).
Remat = Literal["none", "dots", "full"]


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


def layer_keys(dropout_key: jax.Array | None, depth: int) -> jax.Array | None:
    """A dropout key per layer, [depth], to scan over; None without a key."""
    return None if dropout_key is None else jax.random.split(dropout_key, depth)
