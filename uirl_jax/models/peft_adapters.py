"""Adapters in PEFT's format: adapter_config.json + adapter_model.safetensors <-> LoRAParam leaves.

The peft library loads the adapters written here into transformers' model, and vice versa. A
family's table (`weight_table`) maps PEFT's modules to leaves. Adapters that compute anything but
x A B times a constant, or replace anything but rows of tokens (trainable_token_indices), are
refused. Pickles are never opened.

Source: peft 0.21, tuners/lora/config.py, tuners/tuners_utils.py, utils/save_and_load.py.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.models.directory import is_finite_number, read_json
from uirl_jax.models.lora import AdaptedModel, LoraConfig, LoRAParam
from uirl_jax.models.token_rows import rows_path
from uirl_jax.models.weight_files import DTYPE_NAMES, listed
from uirl_jax.models.weight_table import Leaf, WeightTable
from uirl_jax.models.weights import adapters_to_numpy, leaves_of
from uirl_jax.store.files import replacing

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_MATRICES = {"lora_a": "lora_A", "lora_b": "lora_B"}  # leaf -> PEFT's name, the transpose

# Fields of adapter_config.json that are read, and those without effect on what a trained adapter
# computes. Any other field must be off, because it asks for something that is not supported.
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias"),
        *("target_modules", "exclude_modules", "init_lora_weights", "trainable_token_indices"),
    }
)
_INERT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "ensure_weight_tying"),
    }
)
# Others (pissa, olora, loftq, ...) change the base weights too; the adapter alone is not enough.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


# What follows a module's name in that of its tensor.
_OF_ADAPTER = re.compile(r"\.lora_|\.token_adapter\.")
_HEAD = "lm_head"  # last name of the head's module in every family
_WHOLE_MODULES = ("embed_tokens.weight", "lm_head.weight", ".base_layer.weight")
_ADVICE = {
    "modules_to_save": (
        " (whole modules were trained: merge the adapter onto its base with peft's "
        "merge_and_unload and give the merged model as the base, or train the rows of the new "
        "tokens alone, peft's trainable_token_indices)"
    )
}

_BASE_HASH = "uirl_jax.base_hash"  # key in the metadata of the safetensors file


class Adapter(NamedTuple):
    """The content of an adapter's directory."""

    lora: LoraConfig  # of a model that these arrays fit
    # float32, by path, as in weights.adapters_to_numpy. Rows of tokens that are not here are those
    # of the base.
    arrays: dict[str, np.ndarray]
    base_model: str = ""  # name or directory of its base, if the file says so
    base_hash: str = ""  # of its base (weights.base_hash); only in adapters that this package wrote


def save_adapter(
    model: AdaptedModel,
    directory: str | Path,
    table: WeightTable,
    *,
    base_model: str | Path | None = None,
    base_hash: str = "",
) -> None:
    """Writes the model's adapters; both files are written before either is renamed.

    Args:
      base_model: directory or name from which peft's AutoPeftModel loads the base.
      base_hash: of the base's files, so that a reader can refuse another base.
    Raises: ModelError: the model has no adapters.
    """
    if model.lora is None:
        raise ModelError(f"{directory}: the model has no adapters to save; load it with lora=...")
    directory = Path(directory)
    arrays = adapters_to_numpy(nnx.state(model, LoRAParam))
    tensors = {}
    leaves = leaves_of(model.cfg, nnx.state(model, nnx.Not(LoRAParam)), table)
    token_leaves = _token_leaves(leaves) if model.lora.token_ids else {}
    for leaf in token_leaves.values():
        module = table.current_name(_module(leaf.tensors[0]))
        tensors[_rows_name(module)] = arrays[_rows_path(leaf)]
    adapted = _adapted(leaves, table.projections_of(model.lora.targets))
    for leaf in adapted:
        for name, peft_name in _MATRICES.items():
            array = arrays[_sibling(leaf, name)]
            layers = array if leaf.stacked else [array]
            for tensor, matrix in zip(leaf.tensors, layers, strict=True):
                module = table.current_name(_module(tensor))
                tensors[_tensor_name(module, peft_name)] = np.ascontiguousarray(matrix.T)
    alpha = float(model.lora.alpha)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base_model is None else str(base_model),
        "r": model.lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # some readers need an int
        "lora_dropout": model.lora.dropout,
        "use_rslora": model.lora.rslora,
        "target_modules": _target_modules(leaves, adapted, table),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    if token_leaves:
        ids = list(model.lora.token_ids)
        config["trainable_token_indices"] = {name: ids for name in token_leaves}
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / _TENSORS, directory / _CONFIG) as (tensors_file, config_file):
        metadata = {"format": "pt"} | ({_BASE_HASH: base_hash} if base_hash else {})
        tensors_file.write(_with_metadata(safetensors.numpy.save(tensors), metadata))
        config_file.write((json.dumps(config, indent=2) + "\n").encode())


