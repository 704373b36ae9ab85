"""The train state and its optimizer.

The frozen tree is not part of the state: it is never donated, checkpointed or changed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

from uirl_jax.log_lines import key_values
from uirl_jax.models import sharding

Trains = Literal["adapters", "all weights"]
# Fresh adapters change nothing and tolerate large steps; large steps damage pretrained weights.
DEFAULT_LR: Mapping[Trains, float] = {"adapters": 1e-4, "all weights": 1e-5}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer with linear warm-up and clipping of the gradient's global norm."""

    # muon: orthogonalised updates for matrices, AdamW for the rest. adafactor: moments by row and
    # column, for full weights where AdamW's moments do not fit in memory.
    name: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    # None: 1e-4 for adapters, 1e-5 for all weights; the run prints it. 1e-3 suits a model that is
    # trained from scratch.
    lr: float | None = dataclasses.field(default=None, metadata={"min": 0.0, "max": 1.0})
    # Updates on which the rate rises to lr, from lr / warmup_steps in the first.
    warmup_steps: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # cosine: after the warm-up down to a tenth of lr at the last step.
    schedule: Literal["constant", "cosine"] = "constant"
    # Of matrices alone; what an update takes off them is lr times this.
    weight_decay: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 10.0})
    # Decay of the first moment.
    b1: float = dataclasses.field(default=0.9, metadata={"min": 0.0, "below": 1.0})
    # Of the second moment. Not 0.999: an RL run has hundreds of steps, not 100,000.
    b2: float = dataclasses.field(default=0.99, metadata={"min": 0.0, "below": 1.0})
    # Of the whole gradient, before the update.
    clip_norm: float = dataclasses.field(default=1.0, metadata={"above": 0.0, "max": 1e9})

    def resolved(self, trains: Trains) -> Self:
        """This config with the default learning rate filled in."""
        return self if self.lr is not None else dataclasses.replace(self, lr=DEFAULT_LR[trains])

    def describe(self, trainable: nnx.State, trains: Trains) -> str:
        """A log line: optimizer, learning rate, what is trained, number of parameters."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(trainable))
        return key_values(
            "optimizer", name=self.name, lr=self.lr, trains=trains, parameters=parameters
        )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value head of PPO: one linear layer on the policy's last hidden state."""

    # Higher than the adapters': the head starts from zero.
    lr: float = dataclasses.field(default=1e-3, metadata={"min": 0.0, "max": 1.0})
    # Of the value loss, whose gradient also reaches the adapters.
    coefficient: float = dataclasses.field(default=0.1, metadata={"min": 0.0, "max": 1000.0})
    # Limit on the value's change within an update; 0: no limit.
    clip: float = dataclasses.field(default=0.2, metadata={"min": 0.0, "max": 1000.0})


class Critic(NamedTuple):
    """The value head and its optimizer's state."""

    params: dict[str, dict[str, jax.Array]]  # value_head: kernel [D,1], bias [1]
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; a pytree.

    `step` counts the learner's steps; each may be several optimizer updates.
    """

    trainable: nnx.State  # the adapters, or all weights
    opt_state: Any
    critic: Critic | None
    step: jax.Array  # int32[]


def make_schedule(cfg: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant, or cosine to a tenth of the peak."""
    assert cfg.lr is not None, "call OptimizerConfig.resolved first"
    if cfg.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=cfg.lr / max(1, cfg.warmup_steps),  # from 0 the first update does nothing
            peak_value=cfg.lr,
            warmup_steps=cfg.warmup_steps,
            decay_steps=max(total_updates, cfg.warmup_steps + 1),
            end_value=cfg.lr / 10,
        )
    if not cfg.warmup_steps:
        return optax.constant_schedule(cfg.lr)
    return optax.linear_schedule(cfg.lr / cfg.warmup_steps, cfg.lr, cfg.warmup_steps)


