"""Reads and writes safetensors files tensor by tensor.

The safetensors library maps files, whose pages count as the process's memory, and writes only what
is in memory as a whole. This module reads ahead in file order, into buffers that JAX arrays can
keep; the library still checks every header. Models and names of tensors are elsewhere (`weights`).
"""

import collections
import concurrent.futures
import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from uirl_jax.errors import ModelError

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours -> safetensors'
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Keeps a disk busy while a tensor is placed; a layer of a 7B model is 466 MB.
_READ_AHEAD_BYTES = 128 * 2**20
_MAX_PROBLEMS = 12  # that an error names
ALIGNMENT = 64  # bytes; XLA on the CPU uses an aligned buffer and copies any other


class Tensor(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """A tensor in a file; sorts by file, then by offset."""

    path: Path
    offset: int  # of its first byte in the file
    size_bytes: int
    name: str
    shape: tuple[int, ...]
    dtype_name: str  # safetensors'


def paths_in(model_dir: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names.

    Raises: ModelError.
    """
    index_path = model_dir / "model.safetensors.index.json"
    if (model_dir / "model.safetensors").is_file():
        return [model_dir / "model.safetensors"]
    if not index_path.is_file():
        raise ModelError(
            f"{model_dir}: neither model.safetensors nor model.safetensors.index.json; expected a "
            "model directory in Hugging Face's format"
        )
    try:
        names = sorted(
            set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values())
        )
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index_path}: not an index of weights ({error!r})") from error
    missing = [name for name in names if not (model_dir / name).is_file()]
    if outside or missing:
        raise ModelError(
            f"{index_path}: "
            + listed([f"{n} is not a file next to it" for n in [*outside, *missing]])
        )
    return [model_dir / name for name in names]


def tensors_in(path: Path) -> list[StoredTensor]:
    """The tensors of a file, in any order. Raises: ModelError."""
    try:
        # Opening checks the header, and that the tensors cover the file; it reads no tensor.
        with safetensors.safe_open(path, framework="numpy"), path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path}: not a complete safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return [
        StoredTensor(
            path,
            8 + header_bytes + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            name,
            tuple(entry["shape"]),
            entry["dtype"],
        )
        for name, entry in header.items()
    ]


def read_in_order(tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, np.ndarray]]:
    """Yields every tensor once, in file order; a thread reads ahead.

    Memory: the yielded tensor, and _READ_AHEAD_BYTES or one tensor ahead of it.

    Raises: ModelError: a file was truncated after it was opened.
    """
    waiting = collections.deque(sorted(tensors))
    ahead: collections.deque[tuple[StoredTensor, concurrent.futures.Future[np.ndarray]]]
    ahead = collections.deque()
    ahead_bytes = 0
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in {t.path for t in waiting}}
        reader = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, "read-weights"))
        stack.callback(lambda: [future.cancel() for _, future in ahead])  # before the pool waits
        while waiting or ahead:
            while waiting and (
                not ahead or ahead_bytes + waiting[0].size_bytes <= _READ_AHEAD_BYTES
            ):
                tensor = waiting.popleft()
                ahead.append((tensor, reader.submit(_read, files[tensor.path], tensor)))
                ahead_bytes += tensor.size_bytes
            tensor, future = ahead.popleft()
            ahead_bytes -= tensor.size_bytes
            yield tensor, future.result()


def _read(file: BinaryIO, tensor: StoredTensor) -> np.ndarray:
    array = aligned_empty(tensor.shape, _DTYPES[tensor.dtype_name])
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < tensor.size_bytes:
        count = os.preadv(file.fileno(), [view[done:]], tensor.offset + done)
        if not count:
            raise ModelError(f"{tensor.path}: was truncated while it was read")
        done += count
    return array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """np.empty at an aligned address, which XLA on the CPU uses without a copy."""
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def cut(tensors: Sequence[Tensor], max_shard_bytes: int) -> list[list[Tensor]]:
    """Splits tensors into shards, in order: as many in each as fit, at least one."""
    shards: list[list[Tensor]] = []
    used_bytes = 0
    for tensor in tensors:
        if not shards or used_bytes + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(tensor)
        used_bytes += tensor.size_bytes
    return shards


def header(tensors: Sequence[Tensor]) -> bytes:
    """Header of a safetensors file: its length, then JSON with the offsets of each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size_bytes],
        }
        offset += tensor.size_bytes
    header_bytes = json.dumps(entries).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    return len(header_bytes).to_bytes(8, "little") + header_bytes


def listed(problems: list[str]) -> str:
    """The first problems in one line, and the number of the others."""
    rest = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
