"""Base weights between Hugging Face's format and an Orbax checkpoint.

    python -m tools.convert to-orbax models/Qwen2-VL-2B-Instruct --out=checkpoint
    python -m tools.convert to-orbax models/Qwen2-VL-7B-Instruct --out=checkpoint --mesh=1,8,1
    python -m tools.convert to-hf checkpoint --out=model

The checkpoint is for programs on JAX: it has the leaves of this package's model (blocks stacked,
kernels transposed), each in the dtype of its files, with checksums, and is restored onto any mesh.
model.path does not take it: records and policies name their base by a hash of the original files.
`to-hf` gives the tensors back bit for bit, with the same config.json and tokenizer. --mesh is
data,fsdp,model, to load or restore onto; else the first device. --out is made, whole or not at all.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tools import command_line
from uirl_jax import platform_flags
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import CheckpointError, ConfigError, ModelError
from uirl_jax.families.border import Family
from uirl_jax.families.table import add_own, family_of
from uirl_jax.models import hub, sharding, weight_files, weights
from uirl_jax.models.directory import copy_tokenizer, read_json
from uirl_jax.models.sharding import leaf_names
from uirl_jax.models.weight_files import listed
from uirl_jax.store.files import new_directory
from uirl_jax.untrusted.json import printable

MARKER = "uirl_weights.json"  # of a directory that `to_orbax` wrote
WEIGHTS = "weights"  # the Orbax checkpoint beside it, of step 0
FORMAT = 1
_STEP = 0


@dataclasses.dataclass(frozen=True)
class Base:
    """A model without adapters, and what it is."""

    family: Family
    cfg: Any  # of Family.read_config
    model: Any  # border.Model


# ------------------------------------------------------------------------------------ to and from


def to_orbax(model_dir: str | Path, out: Path, mesh: jax.sharding.Mesh | None = None) -> int:
    """Writes the checkpoint of a model directory; returns the number of leaves.

    Tensors go from the files to the mesh one at a time, and from there to Orbax.

    Raises: UirlError: not a model directory, weights that do not fit, or no room.
    """
    path = hub.model_directory(model_dir, weights=False)  # what is refused costs no download
    family = family_of(path)
    cfg = family.read_config(path)
    path = hub.model_directory(model_dir)
    dtypes = _stored_dtypes(family, cfg, path)
    model = weights.load_pretrained(
        path,
        _builder(family, cfg, dtypes),
        family.weights,
        init_key=jax.random.key(0),  # of adapters; there are none
        mesh=mesh,
    )
    arrays = _named(nnx.state(model))
    marker = {
        "format": FORMAT,
        "model_type": family.model_type,
        "base_hash": weights.base_hash(path),
        "dtypes": {name: np.dtype(array.dtype).name for name, array in arrays.items()},
    }
    with new_directory(out) as directory:
        with Checkpointer(directory / WEIGHTS, keep=1) as checkpointer:
            checkpointer.save(_STEP, arrays, {"model_type": family.model_type})
        shutil.copyfile(path / "config.json", directory / "config.json")
        copy_tokenizer(path, directory)
        text = json.dumps(marker, indent=1, sort_keys=True) + "\n"
        (directory / MARKER).write_text(text, encoding="utf-8")
    return len(arrays)


def load(checkpoint: str | Path, mesh: jax.sharding.Mesh | None = None) -> Base:
    """The model of a checkpoint, each leaf straight onto its devices.

    Args: mesh: shards the arrays as a run's (`sharding.state_shardings`); None: the first device.
    Raises: ModelError: not a directory of `to_orbax`, or leaves that do not fit its config.json.
      CheckpointError: damaged arrays.
    """
    path = Path(checkpoint)
    model_type, dtypes = _read_marker(path)
    family = family_of(path)
    if family.model_type != model_type:
        raise ModelError(
            f"{path}: weights of {printable(repr(model_type), 40)}, config.json is of "
            f"{family.model_type!r}; one of the files is another model's"
        )
    cfg = family.read_config(path)
    abstract = nnx.eval_shape(_builder(family, cfg, {}))
    graphdef, state = nnx.split(abstract)
    _check_leaves(path, set(_named(state)), set(dtypes))
    placed = _placed(state, dtypes, family, mesh)
    if not (path / WEIGHTS / str(_STEP)).is_dir():
        raise ModelError(f"{path / WEIGHTS}: no Orbax checkpoint of step {_STEP}; convert again")
    with Checkpointer(path / WEIGHTS, read_only=True) as checkpointer:
        restored = checkpointer.restore(placed, _STEP).arrays
    leaves = jax.tree.map_with_path(lambda where, _: restored["/".join(leaf_names(where))], state)
    return Base(family, cfg, nnx.merge(graphdef, leaves))


def to_hf(checkpoint: Path, out: Path, mesh: jax.sharding.Mesh | None = None) -> int:
    """Writes the model directory of a checkpoint; returns the number of leaves.

    Raises: as `load`.
    """
    base = load(checkpoint, mesh)
    config = base.family.to_config_json(base.cfg)
    with new_directory(out) as directory:
        weights.save_pretrained(base.model, directory, base.family.weights, config)
        shutil.copyfile(checkpoint / "config.json", directory / "config.json")  # the original
        copy_tokenizer(checkpoint, directory)
    return len(_named(nnx.state(base.model)))


# ---------------------------------------------------------------------------------------- leaves


def _named(state: Any) -> dict[str, Any]:
    """Leaves by path: "text/blocks/q_proj/kernel"."""
    return {"/".join(leaf_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _builder(family: Family, cfg: Any, dtypes: dict[str, np.dtype]) -> Callable[[], Any]:
    """Makes the model without adapters, each leaf in its dtype; only its shapes are computed."""

    def build() -> Any:
        model = family.make_model(cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
        state = jax.tree.map_with_path(
            lambda path, leaf: leaf.astype(dtypes.get("/".join(leaf_names(path)), leaf.dtype)),
            nnx.state(model),
        )
        nnx.update(model, state)
        return model

    return build


def _stored_dtypes(family: Family, cfg: Any, path: Path) -> dict[str, np.dtype]:
    abstract = nnx.eval_shape(_builder(family, cfg, {}))
    leaves = weights.leaves_of(cfg, nnx.state(abstract), family.weights)
    return weights.stored_dtypes(path, leaves, family.weights)


def _placed(
    state: Any, dtypes: dict[str, np.dtype], family: Family, mesh: jax.sharding.Mesh | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """What is asked of Orbax: every leaf with its dtype and its place."""
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: single, state)
    if mesh is not None:
        places = sharding.state_shardings(mesh, state, family.weights.sharding_rules)
    shardings = _named(places)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes[name], sharding=shardings[name])
        for name, leaf in _named(state).items()
    }


def _read_marker(path: Path) -> tuple[Any, dict[str, np.dtype]]:
    """The model's type and the dtypes of its leaves. Raises: ModelError."""
    file = path / MARKER
    expected = "a directory that `tools.convert to-orbax` wrote"
    if not file.is_file():
        raise ModelError(f"{path}: has no {MARKER}; expected {expected}")
    content = read_json(file, expected)
    if content.get("format") != FORMAT:
        shown = printable(repr(content.get("format")), 40)
        raise ModelError(f"{file}: format {shown}, this version reads {FORMAT}; convert again")
    dtypes = content.get("dtypes")
    known = {name: np.dtype(jnp.dtype(name)) for name in weight_files.DTYPE_NAMES}
    if not isinstance(dtypes, dict) or not all(
        isinstance(name, str) and name in known for name in dtypes.values()
    ):
        raise ModelError(f"{file}: dtypes must name one of {', '.join(known)} for every leaf")
    return content.get("model_type"), {name: known[dtype] for name, dtype in dtypes.items()}


