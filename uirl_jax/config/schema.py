"""The schema of a config file: one frozen dataclass a section, most of them the rooms' own.

`main` builds a RunConfig from the ConfigDict and hands its parts down. What two rooms must agree on
is checked here, before anything starts. `reading` reads files and flags.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from uirl_jax.actor.rollout import RolloutConfig
from uirl_jax.engine.requests import EngineConfig
from uirl_jax.errors import ConfigError
from uirl_jax.families.chat import ChatConfig
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.cold_start import ColdStartConfig
from uirl_jax.learner.curriculum import MAX_ENTRIES, CurriculumConfig
from uirl_jax.learner.loop import LearnerConfig
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.quantization import Quantize
from uirl_jax.players import PlayConfig
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.containers.runtime import ContainerConfig
from uirl_jax.verifiers.dialects import DIALECTS, DialectName


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The base model and its adapters."""

    path: str  # a directory, or a name on the Hugging Face hub (see models.hub)
    # A PEFT adapter to start from, trained on this base; lora must be what it was made with. It is
    # trained on; the reference of the KL term is the base without it.
    adapter: str = ""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # int8: the base's projections take half the memory of bfloat16; their rounding is the price.
    quantize: Quantize = "none"
    remat: Remat = "none"


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One kind of task; its instances differ by their seed."""

    name: str
    variant: str = ""
    max_turns: int = dataclasses.field(default=1, metadata={"min": 1})


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """Which verifiers the actor plays against."""

    urls: tuple[str, ...] = ()  # none: the bundled server, through verifier.port in the workdir
    port: int = 0  # of the bundled server; 0 takes a free one
    dialect: DialectName = "g1+"  # python -m uirl_jax.verifiers.doctor URL finds out which
    action_delay_s: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 60.0})
    task_dirs: tuple[str, ...] = ()  # folders of tasks of one's own: own/<name>; docs/own_task.md
    # In place of urls: a container for every episode, started and deleted by the actor.
    containers: ContainerConfig = dataclasses.field(default_factory=ContainerConfig)

    @property
    def is_bundled(self) -> bool:
        """Whether the run's own server is the verifier."""
        return not self.urls and self.containers.runtime == "none"


