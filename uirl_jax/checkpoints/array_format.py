"""Arrays as a checkpoint stores them: by path, without extended dtypes, with checksums."""

import json
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path ("optimizer/0/mu/blocks/lora_a"), in the order of jax.tree.leaves."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in paths_and_leaves
    }
    assert len(named) == len(paths_and_leaves), "two leaves have one path"
    return named


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> Any:
    """An array without extended dtype: the uint32 data of a typed key, other arrays unchanged."""
    if isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def plain_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that is stored on disk for an abstract leaf."""
    if not is_key(leaf):
        return leaf
    # Key data has one more dimension than the keys, never sharded.
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def like(array: jax.Array, leaf: Any) -> jax.Array:
    """A restored plain array with the dtype of the abstract leaf."""
    if not is_key(leaf):
        return array
    impls: list[Any] = []  # key_impl needs a key, not an abstract one: get it by tracing
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=impls[0])


def crc32c(array: Any) -> int:
    """crc32c of the array's bytes in C order, little-endian, gathered on this host."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    host = np.ascontiguousarray(np.asarray(array))
    # View as bytes, because bfloat16 arrays do not support the buffer protocol.
    return google_crc32c.value(host.reshape(-1).view(np.uint8).data.tobytes())


def describe(array: Any) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "crc32c": crc32c(array),
    }


def canonical(body: Any) -> bytes:
    """The canonical bytes of a JSON value: string keys, sorted; NaN and infinity are refused."""
    as_json = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps(as_json, sort_keys=True, separators=(",", ":")).encode()
