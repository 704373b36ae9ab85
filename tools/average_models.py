"""Averages the weights of models that went on from one another, tensor by tensor.

    python -m tools.average_models --out=soup runs/last/model runs/again/model runs/aim/model

Models of one base that learnt different things often lie so close that their mean solves more than
each of them: "Model soups" (arXiv:2203.05482), all of equal weight. Whether it does is for an
evaluation to say: `--role=eval --config.model.path=soup`. All must have the same tensors,
tokenizer, processor and prompts. Sums are float32; a mean is written in the dtype that the first
model has, into files that are cut as its files are. --out is made, whole or not at all.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy's bfloat16, in which weights are stored)
import numpy as np
import safetensors

from tools import command_line
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.models import hub, weight_files
from uirl_jax.models.directory import CHAT_FILE, read_json
from uirl_jax.store.files import new_directory, sync_files

# What must be equal; the others of hub.DESCRIPTION_FILES follow from these, or say less.
_SAME = ("config.json", "tokenizer.json", "preprocessor_config.json", CHAT_FILE)
_WRITERS = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")  # not the model


def average_models(model_dirs: Sequence[Path], out: Path) -> int:
    """Writes the mean of the models, in Hugging Face's format.

    Args:
      out: is made.
    Returns: how many tensors it has.
    Raises: ModelError: a directory that is no model, or models that differ in more than weights.
    """
    first = model_dirs[0]
    stored = [_tensors(model_dir) for model_dir in model_dirs]
    for model_dir, tensors in zip(model_dirs[1:], stored[1:], strict=True):
        _check_same(first, stored[0], model_dir, tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(out) as directory, contextlib.ExitStack() as stack:
        files = {
            tensor.path: stack.enter_context(safetensors.safe_open(tensor.path, "numpy"))
            for tensors in stored
            for tensor in tensors.values()
        }
        for path in weight_files.paths_in(first):
            _write_means(path, directory / path.name, stored, files)
        for name in hub.DESCRIPTION_FILES:
            if (first / name).is_file():
                shutil.copyfile(first / name, directory / name)
        sync_files(directory)
    return len(stored[0])


def _tensors(model_dir: Path) -> dict[str, weight_files.StoredTensor]:
    """By name. Raises: ModelError: no model, or weights that have no mean, such as int8."""
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir}: is no directory; expected a model in Hugging Face's format")
    tensors = {
        tensor.name: tensor
        for path in weight_files.paths_in(model_dir)
        for tensor in weight_files.tensors_in(path)
    }
    for tensor in tensors.values():
        if tensor.dtype_name not in weight_files.DTYPE_NAMES.values():
            raise ModelError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype_name}; a mean is taken of "
                f"{', '.join(weight_files.DTYPE_NAMES)}"
            )
    return tensors


def _check_same(
    first: Path,
    expected: Mapping[str, weight_files.StoredTensor],
    other: Path,
    tensors: Mapping[str, weight_files.StoredTensor],
) -> None:
    """Raises: ModelError: the models differ in more than the values of their weights."""
    problems = [
        f"{name} has shape {tensors[name].shape if name in tensors else 'none'} where the first "
        f"has {expected[name].shape if name in expected else 'none'}"
        for name in sorted({*expected, *tensors})
        if name not in tensors
        or name not in expected
        or tensors[name].shape != expected[name].shape
    ]
    problems += [
        f"another {name}" for name in _SAME if _content(first / name) != _content(other / name)
    ]
    if problems:
        raise ModelError(
            f"{other}: differs from {first} in more than its weights: "
            f"{weight_files.listed(problems)}"
        )


def _content(path: Path) -> dict[str, Any] | None:
    """Of a JSON file, without what says how it was written; None: no such file."""
    if not path.exists():
        return None
    return {key: value for key, value in read_json(path).items() if key not in _WRITERS}


def _write_means(
    source: Path,
    target: Path,
    stored: Sequence[Mapping[str, weight_files.StoredTensor]],
    files: Mapping[Path, Any],
) -> None:
    """A file with the tensors of `source`, each of them the mean over the models."""
    names = sorted(tensor.name for tensor in stored[0].values() if tensor.path == source)
    dtypes = {name: files[source].get_tensor(name).dtype for name in names}
    written = [weight_files.Tensor(name, stored[0][name].shape, dtypes[name]) for name in names]
    with target.open("wb") as file:
        # The safetensors library's writer needs all tensors in memory.
        file.write(weight_files.header(written))
        for name in names:
            total = np.zeros(stored[0][name].shape, np.float32)
            for tensors in stored:
                total += files[tensors[name].path].get_tensor(name).astype(np.float32)
            file.write((total / len(stored)).astype(dtypes[name]).tobytes())
    shutil.copymode(source, target)


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.average_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("models", type=Path, nargs="+", help="model directories, two or more")
    parser.add_argument("--out", type=Path, required=True, help="a directory that is made")
    args = parser.parse_args(argv)
    if len(args.models) < 2:
        raise ConfigError(f"{args.models[0]}: one model has no mean with others; give two or more")
    if args.out.exists():
        raise ConfigError(f"--out={args.out}: is there already; give a new directory")
    command_line.check_folder("--out", args.out)
    count = average_models(args.models, args.out)
    print(f"{args.out}: {count} tensors, the mean of {len(args.models)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
