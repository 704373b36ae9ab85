"""Qwen2-VL directories in Hugging Face's format: config.json, safetensors <-> the model's leaves.

The table of qwen2_vl_names says which tensors make up which leaf. Tensors go one at a time between
file and device, so that host memory holds a tensor or a leaf and not a model. Nothing is
downloaded; no tokenizer is read or written; adapters in PEFT's format are peft_adapters' business.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, Remat
from uirl_jax.models.qwen2_vl_names import Leaf, leaves_of, published_name
from uirl_jax.models.sharding import leaf_names, state_shardings

_HASH_CHUNK_BYTES = 16 * 2**20
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours -> safetensors'
# The names that save_pretrained gives, as transformers does.
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def load_pretrained(
    model_dir: str | Path,
    *,
    lora: LoraConfig | None,
    param_dtype: jnp.dtype,
    init_key: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
    compute_dtype: jnp.dtype | None = None,
    remat: Remat = "full",
) -> Qwen2VL:
    """Reads config.json and model.safetensors (or its shards) straight into the model's arrays.

    Args:
      lora: fresh adapters, drawn from init_key, or None.
      param_dtype: of the base weights, whatever dtype the files have.
      mesh: where the arrays go (`sharding.state_shardings`); None is the default device.
      compute_dtype, remat: see Qwen2VL.
    Raises: ModelError that lists every tensor that is missing, unexpected or of another shape.
    """
    model_dir = Path(model_dir)
    cfg = read_config(model_dir)
    abstract = nnx.eval_shape(
        lambda: Qwen2VL(
            cfg,
            lora=lora,
            rngs=nnx.Rngs(0),
            param_dtype=param_dtype,
            compute_dtype=compute_dtype,
            remat=remat,
        )
    )
    graphdef, adapters, base = nnx.split(abstract, LoRAParam, ...)
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shardings(tree: Any) -> Any:
        return state_shardings(mesh, tree) if mesh else jax.tree.map(lambda _: single, tree)

    leaves = {leaf.path: leaf for leaf in leaves_of(cfg, base)}
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(model_dir, stack)
        _check(model_dir, cfg, tensors, leaves)

        def read(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
            return _read_leaf(tensors, leaves["/".join(leaf_names(path))], leaf.dtype, sharding)

        base = jax.tree.map_with_path(read, base, shardings(base))
    adapters = jax.tree.map_with_path(
        lambda path, leaf, sharding: jax.device_put(
            _init_adapter(leaf_names(path), leaf, init_key), sharding
        ),
        adapters,
        shardings(adapters),
    )
    return nnx.merge(graphdef, adapters, base)


def save_pretrained(
    model: Qwen2VL,
    model_dir: str | Path,
    *,
    dtype: jnp.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors in the published layout, which transformers reads.

    Adapters are added to their kernels in float32. The new files take their names when all of them
    are whole, and weights of an earlier save that they do not replace go after that. Disk space is
    needed for both, host memory for a few tensors.

    Args:
      dtype: of the written tensors; None keeps each leaf's own.
      max_shard_bytes: of tensors in a file; only a single tensor that is larger exceeds it. What
        fits in one file is model.safetensors, more are shards with model.safetensors.index.json.
        Default: as transformers cut the published models.
    """
    model_dir = Path(model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    state = nnx.state(model)
    arrays = {"/".join(leaf_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    leaves = leaves_of(model.cfg, nnx.state(model, nnx.Not(LoRAParam)))
    shards = _cut(
        [
            _Tensor(name, leaf.tensor_shape, np.dtype(dtype or arrays[leaf.path].dtype))
            for leaf in leaves
            for name in leaf.tensors
        ],
        max_shard_bytes,
    )
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    documents = {"config.json": model.cfg.to_dict() | {"torch_dtype": shards[0][0].dtype.name}}
    if count == 1:
        names = ["model.safetensors"]
    else:
        total_bytes = sum(tensor.size_bytes for shard in shards for tensor in shard)
        by_file = zip(names, shards, strict=True)
        weight_map = {tensor.name: name for name, shard in by_file for tensor in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        documents = {"model.safetensors.index.json": index} | documents

    values = itertools.chain.from_iterable(_tensors_of(leaf, arrays, model.lora) for leaf in leaves)
    with replacing(*(model_dir / name for name in [*names, *documents])) as files:
        for file, shard in zip(files[:count], shards, strict=True):
            # The library's own writer wants all tensors in memory; a file is a header and bytes.
            file.write(_header(shard))
            for tensor in shard:
                value = next(values).astype(tensor.dtype, copy=False)
                file.write(value.reshape(-1).view(np.uint8))
        for file, document in zip(files[count:], documents.values(), strict=True):
            file.write((json.dumps(document, indent=2) + "\n").encode())
    for path in model_dir.iterdir():
        if _WEIGHT_FILE.fullmatch(path.name) and path.name not in (*names, *documents):
            path.unlink()


def read_config(model_dir: str | Path) -> Qwen2VLConfig:
    """Of <model_dir>/config.json. Raises: ModelError."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error}); expected a model directory in Hugging "
            "Face's format"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    try:
        return Qwen2VLConfig.from_dict(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: a value of the wrong type ({error})") from error


def base_hash(model_dir: str | Path) -> str:
    """32 hex digits that name a base model: over config.json and every safetensors file."""
    model_dir = Path(model_dir)
    digest = hashlib.blake2b(digest_size=16)
    for path in [model_dir / "config.json", *_weight_files(model_dir)]:
        # The length keeps a byte from moving over the border between two files unnoticed.
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def adapters_to_numpy(lora_state: nnx.State) -> dict[str, np.ndarray]:
    """Every leaf by its path: {"text/blocks/q_proj/lora_a": float32[L,D,R], ...}."""
    host = jax.device_get(lora_state)
    return {
        "/".join(leaf_names(path)): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(host)
    }


def adapters_from_numpy(flat: dict[str, np.ndarray], abstract: nnx.State) -> nnx.State:
    """The reverse of adapters_to_numpy, on the shardings that abstract's leaves have.

    Args:
      abstract: a state of the wanted structure; arrays or jax.ShapeDtypeStruct.
    Raises: ModelError that lists every leaf that is missing, unexpected or of another shape.
    """
    wanted = {
        "/".join(leaf_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(abstract)
    }
    problems = [f"missing {name}" for name in sorted(wanted.keys() - flat.keys())]
    problems += [f"unexpected {name}" for name in sorted(flat.keys() - wanted.keys())]
    problems += [
        f"{name} is {flat[name].shape}, expected {wanted[name].shape}"
        for name in sorted(wanted.keys() & flat.keys())
        if flat[name].shape != wanted[name].shape
    ]
    if problems:
        raise ModelError(f"adapters do not fit the model: {listed(problems)}")
    return jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            flat["/".join(leaf_names(path))].astype(leaf.dtype), leaf.sharding
        ),
        abstract,
    )


class _Tensor(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _cut(tensors: Sequence[_Tensor], max_shard_bytes: int) -> list[list[_Tensor]]:
    """In their order, as many into each shard as fit, at least one."""
    shards: list[list[_Tensor]] = []
    used_bytes = 0
    for tensor in tensors:
        if not shards or used_bytes + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(tensor)
        used_bytes += tensor.size_bytes
    return shards


def _header(tensors: Sequence[_Tensor]) -> bytes:
    """The head of a safetensors file: its length, then JSON that says where each tensor lies."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size_bytes],
        }
        offset += tensor.size_bytes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    return len(header_bytes).to_bytes(8, "little") + header_bytes


def _weight_files(model_dir: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names."""
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path}: no index of weights ({error!r})") from error
    missing = [name for name in names if not (model_dir / name).is_file()]
    if outside or missing:
        raise ModelError(
            f"{index_path}: " + listed([f"{n} is no file beside it" for n in [*outside, *missing]])
        )
    return [model_dir / name for name in names]


def _open_tensors(model_dir: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Published name -> lazy slice. The files stay open until `stack` closes."""
    tensors = {}
    for path in _weight_files(model_dir):
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path}: not a whole safetensors file ({error})") from error
        for name in sorted(file.keys()):
            if (published := published_name(name)) is not None:
                tensors[published] = file.get_slice(name)
    return tensors


def _check(
    model_dir: Path, cfg: Qwen2VLConfig, tensors: dict[str, Any], leaves: dict[str, Leaf]
) -> None:
    expected = {name: leaf.tensor_shape for leaf in leaves.values() for name in leaf.tensors}
    # A tied head may be stored a second time.
    surplus = (
        tensors.keys()
        - expected.keys()
        - ({"lm_head.weight"} if cfg.tie_word_embeddings else set())
    )
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(surplus)]
    for name in sorted(expected.keys() & tensors.keys()):
        shape = tuple(tensors[name].get_shape())
        if shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, expected {list(expected[name])}")
        if tensors[name].get_dtype() not in DTYPE_NAMES.values():
            problems.append(f"{name} has dtype {tensors[name].get_dtype()}")
    if problems:
        raise ModelError(f"{model_dir}: weights do not fit config.json: {listed(problems)}")


def listed(problems: list[str], most: int = 12) -> str:
    """One line, also for a directory in which everything is wrong."""
    rest = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {rest} more" if rest > 0 else "")


def _read_leaf(
    tensors: dict[str, Any], leaf: Leaf, dtype: np.dtype, sharding: jax.sharding.Sharding
) -> jax.Array:
    """One leaf on its devices, tensor by tensor."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True))
        out = np.empty(shape, dtype)
        layers = range(*index[0].indices(leaf.shape[0])) if leaf.stacked else [0]
        within = index[1:] if leaf.stacked else index
        for row, layer in enumerate(layers):
            tensor = tensors[leaf.tensors[layer]][...]
            if leaf.transposed:
                tensor = tensor.reshape(tensor.shape[0], -1).T
            out[row if leaf.stacked else ...] = tensor[within]
        return out

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _tensors_of(
    leaf: Leaf, arrays: dict[str, jax.Array], lora: LoraConfig | None
) -> Iterator[np.ndarray]:
    """A leaf's tensors as torch has them, adapters added."""
    whole = arrays[leaf.path]
    parent = leaf.path.rpartition("/")[0]
    lora_a, lora_b = (arrays.get(f"{parent}/{name}") for name in ("lora_a", "lora_b"))
    for layer in range(leaf.shape[0]) if leaf.stacked else [slice(None)]:
        array = np.asarray(jax.device_get(whole[layer]))
        if leaf.transposed:
            if lora is not None and lora_a is not None:
                a_ir, b_ro = (
                    np.asarray(jax.device_get(x[layer]), np.float32) for x in (lora_a, lora_b)
                )
                array = array.astype(np.float32) + lora.scale * (a_ir @ b_ro)
            array = array.T.reshape(leaf.tensor_shape)
        yield np.ascontiguousarray(array)


def _init_adapter(names: list[str], leaf: jax.ShapeDtypeStruct, init_key: jax.Array) -> jax.Array:
    """As in lora.Linear: A uniform, B zero. The key depends on the leaf's name, not its place."""
    if names[-1] == "lora_b":
        return jnp.zeros(leaf.shape, leaf.dtype)
    leaf_key = jax.random.fold_in(init_key, zlib.crc32("/".join(names).encode()))
    bound = leaf.shape[-2] ** -0.5
    return jax.random.uniform(leaf_key, leaf.shape, leaf.dtype, -bound, bound)


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Files that appear under their names, in this order, when all of them are whole."""
    temporaries = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(temporary.open("wb")) for temporary in temporaries]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in zip(temporaries, paths, strict=True):
            temporary.replace(path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
