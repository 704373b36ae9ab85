import concurrent.futures

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from uirl_jax.errors import ModelError
from uirl_jax.models import weight_files


@pytest.fixture
def written(tmp_path):
    """Two files of three dtypes, one tensor of them without a number in it."""
    rng = np.random.default_rng(0)
    parts = [
        {
            "b": rng.normal(size=(300, 7)).astype(np.float32),
            "a": rng.normal(size=(5,)).astype(np.float16),
        },
        {"c": rng.normal(size=(2, 3, 4)).astype(ml_dtypes.bfloat16), "d": np.zeros((0, 3), "f4")},
    ]
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path)
    return paths, parts[0] | parts[1]


def test_read_in_order_gives_every_tensor_once_as_it_lies_on_the_disk(written, monkeypatch):
    paths, expected = written
    monkeypatch.setattr(weight_files, "_READ_AHEAD_BYTES", 100)  # less than the largest
    tensors = [tensor for path in paths for tensor in weight_files.tensors_in(path)]
    read = list(weight_files.read_in_order(reversed(tensors)))
    places = [(tensor.path, tensor.offset) for tensor, _ in read]
    assert places == sorted(places)
    assert {tensor.name for tensor, _ in read} == expected.keys()
    for tensor, array in read:
        assert array.dtype == expected[tensor.name].dtype
        np.testing.assert_array_equal(array, expected[tensor.name])
        assert not array.size or array.ctypes.data % weight_files.ALIGNMENT == 0


def test_read_in_order_of_a_file_that_became_shorter_is_a_model_error(written):
    paths, _ = written
    tensors = [tensor for path in paths for tensor in weight_files.tensors_in(path)]
    with paths[0].open("r+b") as file:
        file.truncate(paths[0].stat().st_size - 1)
    with pytest.raises(ModelError, match=r"1\.safetensors: was truncated"):
        list(weight_files.read_in_order(tensors))


def test_read_in_order_that_is_left_early_reads_no_more(written, monkeypatch):
    submitted = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def submit(self, fn, /, *args):
            submitted.append(args[1].name)
            return super().submit(fn, *args)

    monkeypatch.setattr(weight_files.concurrent.futures, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(weight_files, "_READ_AHEAD_BYTES", 0)
    reading = weight_files.read_in_order(
        tensor for path in written[0] for tensor in weight_files.tensors_in(path)
    )
    next(reading)
    reading.close()
    assert len(submitted) == 1


def test_header_and_bytes_are_a_file_that_the_library_reads(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(3, np.float16)}
    tensors = [weight_files.Tensor(name, a.shape, a.dtype) for name, a in arrays.items()]
    path = tmp_path / "one.safetensors"
    path.write_bytes(weight_files.header(tensors) + b"".join(a.tobytes() for a in arrays.values()))
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_aligned_empty_is_taken_over_by_the_cpu_without_a_copy():
    buffer = weight_files.aligned_empty((1000, 33), np.dtype(np.float32))
    buffer[...] = 1
    array = jax.device_put(buffer, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data
    # A program that is given the array to write on takes a copy: the buffer is not its own.
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert buffer.max() == 1 and donated.max() == 2
