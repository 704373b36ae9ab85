"""Sharding: one mesh with the axes (data, fsdp, model), and a rule for every leaf.

Rows of a batch are sharded over (data, fsdp); a weight over fsdp on its embedding side and over
model on its wide side. A family's rules name every leaf of its models; a tree with the same leaf
names (gradients, optimizer moments) gets the same shardings. The same code runs on one device.
"""

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.models.sharding_rules import Rules

MESH_AXES = ("data", "fsdp", "model")

# Meaning of an array's dimension -> the mesh axes that it is sharded over.
AXIS_RULES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "batch": ("data", "fsdp"),  # rows of tokens
        "images": ("data", "fsdp"),  # rows of patches
        "visual": ("data",),  # rows of the table of visual tokens, see visual_parts
        "embed": ("fsdp",),  # a weight's side towards the residual stream
        "wide": ("model",),  # its other side: heads or the MLP's inside
        "vocab": ("model",),
    }
)

# Field of TrainBatch -> meanings of its dimensions. `vision` has none: its rows are images.
BATCH_RULES: Mapping[str, tuple[str | None, ...]] = types.MappingProxyType(
    {
        "token_ids_bt": ("batch", None),
        "segment_ids_bt": ("batch", None),
        "prefix_segments_bt": ("batch", None),
        "positions_abt": (None, "batch", None),
        "completion_mask_bt": ("batch", None),
        "sampled_index_bs": ("batch", None),
        "vision_index_bt": ("batch", None),
        "behaviour_logprobs_bt": ("batch", None),
        **{
            name: ("batch", None)
            for name in ("turn_ids_bt", "advantages_bt", "weights_bt", "values_bt", "returns_bt")
        },
    }
)


def platform() -> str:
    """cpu, tpu or gpu: of the mesh that is compiled for, which may differ from the host's."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None:
        return jax.default_backend()
    return mesh.abstract_device.platform


def mesh_sizes(data: int, fsdp: int, model: int, devices: int) -> tuple[int, int, int]:
    """Sizes of the mesh axes; -1 for one of them: the devices that the others leave.

    Raises: ConfigError: the sizes do not multiply to the number of devices.
    """
    sizes = [data, fsdp, model]
    wanted = f"mesh of data={data}, fsdp={fsdp}, model={model}"
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"{wanted}: expected positive sizes, at most one of them -1")
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = devices // rest
    if math.prod(sizes) != devices:
        raise ConfigError(
            f"{wanted}: expected sizes that multiply to the {devices} devices, "
            f"e.g. {_nearest(sizes, devices)}"
        )
    return sizes[0], sizes[1], sizes[2]


def make_mesh(
    data: int = 1, fsdp: int = 1, model: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of data x fsdp x model devices. Sizes and errors: see mesh_sizes.

    Over several slices of TPUs the data axis is split over the slices first, so that only the
    gradient's sum crosses the network between them.

    Raises: ConfigError: several slices, and data is no multiple of their number.
    """
    devices = list(jax.devices()) if devices is None else devices
    sizes = mesh_sizes(data, fsdp, model, len(devices))
    # Auto: the compiler decides what the constraints below leave open.
    axis_types = (AxisType.Auto,) * 3
    slices = slices_of(devices)
    if slices == 1:
        return jax.make_mesh(sizes, MESH_AXES, axis_types=axis_types, devices=devices)
    return Mesh(_over_slices(sizes, devices, slices), MESH_AXES, axis_types=axis_types)