def _target_modules(leaves: list[Leaf], adapted: list[Leaf], table: WeightTable) -> list[str] | str:
    """PEFT's words for the adapted modules: last names, or a regular expression where other modules
    have the same names, as Qwen2.5-VL's MLPs in both towers."""
    names = set()
    for leaf in adapted:
        name = table.peft_targets.get(_projection(leaf), _projection(leaf))
        names |= {name.replace("{layer}", str(i)) for i in range(len(leaf.tensors))}
    targets = sorted(names)
    others = {leaf.path: leaf for leaf in leaves if not leaf.path.endswith("/bias")}
    for leaf in adapted:
        del others[leaf.path]
    current = [table.current_name(_module(x)) for leaf in others.values() for x in leaf.tensors]
    if not any(_matches(targets, module) for module in current):
        return targets
    return "|".join(sorted(_pattern(leaf, table, current) for leaf in adapted))


def _pattern(leaf: Leaf, table: WeightTable, others: Collection[str]) -> str:
    """A regular expression for the leaf's modules and none of the others."""
    module = re.escape(table.current_name(_module(leaf.tensors[0])))
    if not leaf.stacked:
        return module
    of_any_layer = module.replace(r"\.0\.", r"\.\d+\.", 1)
    if not any(_matches(of_any_layer, other) for other in others):
        return of_any_layer
    numbers = "|".join(map(str, range(len(leaf.tensors))))  # of layers after them: unused ones
    return module.replace(r"\.0\.", rf"\.({numbers})\.", 1)


