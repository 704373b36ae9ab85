"""Model directories in Hugging Face's format: safetensors and config.json <-> a model's leaves.

A family's table (`weight_table`) says which tensors make up each leaf. Tensors move one at a time
between file and device: host memory holds a few of them, never the model. Nothing is downloaded
(see `hub`). Adapters in PEFT's format are handled by `peft_adapters`, tokenizer files by
`directory`.
"""

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models import token_rows, weight_files
from uirl_jax.models.lora import AdaptedModel, LoraConfig, LoRAParam
from uirl_jax.models.quantization import Quantize, is_quantized, quantize_rows, quantized
from uirl_jax.models.sharding import leaf_names, place, state_shardings
from uirl_jax.models.stacking import start_leaf
from uirl_jax.models.weight_files import StoredTensor, listed
from uirl_jax.models.weight_table import Leaf, WeightTable
from uirl_jax.store.files import replacing

_HASH_BLOCK_BYTES = 16 * 2**20
# Threads that place tensors. One transposes 2 GB/s; a disk may read several times that.
_PLACERS = 4
_NO_ROWS = "the family's model has no models.token_rows; set Capabilities.trainable_tokens=False"
# Names that save_pretrained writes, the same as transformers'.
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def load_pretrained(
    model_dir: str | Path,
    build: Callable[[], Any],
    table: WeightTable,
    *,
    init_key: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
    quantize: Quantize = "none",
) -> Any:
    """Reads model.safetensors (or its shards) into a model's arrays.

    Args:
      build: returns the model, with or without adapters; only its shapes are computed.
      table: of the model's family.
      init_key: of fresh adapters.
      mesh: shards the arrays (`sharding.state_shardings`); None: the first local device.
      quantize: int8 stores the projections in 8 bits; other weights keep their dtype.
    Raises: ModelError that lists every tensor that is missing, unexpected or of another shape.
    """
    model_dir = Path(model_dir)
    abstract: Any = nnx.eval_shape(build)
    if quantize == "int8":
        abstract = quantized(abstract, table.projections)
    graphdef, adapters, base = nnx.split(abstract, LoRAParam, ...)
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shardings(tree: Any) -> Any:
        if mesh is None:
            return jax.tree.map(lambda _: single, tree)
        return state_shardings(mesh, tree, table.sharding_rules)

    leaves = {leaf.path: leaf for leaf in leaves_of(abstract.cfg, base, table)}
    stored = _stored_tensors(model_dir, table)
    _check(model_dir, stored, leaves, set(table.redundant(abstract.cfg)))
    base = _read_base(stored, leaves, base, shardings(base))
    placed = shardings(adapters)
    rows = _base_rows(abstract.lora, base, by_path(placed))

    def start(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        names = leaf_names(path)
        if (rows_nd := rows.get("/".join(names))) is not None:
            return rows_nd
        return place(np.asarray(_init_adapter(names, leaf, init_key)), sharding)

    adapters = jax.tree.map_with_path(start, adapters, placed)
    return nnx.merge(graphdef, adapters, base)


def leaves_of(cfg: Any, base: nnx.State, table: WeightTable) -> list[Leaf]:
    """The base's leaves that tensors are read for.

    Not the scale of an int8 kernel: it is computed from the kernel's tensors.
    """
    return [
        table.leaf(cfg, path, tuple(array.shape))
        for path, array in by_path(base).items()
        if not path.endswith("/kernel_scale")
    ]


def save_pretrained(
    model: AdaptedModel,
    model_dir: str | Path,
    table: WeightTable,
    config: Mapping[str, Any],
    *,
    dtype: jnp.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors in the published layout, which transformers reads.

    Adapters are merged into their kernels in float32; trained rows of tokens replace the base's.
    All files are written before any is renamed; weight files of an earlier save that were not
    replaced are deleted last. Needs disk space for both and host memory for a few tensors.

    Args:
      config: content of config.json.
      dtype: of the written tensors; None: that of each leaf.
      max_shard_bytes: of tensors in a file, unless a single tensor is larger. One file is named
        model.safetensors; shards come with model.safetensors.index.json. Default: that of the
        published models.
    Raises: ModelError: the projections are int8.
    """
    model_dir = Path(model_dir)
    if is_quantized(nnx.state(model, nnx.Not(LoRAParam))):
        raise ModelError(
            f"{model_dir}: the model to save has int8 projections, whose rounding a saved model "
            "would keep; save the adapters, and merge them onto the original weights "
            "(python -m tools.export merged)"
        )
    model_dir.mkdir(parents=True, exist_ok=True)
    arrays = by_path(nnx.state(model))
    leaves = leaves_of(model.cfg, nnx.state(model, nnx.Not(LoRAParam)), table)
    shards = weight_files.cut(
        [
            weight_files.Tensor(name, leaf.tensor_shape, np.dtype(dtype or arrays[leaf.path].dtype))
            for leaf in leaves
            for name in leaf.tensors
        ],
        max_shard_bytes,
    )
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    documents = {"config.json": {**config, "torch_dtype": shards[0][0].dtype.name}}
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
            # The safetensors library's writer needs all tensors in memory.
            file.write(weight_files.header(shard))
            for tensor in shard:
                value = next(values).astype(tensor.dtype, copy=False)
                file.write(value.reshape(-1).view(np.uint8).data)
        for file, document in zip(files[count:], documents.values(), strict=True):
            file.write((json.dumps(document, indent=2) + "\n").encode())
    for path in model_dir.iterdir():
        if _WEIGHT_FILE.fullmatch(path.name) and path.name not in (*names, *documents):
            path.unlink()


def stored_dtype(model_dir: str | Path) -> jnp.dtype:
    """The dtype of most bytes of a directory's weights. Raises: ModelError."""
    sizes: collections.Counter[str] = collections.Counter()
    for path in weight_files.paths_in(Path(model_dir)):
        for tensor in weight_files.tensors_in(path):
            sizes[tensor.dtype_name] += tensor.size_bytes
    if not sizes:
        raise ModelError(f"{model_dir}: its safetensors files hold no tensors")
    [(stored, _)] = sizes.most_common(1)
    for name, stored_name in weight_files.DTYPE_NAMES.items():
        if stored_name == stored:
            return jnp.dtype(name)
    raise ModelError(
        f"{model_dir}: weights of dtype {stored}, expected one of {[*weight_files.DTYPE_NAMES]}"
    )


def stored_dtypes(
    model_dir: str | Path, leaves: Sequence[Leaf], table: WeightTable
) -> dict[str, np.dtype]:
    """By path, the dtype that holds a leaf's tensors exactly: float32 where they have several.

    Leaves without a tensor in the files are left out. Raises: ModelError.
    """
    stored = _stored_tensors(Path(model_dir), table)
    names = {stored_name: name for name, stored_name in weight_files.DTYPE_NAMES.items()}
    found = {}
    for leaf in leaves:
        kinds = {stored[name].dtype_name for name in leaf.tensors if name in stored}
        if kinds and kinds <= names.keys():
            [kind, *others] = kinds
            found[leaf.path] = np.dtype(jnp.dtype("float32" if others else names[kind]))
    return found


def base_hash(model_dir: str | Path, stop: threading.Event | None = None) -> str:
    """32 hex digits that identify a base model: a hash of config.json and its safetensors files.

    Hashes the checksums of 16 MiB blocks: 12 GB/s on one core. A cryptographic hash of all bytes
    reaches 1.3 GB/s and would take longer than loading. It tells models apart and does not protect
    against forgery.

    Args:
      stop: when set, the function returns early; its result is then meaningless.
    """
    model_dir = Path(model_dir)
    digest = hashlib.blake2b(digest_size=16)
    for path in [model_dir / "config.json", *weight_files.paths_in(model_dir)]:
        # With the length, moving bytes from one file to the next changes the hash.
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while not (stop and stop.is_set()) and (block := file.read(_HASH_BLOCK_BYTES)):
                digest.update(google_crc32c.value(block).to_bytes(4, "little"))
    return digest.hexdigest()


def by_path(state: nnx.State) -> dict[str, Any]:
    """Leaves by path, as they are."""
    return {"/".join(leaf_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def adapters_to_numpy(lora_state: nnx.State) -> dict[str, np.ndarray]:
    """Leaves by path: {"text/blocks/q_proj/lora_a": float32[L,D,R], ...}."""
    host = jax.device_get(lora_state)
    return {path: np.asarray(leaf) for path, leaf in by_path(host).items()}


def adapters_from_numpy(flat: dict[str, np.ndarray], abstract: nnx.State) -> nnx.State:
    """The reverse of adapters_to_numpy.

    Args:
      abstract: a state of the wanted structure, dtypes and shardings: arrays or
        jax.ShapeDtypeStruct.
    Raises: ModelError that lists every leaf that is missing, unexpected or of another shape.
    """
    wanted = by_path(abstract)
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
        lambda path, leaf: place(
            flat["/".join(leaf_names(path))].astype(leaf.dtype), leaf.sharding
        ),
        abstract,
    )


def _stored_tensors(model_dir: Path, table: WeightTable) -> dict[str, StoredTensor]:
    """The directory's tensors by published name."""
    tensors = {}
    for path in weight_files.paths_in(model_dir):
        for tensor in weight_files.tensors_in(path):
            if (published := table.published_name(tensor.name)) is not None:
                tensors[published] = tensor
    return tensors


def _check(
    model_dir: Path,
    tensors: dict[str, StoredTensor],
    leaves: dict[str, Leaf],
    redundant: set[str],
) -> None:
    expected = {name: leaf.tensor_shape for leaf in leaves.values() for name in leaf.tensors}
    surplus = tensors.keys() - expected.keys() - redundant
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(surplus)]
    for name in sorted(expected.keys() & tensors.keys()):
        shape, dtype_name = tensors[name].shape, tensors[name].dtype_name
        if shape != expected[name]:
            problems.append(f"{name} is {list(shape)}, expected {list(expected[name])}")
        if dtype_name not in weight_files.DTYPE_NAMES.values():
            problems.append(f"{name} has dtype {dtype_name}")
    if problems:
        raise ModelError(f"{model_dir}: weights do not fit config.json: {listed(problems)}")


def _read_base(
    stored: dict[str, StoredTensor], leaves: dict[str, Leaf], base: nnx.State, shardings: nnx.State
) -> nnx.State:
    """The leaves on their devices, from one pass over the files in file order."""
    started = {
        "/".join(leaf_names(path)): start_leaf(leaf.shape, leaf.dtype, sharding)
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(base), jax.tree.leaves(shardings), strict=True
        )
    }
    targets = {
        stored[name]: (leaf, layer if leaf.stacked else None)
        for leaf in leaves.values()
        for layer, name in enumerate(leaf.tensors)
    }

    def place(tensor: StoredTensor, array: np.ndarray) -> None:
        leaf, layer = targets[tensor]
        if leaf.transposed:
            array = array.reshape(array.shape[0], -1)
            if (scale_path := f"{leaf.path}_scale") in started:
                array, scale_o = quantize_rows(array)
                started[scale_path].put(scale_o, layer)
            array = array.T
        started[leaf.path].put(array, layer)

    with concurrent.futures.ThreadPoolExecutor(_PLACERS, "place-weights") as pool:
        placing: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        for tensor, array in weight_files.read_in_order(targets):
            placing.append(pool.submit(place, tensor, array))
            if len(placing) > _PLACERS:
                placing.popleft().result()
        for future in placing:
            future.result()
    return jax.tree.map_with_path(
        lambda path, _: started.pop("/".join(leaf_names(path))).finish(), base
    )


def _tensors_of(
    leaf: Leaf, arrays: dict[str, jax.Array], lora: LoraConfig | None
) -> Iterator[np.ndarray]:
    """A leaf's tensors in torch's layout, with adapters merged."""
    whole = arrays[leaf.path]
    parent = leaf.path.rpartition("/")[0]
    lora_a, lora_b = arrays.get(f"{parent}/lora_a"), arrays.get(f"{parent}/lora_b")
    rows_nd = arrays.get(token_rows.rows_path(leaf.path) or "")
    for layer in range(leaf.shape[0]) if leaf.stacked else [slice(None)]:
        array = np.asarray(jax.device_get(whole[layer]))
        if lora is not None and rows_nd is not None:
            rows_nd = np.asarray(jax.device_get(rows_nd))
            array = token_rows.replaced(array, leaf.path, lora.token_ids, rows_nd)
        if leaf.transposed:
            if lora is not None and lora_a is not None and lora_b is not None:
                a_ir, b_ro = (
                    np.asarray(jax.device_get(x[layer]), np.float32) for x in (lora_a, lora_b)
                )
                array = array.astype(np.float32) + lora.scale * (a_ir @ b_ro)
            array = array.T.reshape(leaf.tensor_shape)
        yield np.ascontiguousarray(array)


def _base_rows(
    lora: LoraConfig | None, base: nnx.State, shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """By path, what the trained rows of tokens start as.

    Args: shardings: of the adapters, by path.
    """
    if lora is None or not lora.token_ids:
        return {}
    rows = {}
    for path, leaf in by_path(base).items():
        rows_path = token_rows.rows_path(path) or ""
        if rows_path in shardings:
            read = functools.partial(token_rows.base_rows, path=path, ids=lora.token_ids)
            # Compiled, so that with several processes each computes its own part.
            rows[rows_path] = jax.jit(read, out_shardings=shardings[rows_path])(leaf)
    if not rows:
        raise ModelError(f"lora.trainable_tokens={lora.trainable_tokens}: {_NO_ROWS}")
    return rows


def _init_adapter(names: list[str], leaf: jax.ShapeDtypeStruct, init_key: jax.Array) -> jax.Array:
    """As in lora.Linear: A uniform, B zero. The key is init_key with the leaf's path folded in."""
    if names[-1] == "lora_b":
        return jnp.zeros(leaf.shape, leaf.dtype)
    leaf_key = jax.random.fold_in(init_key, zlib.crc32("/".join(names).encode()))
    bound = leaf.shape[-2] ** -0.5
    return jax.random.uniform(leaf_key, leaf.shape, leaf.dtype, -bound, bound)