def slices_of(devices: Sequence[Any]) -> int:
    """How many slices the devices are of; JAX's CPU devices have no slice_index."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def _over_slices(sizes: tuple[int, int, int], devices: Sequence[Any], slices: int) -> np.ndarray:
    """Devices as [data, fsdp, model], those of a slice together along data."""
    data, fsdp, model = sizes
    if data % slices == 0:
        return mesh_utils.create_hybrid_device_mesh(
            (data // slices, fsdp, model),
            (slices, 1, 1),
            devices,
            # As jax.make_mesh does for v5e: without it 4x4 chips are no mesh of 2 x 8.
            allow_split_physical_axes=True,
        )
    if devices[0].platform != "tpu":
        # GPU hosts are slices of their own to JAX, and their network may carry any axis.
        return mesh_utils.create_device_mesh(sizes, devices)
    example = _nearest([0, fsdp, model], len(devices) // slices, copies=slices)
    raise ConfigError(
        f"mesh of data={data}, fsdp={fsdp}, model={model} over {slices} slices of "
        f"{len(devices) // slices} devices: expected data to be a multiple of {slices}, "
        f"e.g. {example}"
    )


def _nearest(sizes: list[int], devices: int, copies: int = 1) -> str:
    """A valid mesh of all devices, as near to the wanted fsdp and model sizes as divides them.

    Args: copies: slices of so many devices.
    """
    model = math.gcd(sizes[2], devices)
    fsdp = math.gcd(sizes[1], devices // model)
    return f"data={copies * devices // (model * fsdp)}, fsdp={fsdp}, model={model}"


def partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh_sizes: Mapping[str, int]
) -> PartitionSpec:
    """Applies AXIS_RULES to one array.

    Args:
      axes: meanings of the array's last len(axes) dimensions; those before them are not sharded.
      mesh_sizes: of the mesh's axes. A dimension that they do not divide (a batch of one row, a
        vocabulary of 1001) is not sharded either.
    Raises: ConfigError: an unknown meaning, or two dimensions that claim one mesh axis.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in AXIS_RULES]
    if unknown:
        raise ConfigError(f"no sharding rule for the axis {unknown[0]!r}, known: {[*AXIS_RULES]}")
    claimed = [name for axis in axes if axis is not None for name in AXIS_RULES[axis]]
    twice = sorted({name for name in claimed if claimed.count(name) > 1})
    if twice:
        raise ConfigError(f"sharding of {axes}: the mesh axis {twice[0]!r} is claimed twice")
    whole = len(shape) - len(axes)
    entries: list[tuple[str, ...] | None] = [None] * whole
    for size, axis in zip(shape[whole:], axes, strict=True):
        names = AXIS_RULES[axis] if axis is not None else ()
        divides = size % math.prod(mesh_sizes[name] for name in names) == 0
        entries.append(names if names and divides else None)
    return PartitionSpec(*entries)


def state_shardings(mesh: Mesh, abstract_state: Any, rules: Rules) -> Any:
    """A NamedSharding for every leaf of a tree with a model's leaf names.

    Args:
      abstract_state: pytree of arrays or jax.ShapeDtypeStruct: nnx.State, optimizer state, or both.
        Scalars (counters) are replicated.
      rules: of the model's family (`WeightTable.sharding_rules`).
    Raises: ModelError that lists every leaf without a rule.
    """
    unknown: list[str] = []

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if not leaf.shape:
            return NamedSharding(mesh, PartitionSpec())
        names = leaf_names(path)
        axes = rules.get("/".join(names[-2:]), rules.get(names[-1] if names else ""))
        if axes is None:
            unknown.append("/".join(names))
            axes = ()
        if len(axes) > len(leaf.shape):  # Adafactor's moments by row and column: small, replicated
            axes = ()
        return NamedSharding(mesh, partition_spec(axes, leaf.shape, dict(mesh.shape)))

    shardings = jax.tree.map_with_path(rule, abstract_state)
    if unknown:
        raise ModelError(
            f"no sharding rule for {', '.join(sorted(unknown))}: add it to the family's "
            "sharding_rules"
        )
    return shardings


def leaf_names(path: tuple[Any, ...]) -> list[str]:
    """A JAX key path as names: the dictionary keys and attributes on the way to a leaf."""
    names = []
    for key in path:
        if isinstance(key, jax.tree_util.DictKey):
            names.append(str(key.key))
        elif isinstance(key, jax.tree_util.GetAttrKey) and key.name != "value":
            names.append(key.name)
    return names