def _with_metadata(contents: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with metadata. The library writes several entries in random order."""
    size = int.from_bytes(contents[:8], "little")
    header = {"__metadata__": metadata} | json.loads(contents[8 : 8 + size])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + contents[8 + size :]


def load_adapter(directory: str | Path, build: Callable[[], Any], table: WeightTable) -> Adapter:
    """Reads an adapter, in either layout of module names.

    Args:
      build: returns the model without adapters; only its shapes are computed.
      table: of the model's family.
    Raises: ModelError that lists every unsupported value of adapter_config.json, or every tensor
      that is missing, unexpected or of another shape.
    """
    directory = Path(directory)
    config = read_json(directory / _CONFIG, "a directory that peft's save_pretrained wrote")
    path = directory / _TENSORS
    if not path.is_file():
        raise ModelError(
            f"{directory}: {_PICKLE} is a pickle, which can run any code, and is not opened; save "
            "the adapter again as safetensors (peft's save_pretrained does)"
            if (directory / _PICKLE).is_file()
            else f"{path}: no such file; expected a directory that peft's save_pretrained wrote"
        )
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path}: not a complete safetensors file ({error})") from error
    with file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_slice(name) for name in sorted(file.keys())}
        to_file_name = _layout_of(tensors, table)
        abstract = nnx.eval_shape(build)
        leaves = leaves_of(abstract.cfg, nnx.state(abstract), table)
        unused = {
            _tensor_name(to_file_name(_module(tensor)), matrix)
            for leaf in leaves
            if leaf.path.startswith(table.unused)
            for tensor in leaf.tensors
            for matrix in _MATRICES.values()
        }
        tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
        leaves = [leaf for leaf in leaves if not leaf.path.startswith(table.unused)]
        lora = _lora_config(directory / _CONFIG, config, leaves, to_file_name, table)
        rows = _token_rows(config, leaves, to_file_name)
        leaves = _adapted(leaves, table.projections_of(lora.targets))
        _check(path, tensors, leaves, rows, lora.rank, to_file_name)
        arrays = {}
        for name, (leaf, ids) in rows.items():
            in_order = np.argsort(ids)
            arrays[_rows_path(leaf)] = tensors[name][...].astype(np.float32)[in_order]
        for leaf in leaves:
            modules = [to_file_name(_module(tensor)) for tensor in leaf.tensors]
            for name, peft_name in _MATRICES.items():
                stored = [tensors[_tensor_name(module, peft_name)] for module in modules]
                matrices = [tensor[...].astype(np.float32).T for tensor in stored]
                array = np.stack(matrices) if leaf.stacked else matrices[0]
                arrays[_sibling(leaf, name)] = np.ascontiguousarray(array)
    base_model = config.get("base_model_name_or_path")
    base_model = base_model if isinstance(base_model, str) else ""
    return Adapter(lora, arrays, base_model, metadata.get(_BASE_HASH, ""))


def _lora_config(
    path: Path,
    config: Mapping[str, Any],
    leaves: list[Leaf],
    to_file_name: Callable[[str], str],
    table: WeightTable,
) -> LoraConfig:
    """The LoraConfig of an adapter_config.json. Missing fields have peft's defaults."""
    problems = [
        f"{name}={value!r} is not supported{_ADVICE.get(name, '')}"
        for name, value in sorted(config.items())
        if name not in _READ | _INERT
        and not (value is None or value is False or value in ([], {}, ""))
    ]
    token_ids = _token_ids(config, leaves, problems)
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type={config.get('peft_type')!r}, expected 'LORA'")
    if config.get("bias", "none") != "none":
        problems.append(f"bias={config['bias']!r}, expected 'none'")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        problems.append(
            f"init_lora_weights={config['init_lora_weights']!r} changes the base weights too; "
            "convert the adapter to plain LoRA with peft"
        )
    rank, alpha, dropout = (
        config.get(name, default)
        for name, default in (("r", 8), ("lora_alpha", 8), ("lora_dropout", 0.0))
    )
    if type(rank) is not int:
        problems.append(f"r={rank!r}, expected an integer")
    for name, value in (("lora_alpha", alpha), ("lora_dropout", dropout)):
        if not is_finite_number(value):
            problems.append(f"{name}={value!r}, expected a number")
    rslora = config.get("use_rslora", False)
    if type(rslora) is not bool:
        problems.append(f"use_rslora={rslora!r}, expected true or false")
    projections = _projections(config, leaves, to_file_name, table.projections, problems)
    if not problems:
        try:
            return LoraConfig(
                rank=rank,
                alpha=float(alpha),
                targets=table.targets_of(projections),
                dropout=float(dropout),
                rslora=rslora,
                trainable_token_ids=tuple(sorted(next(iter(token_ids.values()), ()))),
            )
        except ConfigError as error:
            problems.append(str(error))
    raise ModelError(f"{path}: cannot be loaded: {listed(problems)}")


def _projections(
    config: Mapping[str, Any],
    leaves: list[Leaf],
    to_file_name: Callable[[str], str],
    known: Collection[str],
    problems: list[str],
) -> set[str]:
    """The projections that target_modules selects; appends to problems what it selects besides."""
    wanted: Any = config.get("target_modules")
    unwanted: Any = config.get("exclude_modules")
    try:
        matched = {
            leaf: [
                module
                for module in (to_file_name(_module(tensor)) for tensor in leaf.tensors)
                if _matches(wanted, module) and not (unwanted and _matches(unwanted, module))
            ]
            for leaf in leaves
            if not leaf.path.endswith("/bias")
        }
    except (re.error, TypeError) as error:
        problems.append(
            f"target_modules={wanted!r}, exclude_modules={unwanted!r}: expected a list of names or "
            f"a regular expression ({error})"
        )
        return set()
    projections = set()
    for leaf, modules in matched.items():
        if modules and _projection(leaf) not in known:
            problems.append(f"target_modules={wanted!r}: {modules[0]} cannot carry an adapter here")
        elif modules and len(modules) < len(leaf.tensors):
            problems.append(
                f"target_modules={wanted!r}: {modules[0]} but not every {_projection(leaf)}; "
                "a projection has adapters in all layers or in none"
            )
        elif modules:
            projections.add(_projection(leaf))
    if not any(matched.values()):
        problems.append(f"target_modules={wanted!r} matches no layer of the model")
    return projections


def _matches(target: list[str] | str, module: str) -> bool:
    """As in peft's check_target_module_exists."""
    if isinstance(target, str):
        return re.fullmatch(target, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in target)


def _check(
    path: Path,
    tensors: Mapping[str, Any],
    leaves: list[Leaf],
    rows: Mapping[str, tuple[Leaf, list[int]]],
    rank: int,
    to_file_name: Callable[[str], str],
) -> None:
    expected = {name: [len(ids), leaf.tensor_shape[1]] for name, (leaf, ids) in rows.items()}
    for leaf in leaves:
        for tensor in leaf.tensors:
            out_features, in_features = leaf.tensor_shape
            module = to_file_name(_module(tensor))
            expected[_tensor_name(module, "lora_A")] = [rank, in_features]
            expected[_tensor_name(module, "lora_B")] = [out_features, rank]
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        shape, dtype = list(tensors[name].get_shape()), tensors[name].get_dtype()
        if shape != expected[name]:
            problems.append(f"{name} is {shape}, expected {expected[name]}")
        if dtype not in DTYPE_NAMES.values():
            problems.append(f"{name} has dtype {dtype}")
    if problems:
        whole = any(name.endswith(_WHOLE_MODULES) for name in tensors.keys() - expected.keys())
        advice = _ADVICE["modules_to_save"] if whole else ""
        raise ModelError(f"{path}: adapters do not fit the model: {listed(problems)}{advice}")


def _layout_of(tensor_names: Iterable[str], table: WeightTable) -> Callable[[str], str]:
    """A function from a published module name to that of the file, in any layout.

    Regular expressions in target_modules match the file's names. A module without adapters has the
    name of one of the two main layouts.
    """
    modules = [_OF_ADAPTER.split(name.removeprefix(_PREFIX))[0] for name in tensor_names]
    of_file = {table.published_name(module): module for module in modules}
    is_current = any(
        published not in (None, module) and table.current_name(published) == module
        for published, module in of_file.items()
    )

    def to_file_name(published: str) -> str:
        other = table.current_name(published) if is_current else published
        return of_file.get(published, other)

    return to_file_name


def _adapted(leaves: list[Leaf], projections: Collection[str]) -> list[Leaf]:
    """The kernels with adapters."""
    return [
        leaf
        for leaf in leaves
        if leaf.path.endswith("/kernel") and _projection(leaf) in projections
    ]


def _projection(leaf: Leaf) -> str:
    return leaf.path.split("/")[-2]


def _sibling(leaf: Leaf, name: str) -> str:
    """Path of another leaf of the same linear layer."""
    return f"{leaf.path.rpartition('/')[0]}/{name}"


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _token_leaves(leaves: list[Leaf]) -> dict[str, Leaf]:
    """PEFT's name -> the leaf of the embeddings, and of the head unless it is tied to them."""
    return {
        _module(leaf.tensors[0]).rpartition(".")[2]: leaf
        for leaf in leaves
        if rows_path(leaf.path) is not None
    }


def _token_ids(
    config: Mapping[str, Any], leaves: list[Leaf], problems: list[str]
) -> dict[str, list[int]]:
    """PEFT's name of embeddings and head -> the tokens whose rows are trained, in the file's order.

    Appends to problems what is not computed: other modules, different tokens for the two. A tied
    head may be listed beside the embeddings, whose rows it reads.
    """
    given: Any = config.get("trainable_token_indices")
    if not given:
        return {}
    token_leaves = _token_leaves(leaves)
    embedding = next(iter(token_leaves), "")
    vocab_size = next((leaf.shape[0] for leaf in token_leaves.values()), 0)
    by_module = given if isinstance(given, dict) else {embedding: given}
    names, found = {module.rpartition(".")[2] for module in by_module}, {}
    for module, ids in by_module.items():
        name = module.rpartition(".")[2]
        if name not in token_leaves and not (name == _HEAD and embedding in names):
            problems.append(
                f"trainable_token_indices of {module!r}, expected those of "
                f"{' and '.join(token_leaves)}"
            )
        elif not isinstance(ids, list) or not all(type(i) is int for i in ids):
            problems.append(f"trainable_token_indices={given!r}, expected numbers of tokens")
        elif len(set(ids)) < len(ids) or not all(0 <= i < vocab_size for i in ids):
            problems.append(
                f"trainable_token_indices of {module!r}: expected different numbers below "
                f"{vocab_size}"
            )
        else:
            found[name] = ids
    if len({tuple(sorted(ids)) for ids in found.values()}) > 1:
        problems.append(
            f"trainable_token_indices of different tokens for {' and '.join(found)}; train the "
            "same ones"
        )
    return {name: ids for name, ids in found.items() if name in token_leaves}


def _token_rows(
    config: Mapping[str, Any], leaves: list[Leaf], to_file_name: Callable[[str], str]
) -> dict[str, tuple[Leaf, list[int]]]:
    """Name of a tensor -> the leaf that its rows belong to, and their tokens."""
    by_name = _token_leaves(leaves)
    return {
        _rows_name(to_file_name(_module(by_name[name].tensors[0]))): (by_name[name], ids)
        for name, ids in _token_ids(config, leaves, []).items()
    }


def _rows_path(leaf: Leaf) -> str:
    path = rows_path(leaf.path)
    assert path is not None, leaf
    return path


def _rows_name(module: str) -> str:
    return f"{_PREFIX}{module}.token_adapter.trainable_tokens_delta"


def _tensor_name(module: str, matrix: str) -> str:
    return f"{_PREFIX}{module}.{matrix}.weight"
