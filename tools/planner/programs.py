"""The run's own programs, compiled for a machine that is not there, without a weight of the model.

What the learner jits (`make_steps`: score, gradients) and what the engine jits (`make_programs`:
vision tower, prefill and decode steps) are lowered with abstract arrays, placed as the run places
them, and compiled by the TPU's compiler on this host. config.json is all that is read of a model
directory; `families` lists the families that are planned.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from tools.planner.families import PlannedModel, read_model, vision_sizes
from uirl_jax import assets
from uirl_jax.config.schema import ModelConfig, RunConfig
from uirl_jax.engine import programs as engine_programs
from uirl_jax.engine.weights import prepare
from uirl_jax.errors import ConfigError, ModelError, one_line
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel, held_dtype
from uirl_jax.families.table import FAMILIES
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.models import hub, sharding
from uirl_jax.models.lora import LoRAParam
from uirl_jax.models.quantization import quantized
from uirl_jax.shards.batching import BatchConfig
from uirl_jax.types import TrainBatch

TRAINING = ("score", "gradients")
SAMPLING = ("encode", "prefill", "decode")
# What libtpu says where a program is too large, as its parts notice it.
_OUT_OF_MEMORY = re.compile(
    r"(Used |HLO temporaries \()(?P<size>[\d.]+)(?P<unit>[KMG])"
    r"( of [\d.]+[KMG] hbm|\) exceeds available HBM \([\d.]+[KMG]\))"
)
_BATCH_FLOATS = {"behaviour_logprobs_bt", "advantages_bt", "weights_bt"}


@dataclasses.dataclass(frozen=True)
class Run:
    """All that the programs are given, as shapes, dtypes and shardings."""

    cfg: RunConfig
    model: PolicyModel  # of no directory and no weights
    mesh: Mesh | AbstractMesh
    optimizer: optax.GradientTransformation
    state: learner_state.TrainState
    batch: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, per chip. Memory is 0 where it did not fit.

    text is empty where it did not fit, or where this jaxlib cannot read what libtpu has written.
    """

    name: str
    seconds: float
    text: str
    argument_bytes: int = 0
    new_bytes: int = 0  # results that take no argument's place, temporaries and code
    out_of_memory: str = ""  # the compiler's reason
    wanted_bytes: float = 0.0  # what it would have taken at least


def find_model(path: str) -> PlannedModel:
    """Dimensions of a model; of a published one also where the directory is missing.

    Raises: ModelError.
    """
    published = assets.PUBLISHED / Path(path).name
    if hub.is_hub_name(path) and not published.is_dir():
        path = str(hub.model_directory(path, weights=False))
    for directory in (assets.find(path), published):
        if (directory / "config.json").is_file():
            return read_model(directory)
    names = ", ".join(sorted(p.name for p in assets.PUBLISHED.iterdir()))
    raise ModelError(
        f"{path}: has no config.json, and its name is none of the published models that can be "
        f"planned without it: {names}; give --config.model.path"
    )