def batch_shardings(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings of a TrainBatch's arrays: rows over (data, fsdp), if the mesh divides them.

    Args:
      batch: arrays by field; `vision` is a mapping of arrays.
    """
    sizes = dict(mesh.shape)

    def sharding(axes: tuple[str | None, ...], array: Any) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(axes, array.shape, sizes))

    return {
        name: (
            {key: sharding(_image_axes(array), array) for key, array in value.items()}
            if name == "vision"
            else sharding(BATCH_RULES[name], value)
        )
        for name, value in batch.items()
    }


def _image_axes(array: Any) -> tuple[str | None, ...]:
    return ("images", *[None] * (array.ndim - 1))


def batch_parts(mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """The equal parts that the mesh cuts a batch's rows into, and each of those again."""
    return mesh.shape["data"], mesh.shape["fsdp"]


def visual_parts(rows: int, visual_rows: int) -> int:
    """Equal parts of whole rows of text that read only their own part of the visual tokens.

    The plan of a batch (shards.plan) sees to it, so that no visual token leaves its part of the
    data axis: between slices, 4 MB for each screenshot of 1280x800.

    Args:
      rows, visual_rows: of the batch, and of its table of visual tokens.
    Returns: the data axis of the mesh (`jax.set_mesh`) if it divides both, else 1.
    """
    mesh = jax.sharding.get_abstract_mesh()
    data = 1 if mesh.empty else mesh.shape["data"]
    return 1 if rows % data or visual_rows % data else data


def rows_here(mesh: Mesh, rows: int) -> set[int]:
    """The rows of a batch, or of its images, that this process's devices hold."""
    spec = partition_spec(("batch",), (rows,), dict(mesh.shape))
    indices = NamedSharding(mesh, spec).addressable_devices_indices_map((rows,)).values()
    return {row for index in indices if index for row in range(*index[0].indices(rows))}


def place(array: np.ndarray, placed: jax.sharding.Sharding | None) -> jax.Array:
    """An array on its devices; with several processes each reads the part of its own.

    Without a sharding it goes to the first device.

    `jax.device_put` would compare the whole array between processes, over the network.
    """
    if placed is None or placed.is_fully_addressable:
        return jax.device_put(array, placed)
    return jax.make_array_from_callback(array.shape, placed, lambda index: array[index])


def held_here(tree: Any, mesh: Mesh) -> Any:
    """Arrays of the mesh of all processes as arrays of this process's devices, without a copy.

    This process can then compute with them alone.

    Raises: ConfigError: fsdp or model spans processes, so that its devices hold parts of arrays.
    """
    local = mesh.local_mesh
    for axis in ("fsdp", "model"):
        if local.shape[axis] != mesh.shape[axis]:
            raise ConfigError(
                f"mesh.{axis}={mesh.shape[axis]} spans several hosts, of which each has "
                f"{local.shape[axis]}: sampling on every host needs the whole model there; set "
                "mesh.fsdp and mesh.model to what one host's devices hold, or use --role=learner "
                "with actors on hosts of their own"
            )

    def held(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        parts = [shard.data for shard in x.addressable_shards]
        sharding = NamedSharding(local, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(held, tree)


def to_host(tree: Any) -> Any:
    """numpy copies of whole arrays, also of those whose parts other processes hold.

    All processes of the mesh must call it at the same point: it gathers, one array at a time.
    """

    def fetch(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return x

    return jax.device_get(jax.tree.map(fetch, tree))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation's sharding inside jit; no-op without a mesh (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, dict(mesh.shape)))


def on_a_device(shape: tuple[int, ...], *axes: str | None) -> int:
    """Elements of an array per device of the mesh (`jax.set_mesh`); all of them without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return math.prod(shape)
    spec = partition_spec(axes, shape, dict(mesh.shape))
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape))
