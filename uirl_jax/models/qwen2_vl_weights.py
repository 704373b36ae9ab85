"""Qwen2-VL directories in Hugging Face's format: config.json, safetensors <-> the model's leaves.

One table says which tensors of a directory make up which leaf; reading, writing and the lists of
what does not fit all come from it. Tensors go one leaf at a time between file and device, so
that host memory holds one leaf and not one model. Nothing is downloaded; no tokenizer is
read or written.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, Remat
from uirl_jax.models.sharding import leaf_names, state_shardings

_HASH_CHUNK_BYTES = 16 * 2**20
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours -> safetensors'

# Leaf of a block -> tensor of a layer, under the prefix of its tower. `kernel` is the transpose of
# torch's `weight`.
_TEXT_BLOCK = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_VISION_BLOCK = {
    "norm1": "norm1",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "norm2": "norm2",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_SINGLE = {
    "visual/patch_embed/kernel": "visual.patch_embed.proj.weight",
    "visual/merger_norm/scale": "visual.merger.ln_q.weight",
    "visual/merger_norm/bias": "visual.merger.ln_q.bias",
    "visual/merger_fc1/kernel": "visual.merger.mlp.0.weight",
    "visual/merger_fc1/bias": "visual.merger.mlp.0.bias",
    "visual/merger_fc2/kernel": "visual.merger.mlp.2.weight",
    "visual/merger_fc2/bias": "visual.merger.mlp.2.bias",
    "text/embedding": "model.embed_tokens.weight",
    "text/final_norm/scale": "model.norm.weight",
    "text/lm_head/kernel": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of the base and where it comes from."""

    path: str  # "text/blocks/q_proj/kernel"
    tensors: tuple[str, ...]  # in the published layout; one a layer where the leaf is stacked
    shape: tuple[int, ...]  # of the leaf
    stacked: bool
    transposed: bool
    tensor_shape: tuple[int, ...]  # of each tensor


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

    leaves = {leaf.path: leaf for leaf in _leaves(cfg, base)}
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
    model: Qwen2VL, model_dir: str | Path, *, dtype: jnp.dtype | str | None = None
) -> None:
    """Writes config.json and model.safetensors in the published layout, which transformers reads.

    Adapters are added to their kernels in float32. Each file appears whole or not at all.

    Args:
      dtype: of the written tensors; None keeps each leaf's own.
    """
    model_dir = Path(model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    state = nnx.state(model)
    arrays = {"/".join(leaf_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    leaves = _leaves(model.cfg, nnx.state(model, nnx.Not(LoRAParam)))
    written = jnp.dtype(dtype) if dtype is not None else None

    def dtype_of(leaf: _Leaf) -> np.dtype:
        return written or arrays[leaf.path].dtype

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for leaf in leaves:
        size_bytes = int(np.prod(leaf.tensor_shape)) * dtype_of(leaf).itemsize
        for name in leaf.tensors:
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype_of(leaf).name],
                "shape": list(leaf.tensor_shape),
                "data_offsets": [offset, offset + size_bytes],
            }
            offset += size_bytes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)

    # The library's own writer wants all tensors in memory; the format is a header and then bytes.
    with _replacing(model_dir / "model.safetensors") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for leaf in leaves:
            for array in _tensors_of(leaf, arrays, model.lora):
                file.write(array.astype(dtype_of(leaf)).tobytes())
    config = model.cfg.to_dict() | {"torch_dtype": dtype_of(leaves[0]).name}
    with _replacing(model_dir / "config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


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
        raise ModelError(f"adapters do not fit the model: {_listed(problems)}")
    return jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            flat["/".join(leaf_names(path))].astype(leaf.dtype), leaf.sharding
        ),
        abstract,
    )


def _leaves(cfg: Qwen2VLConfig, base: nnx.State) -> list[_Leaf]:
    """The table, filled in for one model: every leaf of the base."""
    leaves = []
    for key_path, array in jax.tree.leaves_with_path(base):
        names = leaf_names(key_path)
        path = "/".join(names)
        stacked = names[1] == "blocks"
        shape = tuple(array.shape)
        if stacked:
            table, prefix = (
                (_TEXT_BLOCK, "model.layers")
                if names[0] == "text"
                else (_VISION_BLOCK, "visual.blocks")
            )
            suffix = "bias" if names[3] == "bias" else "weight"
            tensors = tuple(f"{prefix}.{i}.{table[names[2]]}.{suffix}" for i in range(shape[0]))
        else:
            tensors = (_SINGLE[path],)
        transposed = names[-1] == "kernel"
        tensor_shape = shape[1:] if stacked else shape
        if transposed:
            tensor_shape = tensor_shape[::-1]
        if path == "visual/patch_embed/kernel":
            vision = cfg.vision
            tensor_shape = (
                *(vision.embed_dim, vision.in_channels, vision.temporal_patch_size),
                *(vision.patch_size, vision.patch_size),
            )
        leaves.append(_Leaf(path, tensors, shape, stacked, transposed, tensor_shape))
    return leaves


def _published_name(name: str) -> str | None:
    """A tensor's name in the published layout, from either layout; None for what is no weight.

    Since version 4.52 transformers holds both towers under `model.`:
        model.language_model.layers.0...  ->  model.layers.0...
        model.visual.blocks.0...          ->  visual.blocks.0...
    """
    if name.endswith("rotary_emb.inv_freq") or name.endswith("rotary_pos_emb.inv_freq"):
        return None
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name)


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
            f"{index_path}: " + _listed([f"{n} is no file beside it" for n in [*outside, *missing]])
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
            if (published := _published_name(name)) is not None:
                tensors[published] = file.get_slice(name)
    return tensors


def _check(
    model_dir: Path, cfg: Qwen2VLConfig, tensors: dict[str, Any], leaves: dict[str, _Leaf]
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
        if tensors[name].get_dtype() not in _DTYPE_NAMES.values():
            problems.append(f"{name} has dtype {tensors[name].get_dtype()}")
    if problems:
        raise ModelError(f"{model_dir}: weights do not fit config.json: {_listed(problems)}")


def _listed(problems: list[str], most: int = 12) -> str:
    """One line, also for a directory in which everything is wrong."""
    rest = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {rest} more" if rest > 0 else "")


def _read_leaf(
    tensors: dict[str, Any], leaf: _Leaf, dtype: np.dtype, sharding: jax.sharding.Sharding
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
    leaf: _Leaf, arrays: dict[str, jax.Array], lora: LoraConfig | None
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
def _replacing(path: Path) -> Iterator[Any]:
    """A file that appears under its name when it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
