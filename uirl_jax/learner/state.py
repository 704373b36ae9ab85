"""What the learner trains and how: the train state and its optimizer.

The frozen tree is no part of the state: it is never donated, never checkpointed and never changes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from uirl_jax.metrics import key_values
from uirl_jax.models import sharding

Trains = Literal["adapters", "all weights"]
# Adapters start from an update of zero and bear large steps; full weights hold what was pretrained.
DEFAULT_LR: Mapping[Trains, float] = {"adapters": 1e-4, "all weights": 1e-5}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """One of optax's, with a linear warm-up and a clip of the gradient's global norm."""

    # muon: matrices orthogonalised, the rest by AdamW. adafactor: moments by row and column, for
    # full weights that leave no room for AdamW's.
    name: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    # None: 1e-4 for adapters, 1e-5 for all weights, and the run says which. A model from nothing
    # wants 1e-3.
    lr: float | None = None
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.99  # shorter than 0.999: an RL run is hundreds of steps, not 100,000
    clip_norm: float = 1.0

    def resolved(self, trains: Trains) -> Self:
        """With a learning rate."""
        return self if self.lr is not None else dataclasses.replace(self, lr=DEFAULT_LR[trains])

    def describe(self, trainable: nnx.State, trains: Trains) -> str:
        """One line that says what is trained and how fast."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(trainable))
        return key_values(
            "optimizer", name=self.name, lr=self.lr, trains=trains, parameters=parameters
        )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The value head of PPO: one linear layer on the policy's last hidden state."""

    lr: float = 1e-3  # its own: it starts from zero, the trunk does not
    coefficient: float = 0.1  # of the value loss, whose gradient also reaches the adapters
    clip: float = 0.2  # of the value's change from what it was before the update; 0: none


class Critic(NamedTuple):
    """The value head and its optimizer's state."""

    params: dict[str, dict[str, jax.Array]]  # value_head: kernel [D,1], bias [1]
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, a pytree.

    `step` counts the learner's steps; each may be several updates of the optimizer.
    """

    trainable: nnx.State  # the adapters, or every weight where all are trained
    opt_state: Any
    critic: Critic | None
    step: jax.Array  # int32[]


def make_schedule(cfg: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant or a cosine to a tenth of the peak."""
    assert cfg.lr is not None, "call OptimizerConfig.resolved first"
    if cfg.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if cfg.warmup_steps else cfg.lr,
            peak_value=cfg.lr,
            warmup_steps=cfg.warmup_steps,
            decay_steps=max(total_updates, cfg.warmup_steps + 1),
            end_value=cfg.lr / 10,
        )
    if not cfg.warmup_steps:
        return optax.constant_schedule(cfg.lr)
    return optax.linear_schedule(cfg.lr / cfg.warmup_steps, cfg.lr, cfg.warmup_steps)


def make_optimizer(cfg: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clip by global norm, then the optimizer. Weight decay spares vectors, as is usual."""

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
            consistent_rms=0.2,  # updates as large as AdamW's (arXiv:2502.16982): one lr for both
        )
    elif cfg.name == "adamw":
        step = optax.adamw(
            schedule, b1=cfg.b1, b2=cfg.b2, weight_decay=cfg.weight_decay, mask=matrices
        )
    elif cfg.name == "adafactor":
        step = optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,  # fresh LoRA B is zero, and would stay there
            weight_decay_rate=cfg.weight_decay or None,
            weight_decay_mask=matrices,
        )
    else:
        decay = optax.add_decayed_weights(cfg.weight_decay, mask=matrices)
        step = optax.chain(decay, optax.sgd(schedule, momentum=cfg.b1))
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), step)


def _matrix_axes(path: Any, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """The axes of a projection's matrix: the last two; a stacked one has a layer axis before them.

    None for vectors (a stacked bias has two axes too) and for the embedding, whose rows are
    independent.
    """
    if sharding.leaf_names(path)[-1] not in ("kernel", "lora_a", "lora_b"):
        return None
    return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)


def make_critic_optimizer(cfg: CriticConfig) -> optax.GradientTransformation:
    """Adam at a constant rate: the head is small and chases a moving target."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(cfg.lr))


def init_critic(width: int, optimizer: optax.GradientTransformation) -> Critic:
    """A head that says 0 everywhere."""
    params = {"value_head": {"kernel": jnp.zeros((width, 1)), "bias": jnp.zeros((1,))}}
    return Critic(params, optimizer.init(params))


def init_state(
    trainable: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | None = None,
    rules: sharding.Rules | None = None,
    *,
    critic: Critic | None = None,
) -> TrainState:
    """A fresh state on the mesh; trainable leaves in float32, whatever the frozen tree is in.

    Args:
      rules: the family's sharding rules; needed with a mesh.
    """
    trainable = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), trainable)
    state = TrainState(trainable, optimizer.init(trainable), critic, jnp.zeros((), jnp.int32))
    if mesh is None:
        return state
    assert rules is not None, "a mesh needs the family's sharding rules"
    return jax.device_put(state, sharding.state_shardings(mesh, state, rules))


def abstract(tree: Any) -> Any:
    """Shape, dtype and sharding of every array: what a checkpoint is restored to."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
