"""What determines the steps of a run's learner: its config, and the programs and state made of it.

`loop` runs them, and `follow` in the other processes of a learner on several hosts.
"""

import dataclasses

import jax
import optax

from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.bookkeeping import Keep
from uirl_jax.learner.curriculum import Curriculum
from uirl_jax.learner.state import CriticConfig, TrainState
from uirl_jax.shards import batching


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """The number of steps, and the groups, batches and optimizer of each."""

    # Policies to publish; a finished run goes on with more.
    steps: int = dataclasses.field(metadata={"min": 0, "max": 10_000_000})
    # Groups that an update is made from.
    groups_per_step: int = dataclasses.field(default=8, metadata={"min": 1, "max": 65_536})
    # In policy versions; 0: the actor waits for each new policy.
    max_staleness: int = dataclasses.field(default=0, metadata={"min": 0, "max": 1000})
    batch: batching.BatchConfig = dataclasses.field(default_factory=batching.BatchConfig)
    optimizer: learner_state.OptimizerConfig = dataclasses.field(
        default_factory=learner_state.OptimizerConfig
    )
    # The newest; older ones are deleted.
    keep_checkpoints: int = dataclasses.field(default=3, metadata={"min": 1, "max": 10_000})
    # Checkpoints of every so many steps are never deleted; 0: of none.
    keep_every: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Used shards are moved to kept/ instead of deleted, the oldest ones deleted above this size.
    keep_records_mib: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Each is called after every step: "module:function" of a StepReport; a text that it returns
    # ends the run with this reason.
    callbacks: tuple[str, ...] = ()
    # Time between two listings of the shards.
    poll_s: float = dataclasses.field(default=0.02, metadata={"above": 0.0, "max": 60.0})

    @property
    def keep(self) -> Keep:
        return Keep(self.keep_checkpoints, self.keep_every, self.keep_records_mib)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Everything that determines what a run's learner computes."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    # Its tallies of the run's tasks go to the actors with every policy.
    curriculum: Curriculum
    temperature: float = 1.0  # the actors' sampling temperature, see learner.step
    forbidden_ids: tuple[int, ...] = ()
    seed: int = 0  # of the adapters' dropout and the order of minibatches


def step_config(
    cfg: TrainingConfig, model: PolicyModel, critic: CriticConfig | None = None
) -> learner_step.StepConfig:
    """What determines a run's compiled programs. Args: critic: of a run that has one."""
    return learner_step.StepConfig(
        cfg.algorithm.loss,
        critic,
        vision_trainable=model.trains_vision,
        use_reference=cfg.algorithm.use_reference,
        recompute_old=cfg.algorithm.recompute_old,
        temperature=cfg.temperature,
        forbidden_ids=cfg.forbidden_ids,
        dropout_seed=cfg.seed,
    )


def prepare(
    cfg: TrainingConfig, model: PolicyModel, mesh: jax.sharding.Mesh
) -> tuple[learner_step.Steps, optax.Schedule, TrainState]:
    """The run's jitted functions (XLA compiles each at its first call), the learning rate by
    update, and a fresh train state. The same in every process of the learner."""
    algorithm_cfg = cfg.algorithm
    optimizer_cfg = cfg.learner.optimizer.resolved(model.trains)
    print(optimizer_cfg.describe(model.trainable, model.trains), flush=True)
    updates = cfg.learner.steps * algorithm_cfg.updates_a_step
    optimizer = learner_state.make_optimizer(optimizer_cfg, updates)
    schedule = learner_state.make_schedule(optimizer_cfg, updates)
    critic, critic_cfg = None, None
    if algorithm_cfg.has_critic:
        critic_cfg = algorithm_cfg.critic
        critic_optimizer = learner_state.make_critic_optimizer(critic_cfg)
        critic = learner_state.init_critic(model.cfg.hidden_size, critic_optimizer)
    rules = model.family.weights.sharding_rules
    state = learner_state.init_state(model.trainable, optimizer, mesh, rules, critic=critic)
    step_cfg = step_config(cfg, model, critic_cfg)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    steps = learner_step.make_steps(model.graphdef, optimizer, step_cfg, shardings)
    return steps, schedule, state