def learning_rate(schedule: optax.Schedule, state: TrainState) -> float:
    """Of the last update."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    updates = max(int(np.asarray(count)) for _, count in counts)
    return float(np.asarray(schedule(max(0, updates - 1))))


def make_optimizer(cfg: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimizer. Weight decay applies to matrices only.

    With every optimizer the decay is decoupled: an update takes lr * weight_decay of a matrix off
    it, beside what the gradient asks for (AdamW, arXiv:1711.05101, algorithm 2).
    """

    def matrices(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, leaf: _matrix_axes(path, leaf) is not None, tree)

    schedule = make_schedule(cfg, total_updates)
    if cfg.name == "muon":
        step = optax.contrib.muon(
            schedule,
            weight_decay=cfg.weight_decay,
            adam_b1=cfg.b1,
            adam_b2=cfg.b2,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map_with_path(_matrix_axes, tree),
            consistent_rms=0.2,  # AdamW's update size (arXiv:2502.16982), so one lr fits both
        )
    elif cfg.name == "adamw":
        step = optax.adamw(
            schedule, b1=cfg.b1, b2=cfg.b2, weight_decay=cfg.weight_decay, mask=matrices
        )
    elif cfg.name == "adafactor":
        step = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,  # LoRA B starts at zero and would stay there
        )
        step = _with_decay(step, schedule, cfg.weight_decay, matrices)
    else:
        # identity: checkpoints name the arrays of the state by their place in the chain.
        step = optax.chain(optax.identity(), optax.sgd(schedule, momentum=cfg.b1))
        step = _with_decay(step, schedule, cfg.weight_decay, matrices)
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), step)


def _with_decay(
    step: optax.GradientTransformation,
    schedule: optax.Schedule,
    weight_decay: float,
    mask: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """`step` with decoupled weight decay, and no further state.

    optax.adafactor's own decay is not multiplied by the learning rate; add_decayed_weights before
    SGD goes through the momentum.
    """
    if not weight_decay:
        return step

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stepped, new_state = step.update(updates, state, params)
        rate = schedule(optax.tree.get_all_with_path(state, "count")[-1][1]) * weight_decay

        def decayed(change: jax.Array, weight: jax.Array, is_decayed: bool) -> jax.Array:
            return change - rate * weight if is_decayed else change

        return jax.tree.map(decayed, stepped, params, mask(params)), new_state

    return optax.GradientTransformation(step.init, update)


def _matrix_axes(path: Any, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """The last two axes of a projection matrix; a stacked one has a layer axis before them.

    None for vectors (a stacked bias has two axes too) and for the embedding, whose rows are
    independent of each other.
    """
    if sharding.leaf_names(path)[-1] not in ("kernel", "lora_a", "lora_b"):
        return None
    return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)


def make_critic_optimizer(cfg: CriticConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then Adam at a constant learning rate."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(cfg.lr))


def init_critic(width: int, optimizer: optax.GradientTransformation) -> Critic:
    """A value head that predicts 0, and its optimizer's state."""
    params = {"value_head": {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros((1,))}}
    return Critic(params, optimizer.init(params))


# Arrays of an optimizer's state that belong to no weight: Muon's polynomial. Every device has them.
_OPTIMIZERS_OWN: sharding.Rules = {"ns_coeffs": ()}


def init_state(
    trainable: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | None = None,
    rules: sharding.Rules | None = None,
    *,
    critic: Critic | None = None,
) -> TrainState:
    """A fresh state on the mesh; trainable leaves are float32, whatever the frozen tree's dtype.

    Args:
      rules: the family's sharding rules; needed with a mesh.
    """

    def build(trainable: nnx.State, critic: Critic | None) -> TrainState:
        trainable = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), trainable)
        return TrainState(trainable, optimizer.init(trainable), critic, jnp.zeros((), jnp.int32))

    if mesh is None:
        return build(trainable, critic)
    assert rules is not None, "a mesh needs the family's sharding rules"
    critic = jax.device_get(critic)  # numpy: its device may be another than the mesh's
    rules = {**rules, **_OPTIMIZERS_OWN}
    shardings = sharding.state_shardings(mesh, jax.eval_shape(build, trainable, critic), rules)
    # Compiled, so that with several processes each makes its own part.
    return jax.jit(build, out_shardings=shardings)(trainable, critic)


def abstract(tree: Any) -> Any:
    """Shape, dtype and sharding of every array: the target for restoring a checkpoint."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
