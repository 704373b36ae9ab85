"""Trainable token rows: rows of the embedding, and of an untied head, that belong to the adapters.

A token that was added to a vocabulary has a row that nobody trained, and LoRA's embeddings are
frozen. The rows of `LoraConfig.token_ids` are copied from the base, trained in float32
with the adapters, and replace the base's: peft's trainable_token_indices. A tied head reads the
same rows. Nothing here copies the embedding table.

Source: peft 0.21, tuners/trainable_tokens/layer.py.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.models.lora import LoRAParam
from uirl_jax.models.sharding import constrain

# Path of a leaf of the base -> path of its trained rows, beside it.
_ROWS = {"embedding": "embedding_rows/rows", "lm_head/kernel": "head_rows/rows"}


class TrainedRows(nnx.Module):
    """The rows of some tokens in place of the base's.

    Args:
      ids: of the tokens, ascending.
      base_vd: where they start.
    """

    def __init__(self, ids: Sequence[int], base_vd: jax.Array) -> None:
        self.ids = tuple(ids)
        self.rows = LoRAParam(base_rows(base_vd, "embedding", ids))

    def embedded(self, x_btd: jax.Array, token_ids_bt: jax.Array) -> jax.Array:
        """x_btd, the base's embeddings, with these rows at their tokens."""
        ids_n = np.array(self.ids, np.int32)
        index_bt = jnp.searchsorted(ids_n, token_ids_bt, method="compare_all")
        found_bt = jnp.take(ids_n, index_bt, mode="clip") == token_ids_bt
        # Other tokens look past the end: in the backward pass, a scatter, they are dropped.
        index_bt = jnp.where(found_bt, index_bt, len(self.ids))
        rows_nd = constrain(self.rows[...].astype(x_btd.dtype), None, None)
        rows_btd = jnp.take(rows_nd, index_bt, axis=0, mode="fill", fill_value=0)
        return jnp.where(found_bt[..., None], rows_btd, x_btd)

    def scored(self, logits_btv: jax.Array, x_btd: jax.Array) -> jax.Array:
        """logits_btv, the base's, with these rows' products with x_btd in the tokens' columns."""
        rows_nd = constrain(self.rows[...].astype(x_btd.dtype), None, None)
        logits_btn = jnp.einsum("btd,nd->btn", x_btd, rows_nd, preferred_element_type=jnp.float32)
        logits_btn = constrain(logits_btn, "batch", None, None)
        # Also where the vocabulary is cut every device writes the columns that it has: no logits
        # are gathered. What it costs: docs/token_rows.md.
        at_ids = logits_btv.at[..., np.array(self.ids, np.int32)]
        logits_btv = at_ids.set(logits_btn, unique_indices=True, indices_are_sorted=True)
        return constrain(logits_btv, "batch", None, "vocab")


def rows_path(base_path: str) -> str | None:
    """Path of the trained rows of a leaf of the base; None: a leaf that has none."""
    for base, rows in _ROWS.items():
        if base_path == base or base_path.endswith(f"/{base}"):
            return base_path.removesuffix(base) + rows
    return None


def paths_in(adapters: Iterable[str]) -> list[str]:
    """Those of the paths of adapters that are rows of tokens."""
    return [
        path for path in adapters if path.endswith(tuple(f"/{rows}" for rows in _ROWS.values()))
    ]


def base_rows(leaf: jax.Array, path: str, ids: Sequence[int]) -> jax.Array:
    """The rows of tokens in a leaf of the base.

    Args: path: of the leaf; a kernel has the tokens as columns.
    Returns: float32[n,D] whatever the base's dtype, as the adapters of lora.Linear.
    """
    ids_n = np.array(ids, np.int32)
    rows_nd = leaf[:, ids_n].T if path.endswith("/kernel") else leaf[ids_n]
    return rows_nd.astype(jnp.float32)


def replaced(array: np.ndarray, path: str, ids: Sequence[int], rows_nd: np.ndarray) -> np.ndarray:
    """The reverse: a copy of a leaf of the base with these rows, in the leaf's dtype."""
    array, ids_n = array.copy(), np.array(ids, np.int32)
    if path.endswith("/kernel"):
        array[:, ids_n] = rows_nd.T.astype(array.dtype)
    else:
        array[ids_n] = rows_nd.astype(array.dtype)
    return array
