import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from uirl_jax.models import stacking

LAYERS, ROWS, COLUMNS = 3, 300, 170  # more than a block each way, and no multiple of one


@pytest.mark.parametrize("kind", [stacking.HostLeaf, stacking.DeviceLeaf])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stacked", [True, False])
def test_leaf_of_transposed_tensors_is_their_stack(kind, stored, wanted, stacked):
    tensors_loi = np.random.default_rng(0).normal(size=(LAYERS, COLUMNS, ROWS)).astype(stored)
    expected = np.swapaxes(tensors_loi, 1, 2).astype(wanted)
    expected = expected if stacked else expected[0]
    leaf = kind(expected.shape, np.dtype(wanted), SingleDeviceSharding(jax.devices()[0]))
    for layer in [2, 0, 1] if stacked else [None]:
        leaf.put(tensors_loi[layer or 0].T, layer)
    array = leaf.finish()
    assert array.dtype == wanted
    np.testing.assert_array_equal(array, expected)


def test_start_leaf_on_the_cpu_writes_the_memory_that_the_array_keeps():
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    leaf = stacking.start_leaf((2, 64, 64), np.dtype(np.float32), sharding)
    buffer = next(iter(leaf._parts.values()))
    assert leaf.finish().unsafe_buffer_pointer() == buffer.ctypes.data
