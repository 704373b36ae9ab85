"""Assembles a leaf of a model from its tensors, on the devices of its sharding.

On the CPU tensors are written into the memory of the leaf's shards. On other devices a large leaf
is allocated on the device and filled layer by layer; a small one is assembled on the host and
transferred at once. Callers know files and names.
"""

import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from uirl_jax.models.weight_files import aligned_empty

# Leaves up to this size are assembled on the host: one transfer, and no program for their shape.
# Those of Qwen2-VL-7B are 30 MiB together, in bfloat16.
_SMALL_BYTES = 16 * 2**20
# A transpose reads along one axis and writes along the other: 2.2-3.4 GB/s of bfloat16 in blocks of
# this shape, 0.8-1.0 GB/s in one piece (two cores of an AMD EPYC).
_BLOCK = (256, 64)


def start_leaf(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding
) -> "HostLeaf | DeviceLeaf":
    """An empty leaf: `put` each of its tensors, then call `finish`."""
    on_cpu = next(iter(sharding.device_set)).platform == "cpu"
    small = math.prod(shape) * dtype.itemsize <= _SMALL_BYTES
    return (HostLeaf if on_cpu or small else DeviceLeaf)(shape, dtype, sharding)


class HostLeaf:
    """Assembled in host memory, in aligned buffers that JAX uses on the CPU without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._shape = shape
        self._sharding = sharding
        # Bounds of a shard -> its buffer; devices with the same shard share it.
        self._parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        self._part_of: dict[Any, np.ndarray] = {}  # by device
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None  # of an addressable device
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            if bounds not in self._parts:
                part_shape = tuple(stop - start for start, stop in bounds)
                self._parts[bounds] = aligned_empty(part_shape, np.dtype(dtype))
            self._part_of[device] = self._parts[bounds]

    def put(self, array: np.ndarray, layer: int | None) -> None:
        """Writes a layer of a stacked leaf, or the whole leaf (layer None).

        Threads may put different layers at the same time.
        """
        for bounds, part in self._parts.items():
            within = tuple(slice(*b) for b in (bounds if layer is None else bounds[1:]))
            copy(part[...] if layer is None else part[layer], array[within])

    def finish(self) -> jax.Array:
        """The array. Do not put anything afterwards: it may own the buffers."""
        on_devices = [jax.device_put(part, device) for device, part in self._part_of.items()]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, on_devices)


class DeviceLeaf:
    """Allocated on its devices; the host holds only the layer in transfer."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> None:
        self._array = jnp.zeros(shape, dtype, device=sharding)
        self._lock = threading.Lock()

    def put(self, array: np.ndarray, layer: int | None) -> None:
        """As HostLeaf.put."""
        with self._lock:
            self._put(array, layer)

    def _put(self, array: np.ndarray, layer: int | None) -> None:
        sharding, dtype = self._array.sharding, self._array.dtype

        def part(index: Any) -> np.ndarray:
            piece = array[index]
            out = aligned_empty(piece.shape, np.dtype(dtype))
            copy(out, piece)
            return out

        if layer is None:
            self._array = jax.make_array_from_callback(array.shape, sharding, part)
        else:
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            piece = jax.make_array_from_callback(array.shape, sharding, part)
            self._array = _with_layer(self._array, piece, layer)
        # Without it the host runs ahead, and every layer in transfer takes host memory.
        self._array.block_until_ready()

    def finish(self) -> jax.Array:
        """The array."""
        return self._array


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(leaf: jax.Array, piece: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, piece, layer, 0)


def copy(out: np.ndarray, array: np.ndarray) -> None:
    """out[...] = array, converted to out's dtype; in blocks if `array` is a transpose."""
    if out.dtype == array.dtype and out.dtype.itemsize == 2:
        out, array = out.view(np.uint16), array.view(np.uint16)  # numpy copies its own types faster
    if array.ndim != 2 or array.flags.c_contiguous:
        out[...] = array
        return
    rows, columns = _BLOCK
    for i in range(0, array.shape[1], columns):
        for j in range(0, array.shape[0], rows):
            out[j : j + rows, i : i + columns] = array[j : j + rows, i : i + columns]