@dataclasses.dataclass(frozen=True)
class ActorSection:
    """How many episodes at a time, and how each is sampled."""

    group_size: int = dataclasses.field(default=8, metadata={"min": 1})
    concurrency: int = dataclasses.field(default=64, metadata={"min": 1})
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    # Versions that actors stay behind the learner on purpose, to study what staleness does.
    policy_lag: int = dataclasses.field(default=0, metadata={"min": 0})


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out instances, before and after."""

    episodes: int = dataclasses.field(default=200, metadata={"min": 0, "max": 100_000})
    temperature: float = dataclasses.field(default=0.0, metadata={"min": 0.0})  # 0 is greedy
    random: bool = False  # first of all what random actions achieve: the stage `random`


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; -1 takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    model: int = 1


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that `main` hands down."""

    model: ModelConfig
    tasks: tuple[TaskConfig, ...]
    learner: LearnerConfig
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    seed: int = dataclasses.field(default=0, metadata={"min": 0, "max": 2**31 - 1})
    chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
    verifier: VerifierConfig = dataclasses.field(default_factory=VerifierConfig)
    actor: ActorSection = dataclasses.field(default_factory=ActorSection)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    cold_start: ColdStartConfig = dataclasses.field(default_factory=ColdStartConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        faults = []
        if not self.tasks:
            faults.append("tasks is empty, expected at least one")
        dialect = DIALECTS[self.verifier.dialect]
        if self.verifier.is_bundled and not dialect.judges:
            faults.append(
                f"verifier.dialect={dialect.name!r}: the bundled server speaks g1+; give "
                "verifier.urls of servers that speak another"
            )
        names = {own_tasks.PREFIX + Path(folder).name for folder in self.verifier.task_dirs}
        for task in self.tasks:
            if (
                task.name.startswith(own_tasks.PREFIX)
                and task.name not in names
                and self.verifier.is_bundled
            ):
                faults.append(
                    f"tasks: {task.name!r} is in none of verifier.task_dirs="
                    f"{self.verifier.task_dirs}; name its folder there"
                )
        containers = self.verifier.containers
        if containers.runtime != "none":
            if self.verifier.urls:
                faults.append("verifier.urls and verifier.containers: set one of them")
            if dialect.has_sessions:
                faults.append(
                    f"verifier.dialect={dialect.name!r}: a container that is one session speaks "
                    "g2a or g2b, or g3 behind a proxy"
                )
            if containers.lifetime_s <= self.actor.rollout.episode_timeout_s:
                faults.append(
                    f"verifier.containers.lifetime_s={containers.lifetime_s:g}: an episode may "
                    f"take actor.rollout.episode_timeout_s="
                    f"{self.actor.rollout.episode_timeout_s:g}"
                )
        if self.verifier.action_delay_s > dialect.max_delay_s:
            faults.append(
                f"verifier.action_delay_s={self.verifier.action_delay_s:g}: at most "
                f"{dialect.max_delay_s:g} in the dialect {dialect.name}"
            )
        new_tokens, most_new = self.actor.rollout.max_new_tokens, self.engine.max_new_tokens
        if new_tokens > most_new:
            faults.append(
                f"actor.rollout.max_new_tokens={new_tokens}: engine.max_new_tokens is {most_new}"
            )
        batch = self.learner.batch
        if self.max_context_tokens + new_tokens > batch.row_lengths[-1]:
            faults.append(
                f"learner.batch.row_lengths={batch.row_lengths}: an episode may have "
                f"{self.max_context_tokens} tokens of context and {new_tokens} new ones"
            )
        if self.model.quantize != "none" and self.cold_start.steps:
            faults.append(
                f"model.quantize={self.model.quantize!r}: a cold start writes a merged model, "
                "which int8 weights cannot become; set cold_start.steps=0 or quantize='none'"
            )
        rollout = self.actor.rollout
        if self.engine.kind == "openai" and (rollout.top_p != 1.0 or rollout.top_k != 0):
            faults.append(
                "engine.kind='openai': a record has logprobs from before top-p and top-k cut the "
                "distribution, which a server does not tell; set actor.rollout.top_p=1 and top_k=0"
            )
        if self.engine.kind == "openai" and self.cold_start.steps:
            faults.append(
                "engine.kind='openai': a cold start writes a new base model, which the server does "
                "not hold; set cold_start.steps=0, serve what an earlier run wrote and name it in "
                "model.path"
            )
        if self.actor.policy_lag > self.learner.max_staleness:
            faults.append(
                f"actor.policy_lag={self.actor.policy_lag}: the learner refuses what is more than "
                f"learner.max_staleness={self.learner.max_staleness} versions old"
            )
        if self.algorithm.replay and not self.curriculum.instances:
            faults.append(
                "algorithm.replay=True: with curriculum.instances=0 no instance comes back, and "
                "nothing stored is ever used; say how many instances there are"
            )
        if self.curriculum.weight_by != "none" and len(set(self.kinds)) < len(self.kinds):
            twice = next(kind for kind in self.kinds if self.kinds.count(kind) > 1)
            faults.append(
                f"tasks: {twice.name!r} is there more than once; curriculum.weight_by="
                f"{self.curriculum.weight_by!r} draws each as often as it needs, so list it once"
            )
        if len(self.tasks) * self.curriculum.instances > MAX_ENTRIES:
            faults.append(
                f"curriculum.instances={self.curriculum.instances}: with {len(self.tasks)} tasks "
                f"more than {MAX_ENTRIES} in all"
            )
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def play(self) -> PlayConfig:
        return PlayConfig(self.engine, self.actor.rollout, self.actor.concurrency, self.seed)

    @property
    def max_context_tokens(self) -> int:
        return self.play.max_context_tokens

    @property
    def kinds(self) -> list[TaskSpec]:
        return [TaskSpec(task.name, 0, task.variant, task.max_turns) for task in self.tasks]