def _check_leaves(path: Path, wanted: set[str], found: set[str]) -> None:
    problems = [f"missing {name}" for name in sorted(wanted - found)]
    problems += [f"unexpected {printable(name)}" for name in sorted(found - wanted)]
    if problems:
        raise ModelError(f"{path}: leaves do not fit config.json: {listed(problems)}")


# ------------------------------------------------------------------------------------ the command


def read_mesh(text: str) -> jax.sharding.Mesh | None:
    """The mesh of "data,fsdp,model"; None for an empty text. Raises: ConfigError."""
    if not text:
        return None
    try:
        data, fsdp, model = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--mesh={printable(text)}: expected data,fsdp,model, such as 1,8,1"
        ) from None
    return sharding.make_mesh(data, fsdp, model)


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-orbax", help="a model directory, or a name on the hub")
    there.add_argument("model", help="as model.path")
    back = commands.add_parser("to-hf", help="what to-orbax wrote")
    back.add_argument("checkpoint", type=Path)
    for command in (there, back):
        command.add_argument("--out", type=Path, required=True, help="a directory that is made")
        command.add_argument("--mesh", default="", help="data,fsdp,model; else one device")
        command.add_argument("--family", default="", help="module:FAMILY of a family of your own")
        command.add_argument("--json", type=Path, help="a file for what was written")
    args = parser.parse_args(argv)
    platform_flags.set_defaults()
    try:
        if args.out.exists():
            raise ConfigError(f"--out={args.out}: is there already; give a new directory")
        command_line.check_folder("--out", args.out)
        command_line.check_file("--json", args.json)
        mesh = read_mesh(args.mesh)
        add_own(args.family)
        if args.command == "to-orbax":
            count = to_orbax(args.model, args.out, mesh)
        else:
            count = to_hf(args.checkpoint, args.out, mesh)
        size_bytes = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
        if args.json is not None:
            content = {"out": str(args.out), "leaves": count, "size_bytes": size_bytes}
            command_line.write_json(args.json, content)
    except CheckpointError as error:
        raise type(error)(f"{error}; convert the model directory again") from error
    print(f"{args.out}: {count} leaves, {size_bytes / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