def abstract_run(
    cfg: RunConfig,
    planned: PlannedModel,
    chips: int,
    devices: tuple[jax.Device, ...] | None,
) -> Run:
    """Raises: ConfigError where mesh and rows do not divide."""
    sizes = sharding.mesh_sizes(cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.model, chips)
    if devices is None:
        mesh = AbstractMesh(sizes, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    else:
        mesh = sharding.make_mesh(*sizes, devices=list(devices))
    rows, across = cfg.learner.batch.rows, sizes[0] * sizes[1]
    if rows % across:
        raise ConfigError(
            f"learner.batch.rows={rows} over data x fsdp={across} chips: expected a multiple of "
            f"{across} rows"
        )
    if cfg.model.train == "all":
        raise ConfigError("model.train='all': plans are made for adapters; set model.train='lora'")
    learner = cfg.learner
    graphdef, frozen, optimizer, state = _abstract_leaves(
        planned.family.model_type, planned.cfg, cfg.model, learner.optimizer, learner.steps
    )
    rules = planned.family.weights.sharding_rules
    state = _placed(state, sharding.state_shardings(mesh, state, rules))
    model = PolicyModel(
        path=Path(),
        family=planned.family,
        graphdef=graphdef,
        trainable=state.trainable,
        frozen=_placed(frozen, sharding.state_shardings(mesh, frozen, rules)),
        cfg=planned.cfg,
        inputs=planned.family.make_inputs(planned.cfg),
        base_hash="",
    )
    return Run(
        cfg=cfg,
        model=model,
        mesh=mesh,
        optimizer=optimizer,
        state=state,
        batch=abstract_batch(cfg.learner.batch, model.inputs, mesh),
    )


@functools.cache  # a search asks for the same a hundred times, and it takes a second
def _abstract_leaves(
    model_type: str,
    model_cfg: Any,
    cfg: ModelConfig,
    optimizer_cfg: learner_state.OptimizerConfig,
    steps: int,
) -> tuple[nnx.GraphDef, nnx.State, optax.GradientTransformation, learner_state.TrainState]:
    family = FAMILIES[model_type]
    model = nnx.eval_shape(
        lambda: family.make_model(
            model_cfg,
            lora=cfg.lora,
            rngs=nnx.Rngs(0),
            param_dtype=held_dtype(cfg.param_dtype),
            remat=cfg.remat,
        )
    )
    if cfg.quantize == "int8":
        model = quantized(model, family.weights.projections)
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    optimizer = learner_state.make_optimizer(optimizer_cfg.resolved("adapters"), steps)
    state = jax.eval_shape(lambda tree: learner_state.init_state(tree, optimizer), lora)
    return graphdef, frozen, optimizer, state


def abstract_batch(cfg: BatchConfig, inputs: Inputs, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The largest TrainBatch of the config's sizes; shapes by the letters of the fields' names.

    A row that samples more than the last of sampled_lengths gets S = T all the same, which is not
    planned: a config lists sizes so that this is the exception.
    """
    sizes = {
        "a": inputs.position_axes,
        "b": cfg.rows,
        "t": cfg.row_lengths[-1],
        "s": (cfg.sampled_lengths or cfg.row_lengths)[-1],
    }
    batch: dict[str, Any] = {
        "vision": abstract_images(inputs, cfg.image_rows[-1], cfg.patch_lengths[-1])
    }
    # Planned without a critic.
    left_out = {*batch, *learner_step.HOST_FIELDS, "values_bt", "returns_bt"}
    if not cfg.share_prompts:
        left_out.add("prefix_segments_bt")
    for name in {field.name for field in dataclasses.fields(TrainBatch)} - left_out:
        letters = name.rpartition("_")[2]
        dtype = jnp.float32 if name in _BATCH_FLOATS else jnp.int32
        batch[name] = jax.ShapeDtypeStruct([sizes[letter] for letter in letters], dtype)
    return _placed(batch, sharding.batch_shardings(mesh, batch))


def abstract_images(inputs: Inputs, rows: int, row_patches: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What the vision tower is given in so many rows."""
    one_row = inputs.pack_screens((), 1, row_patches).arrays
    return {
        name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        for name, array in one_row.items()
    }


def compile_programs(run: Run, names: Iterable[str], say: Callable[[str], None]) -> list[Compiled]:
    """Compiles the named programs, one after the other; minutes each.

    Raises: ConfigError where the compiler refuses for another reason than a lack of memory.
    """
    return [_compile(name, traced.lower(), say) for name, traced in trace_programs(run, names)]


def trace_programs(run: Run, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The named programs, to be lowered for the platform of the run's mesh."""
    steps = learner_step.make_steps(
        run.model.graphdef,
        run.optimizer,
        learner_step.StepConfig(
            run.cfg.algorithm.loss,
            vision_trainable=run.model.trains_vision,
            use_reference=run.cfg.algorithm.use_reference,
            temperature=run.cfg.actor.rollout.temperature,
            forbidden_ids=_vocabulary(run.model.cfg).forbidden_ids,
        ),
        jax.tree.map(lambda leaf: leaf.sharding, run.state),
    )
    score_args = ((run.state.trainable, None), run.model.frozen, run.batch)
    for name in names:
        with _mesh_of(run):
            if name == "score":
                traced = steps.score.trace(*score_args)
            elif name == "gradients":
                scored = _scored(run, jax.eval_shape(steps.score, *score_args))
                at = (jax.ShapeDtypeStruct((), jnp.int32),) * 3
                traced = steps.policy_gradients.trace(*score_args, scored, at)
            else:
                traced = _trace_sampling(run, name)
            yield name, traced


def _mesh_of(run: Run) -> Any:
    """A context: an abstract mesh has no devices that arrays could be made on."""
    if isinstance(run.mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(run.mesh)
    return jax.set_mesh(run.mesh)


def _scored(run: Run, scored: Any) -> Any:
    """What `score` hands to the gradients: the table of visual tokens over data, [B,T] in rows."""
    sizes = dict(run.mesh.shape)

    def place(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_rows = array.shape[0] == run.cfg.learner.batch.rows
        axes = ("batch" if is_rows else "visual", None)
        spec = sharding.partition_spec(axes, array.shape, sizes)
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(run.mesh, spec)
        )

    return jax.tree.map(place, scored)


def _trace_sampling(run: Run, name: str) -> Any:
    """A program of the engine at its largest sizes."""
    cfg, model = run.cfg.engine, run.model
    sizes = dict(run.mesh.shape)

    def placed(array: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        spec = sharding.partition_spec(axes, array.shape, sizes)
        at = NamedSharding(run.mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=at)

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    cache = jax.eval_shape(
        lambda: model.family.init_cache(
            model.cfg, cfg.num_slots, cfg.slot_positions, jnp.dtype(cfg.cache_dtype)
        )
    )
    cache = jax.tree.map(lambda array: placed(array, engine_programs.CACHE_AXES), cache)
    dtype = model.frozen["text"]["embedding"].dtype
    vision = vision_sizes(PlannedModel(model.family, model.cfg))
    width = vision.mergers * vision.out_width
    table_md = placed(of(dtype, cfg.table_rows(model.inputs), width), engine_programs.TABLE_AXES)
    programs = engine_programs.make_programs(
        model,
        _vocabulary(model.cfg),
        cfg,
        cache_sharding=jax.tree.map(lambda array: array.sharding, cache),
        table_sharding=table_md.sharding,
    )
    weights = prepare(model, model.trainable, by_layer=False)
    if name == "encode":
        rows = cfg.image_rows[-1]
        images = abstract_images(model.inputs, rows, cfg.image_row_patches)
        tokens = rows * model.inputs.row_tokens(cfg.image_row_patches)
        return programs.encode.trace(table_md, weights, images, of(jnp.int32, tokens))
    if name == "prefill":
        shape = (cfg.prefill_rows[-1], cfg.prefill_lengths[-1])
        return programs.prefill.trace(
            cache,
            weights,
            table_md,
            of(jnp.int32, shape[0]),
            of(jnp.int32, shape[0]),
            of(jnp.int32, *shape),
            of(jnp.int32, *shape),
            of(jnp.int32, model.inputs.position_axes, *shape),
            of(jnp.int32, shape[0]),
            span=cfg.slot_positions,
        )
    rows = jax.eval_shape(lambda: engine_programs.no_rows(cfg.batch_sizes[-1], cfg.num_slots))
    return programs.decode.trace(
        cache, weights, rows, of(jnp.int32), of(jnp.bool_), span=cfg.slot_positions
    )


def _compile(name: str, lowered: Any, say: Callable[[str], None]) -> Compiled:
    started_s = time.monotonic()
    say(f"compiling {name} ...")
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error)
        used = _OUT_OF_MEMORY.search(reason)
        if "RESOURCE_EXHAUSTED" not in reason or not used:
            raise ConfigError(f"the compiler refuses {name}: {reason[:300]}") from None
        seconds = time.monotonic() - started_s
        wanted = float(used["size"]) * {"K": 2**10, "M": 2**20, "G": 2**30}[used["unit"]]
        say(f"{name} does not compile ({seconds:.0f} s): {used[0]}")
        return Compiled(name, seconds, "", out_of_memory=used[0], wanted_bytes=wanted)
    seconds = time.monotonic() - started_s
    say(f"compiled {name} in {seconds:.0f} s")
    memory = compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # seen with libtpu 0.0.51 for v6e, jaxlib 0.10.2
        text = ""
        reason = one_line(error)
        say(f"{name}: this jaxlib cannot read the program of this libtpu, so only its memory is "
            f"known; try the libtpu that jax[tpu] names ({reason[:150]})")  # fmt: skip
    return Compiled(
        name,
        seconds,
        text,
        argument_bytes=memory.argument_size_in_bytes,
        new_bytes=memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
    )


def chip_bytes(tree: Any) -> int:
    """Bytes of one chip's part of every leaf."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        part = leaf.sharding.shard_shape(leaf.shape) if leaf.shape else ()
        size = 1
        for length in part:
            size *= length
        total += size * leaf.dtype.itemsize
    return total


def _vocabulary(cfg: Any) -> Vocabulary:
    """In place of the tokenizer's; which ids they are changes no cost."""
    return Vocabulary((cfg.eos_token_id,), (cfg.image_token_id,))


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, placed: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
        tree,
        shardings,
    )
