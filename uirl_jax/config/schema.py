"""The schema of a config file: one frozen dataclass per section, most defined where they are used.

`main` builds a RunConfig from the ConfigDict and passes its parts on. Constraints between sections
are checked here, before anything starts. `reading` reads files and flags.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from uirl_jax import user_code
from uirl_jax.actor.rollout import RolloutConfig
from uirl_jax.engine.requests import MIN_TEMPERATURE, EngineConfig
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation import InstanceSeeds, PublishConfig
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.cluster import ClusterConfig
from uirl_jax.learner.cold_start import ColdStartConfig
from uirl_jax.learner.curriculum import MAX_ENTRIES, CurriculumConfig
from uirl_jax.learner.training import LearnerConfig
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.quantization import Quantize
from uirl_jax.players import PlayConfig
from uirl_jax.trackers import TrackingConfig
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.containers.runtime import ContainerConfig
from uirl_jax.verifiers.dialects import DIALECTS, DialectName
from uirl_jax.verifiers.recorded import rewards as recorded_rewards
from uirl_jax.verifiers.recorded.rewards import RecordedConfig
from uirl_jax.verifiers.wire import MAX_BUNDLED_DELAY_S


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The base model and its adapters."""

    path: str  # a directory, or a name on the Hugging Face hub (see models.hub)
    # "module:FAMILY" of a families.border.Family, for a model that the package does not know.
    family: str = ""
    # A PEFT adapter to continue from; it must belong to this base and match lora. The reference of
    # the KL term is the base without it.
    adapter: str = ""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    # all: no adapters, every weight is trained and published. Needs memory for float32 weights,
    # their gradients and the optimizer's moments, and three versions on the disk.
    train: Literal["lora", "all"] = "lora"
    # float16 becomes bfloat16, with a warning.
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # int8: the base's projections take half the memory of bfloat16, with rounding errors.
    quantize: Quantize = "none"
    # What the backward pass computes again instead of keeping: full needs least memory.
    remat: Remat = "none"

    def __post_init__(self) -> None:
        if self.family:
            user_code.check(self.family, "model.family")

    @property
    def adapters(self) -> LoraConfig | None:
        """What the model is loaded with."""
        return self.lora if self.train == "lora" else None


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One kind of task; its instances differ in their seed."""

    name: str  # "desktop/click_button"
    # Of the task, as its server reads it: "buttons=4,colors=8".
    variant: str = ""
    # Actions of an episode; then it ends as max_turns.
    max_turns: int = dataclasses.field(default=1, metadata={"min": 1, "max": 10_000})
    # "module:function" of TaskSpec -> types.Rule: instruction and reward in place of the server's.
    rule: str = ""

    def __post_init__(self) -> None:
        if self.rule:
            user_code.check(self.rule, f"tasks: rule of {self.name!r}")


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """The verifiers that the actor uses."""

    urls: tuple[str, ...] = ()  # empty: the bundled server, found by verifier.port in the workdir
    # Of the bundled server; 0: a free one.
    port: int = dataclasses.field(default=0, metadata={"min": 0, "max": 65_535})
    dialect: DialectName = "g1+"  # python -m uirl_jax.verifiers.doctor URL finds out which
    # Time that the server waits after an action before it takes the screenshot.
    action_delay_s: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 60.0})
    # A file with the bearer token that the servers of `urls` ask for. Empty: the environment
    # variable UIRL_VERIFIER_TOKEN, or none. The token itself is never written to the workdir.
    token_file: str = ""
    limits: ClientLimits = dataclasses.field(default_factory=ClientLimits)
    task_dirs: tuple[str, ...] = ()  # folders of the user's own tasks own/<name>; docs/own_task.md
    recorded: RecordedConfig = dataclasses.field(default_factory=RecordedConfig)
    # Instead of urls: one container per episode, started and deleted by the actor.
    containers: ContainerConfig = dataclasses.field(default_factory=ContainerConfig)

    @property
    def is_bundled(self) -> bool:
        """Whether the verifier is the run's own: the bundled server, or recorded in process."""
        return not self.urls and self.containers.runtime == "none"


@dataclasses.dataclass(frozen=True)
class ActorSection:
    """How many episodes run at a time, and how each is sampled."""

    # Episodes of one instance, whose rewards are compared.
    group_size: int = dataclasses.field(default=8, metadata={"min": 1, "max": 4096})
    # Episodes that one actor plays at a time.
    concurrency: int = dataclasses.field(default=64, metadata={"min": 1, "max": 65_536})
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    # Policy versions that actors deliberately stay behind the learner, to study staleness.
    policy_lag: int = dataclasses.field(default=0, metadata={"min": 0, "max": 1000})


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation before, during and after training."""

    # Instances of a stage, each played once; 0: nothing is evaluated.
    episodes: int = dataclasses.field(default=200, metadata={"min": 0, "max": 100_000})
    # 0 is greedy; else at least 0.001.
    temperature: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 100.0})
    random: bool = False  # first evaluate random actions, as the stage `random`
    # Steps between two evaluations while the run trains; 0: only before and after it. The learner
    # waits meanwhile.
    every: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Instances to play, neither ever trained on: held_out, or tuning to choose settings, a
    # checkpoint (publish.gate) or a config, so that the held-out ones stay unseen until the end.
    seeds: InstanceSeeds = "held_out"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; -1: the devices that the other axes leave."""

    # Replicas of the weights, each with a part of the rows; -1: all devices that are left.
    data: int = dataclasses.field(default=-1, metadata={"min": -1, "max": 1_000_000})
    # Devices that share the storage of every weight.
    fsdp: int = dataclasses.field(default=1, metadata={"min": -1, "max": 1_000_000})
    # Devices that share the computation of every layer.
    model: int = dataclasses.field(default=1, metadata={"min": -1, "max": 1_000_000})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The whole config of a run."""

    model: ModelConfig
    tasks: tuple[TaskConfig, ...]  # groups take them in turn
    learner: LearnerConfig
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    # Of the adapters, the instances and what is sampled.
    seed: int = dataclasses.field(default=0, metadata={"min": 0, "max": 2**31 - 1})
    # (width, height) of the largest screen. If given, the sizes of engine and learner.batch that
    # the config leaves at their defaults are derived from it (config.sizes).
    screen_px: tuple[int, ...] = dataclasses.field(default=(), metadata={"min": 1, "max": 100_000})
    # Of the longest instruction; with screen_px. 256 are about 190 English words.
    instruction_tokens: int = dataclasses.field(default=256, metadata={"min": 1, "max": 100_000})
    chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
    verifier: VerifierConfig = dataclasses.field(default_factory=VerifierConfig)
    actor: ActorSection = dataclasses.field(default_factory=ActorSection)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    curriculum: CurriculumConfig = dataclasses.field(default_factory=CurriculumConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    publish: PublishConfig = dataclasses.field(default_factory=PublishConfig)
    cold_start: ColdStartConfig = dataclasses.field(default_factory=ColdStartConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        faults = [
            *self._faults_of_tasks(),
            *self._faults_of_verifier(),
            *self._faults_of_sizes(),
            *self._faults_of_quantized_weights(),
            *self._faults_of_sampling_server(),
            *self._faults_of_all_weights(),
            *self._faults_of_groups(),
            *self._faults_of_policy_lag(),
            *self._faults_of_temperatures(),
            *self._faults_of_evaluation(),
            *self._faults_of_curriculum(),
        ]
        if faults:
            raise ConfigError("; ".join(faults))

    def _faults_of_tasks(self) -> list[str]:
        """Tasks that are missing, or that the run's own verifier does not have."""
        faults = []
        if not self.tasks:
            faults.append("tasks is empty, expected at least one")
        dialect = DIALECTS[self.verifier.dialect]
        if self.verifier.is_bundled and not dialect.judges:
            faults.append(
                f"verifier.dialect={dialect.name!r}: the bundled server speaks g1+; set "
                "verifier.urls to servers that speak this dialect"
            )
        faults += [
            f"tasks: {task.name!r} has two rules, {self.rules[task.name]!r} and {task.rule!r}; a "
            "task has one, which may look at the variant"
            for task in self.tasks
            if task.rule != self.rules.get(task.name, "")
        ]
        names = {
            own_tasks.PREFIX + Path(folder).resolve().name for folder in self.verifier.task_dirs
        }
        for task in self.tasks:
            if (
                task.name.startswith(own_tasks.PREFIX)
                and task.name not in names
                and self.verifier.is_bundled
            ):
                faults.append(
                    f"tasks: {task.name!r} is not in verifier.task_dirs="
                    f"{self.verifier.task_dirs}; add its folder there"
                )
        recorded = {recorded_rewards.PREFIX + name for name in self.verifier.recorded.sets}
        faults += [
            f"tasks: {task.name!r} is not in verifier.recorded.sets; add its parquet file there"
            for task in self.tasks
            if task.name.startswith(recorded_rewards.PREFIX)
            and task.name not in recorded
            and self.verifier.is_bundled
        ]
        return faults

    def _faults_of_verifier(self) -> list[str]:
        """Containers beside what they exclude, and a wait that is too long."""
        faults = []
        containers, dialect = self.verifier.containers, DIALECTS[self.verifier.dialect]
        if containers.runtime != "none":
            if self.verifier.urls:
                faults.append("verifier.urls and verifier.containers: set only one of them")
            if dialect.has_sessions:
                faults.append(
                    f"verifier.dialect={dialect.name!r}: containers, which hold one session each, "
                    "need g2a or g2b, or g3 behind a proxy"
                )
            if containers.lifetime_s <= self.actor.rollout.episode_timeout_s:
                faults.append(
                    f"verifier.containers.lifetime_s={containers.lifetime_s:g}: must be more than "
                    f"actor.rollout.episode_timeout_s="
                    f"{self.actor.rollout.episode_timeout_s:g}"
                )
        most_s, of_whom = dialect.max_delay_s, f"in the dialect {dialect.name}"
        if self.needs_server and self.verifier.is_bundled:
            most_s, of_whom = MAX_BUNDLED_DELAY_S, "on the bundled server"
        if self.verifier.action_delay_s > most_s:
            faults.append(
                f"verifier.action_delay_s={self.verifier.action_delay_s:g}: at most "
                f"{most_s:g} {of_whom}"
            )
        return faults

    def _faults_of_sizes(self) -> list[str]:
        """Contexts and screens that the engine or the learner does not hold."""
        faults = []
        new_tokens, most_new = self.actor.rollout.max_new_tokens, self.engine.max_new_tokens
        if self.screen_px and len(self.screen_px) != 2:
            faults.append(f"screen_px={self.screen_px}: expected (width, height) in pixels")
        if new_tokens > most_new and not self.screen_px:
            faults.append(
                f"actor.rollout.max_new_tokens={new_tokens}: at most engine.max_new_tokens="
                f"{most_new}"
            )
        batch = self.learner.batch
        longest = self.max_context_tokens + new_tokens
        if longest > batch.row_lengths[-1] and not self.screen_px:
            faults.append(
                f"learner.batch.row_lengths={batch.row_lengths}: an episode may have "
                f"{self.max_context_tokens} tokens of context and {new_tokens} new ones"
            )
        most = batch.patch_lengths[-1]
        samples_here = self.engine.kind == "jax" and not self.screen_px
        if samples_here and self.engine.image_row_patches > most:
            faults.append(
                f"learner.batch.patch_lengths={batch.patch_lengths}: the engine takes screenshots "
                f"of up to engine.image_row_patches={self.engine.image_row_patches} patches"
            )
        return faults

    def _faults_of_quantized_weights(self) -> list[str]:
        """What needs to change weights that are int8."""
        if self.model.quantize == "none" or not self.cold_start.steps:
            return []
        return [
            f"model.quantize={self.model.quantize!r}: a cold start cannot merge adapters into "
            "int8 weights; set cold_start.steps=0 or model.quantize='none'"
        ]

    def _faults_of_sampling_server(self) -> list[str]:
        """What a server with OpenAI's API cannot do."""
        if self.engine.kind != "openai":
            return []
        faults = []
        rollout = self.actor.rollout
        if rollout.top_p != 1.0 or rollout.top_k != 0:
            faults.append(
                "engine.kind='openai': records need the logprobs before top-p and top-k, which a "
                "server does not return; set actor.rollout.top_p=1 and top_k=0"
            )
        if self.cold_start.steps:
            faults.append(
                "engine.kind='openai': a cold start writes a new base model, which the server has "
                "not loaded; set cold_start.steps=0, serve the model that an earlier run wrote and "
                "set model.path to it"
            )
        if self.model.lora.trains_tokens:
            faults.append(
                "engine.kind='openai': vLLM and other servers load no adapter with rows of tokens; "
                "set model.lora.trainable_tokens=() or engine.kind='jax'"
            )
        return faults

    def _faults_of_all_weights(self) -> list[str]:
        """What needs adapters, in a run without them."""
        if self.model.train != "all":
            return []
        needs = {
            "model.adapter": bool(self.model.adapter),
            f"model.quantize={self.model.quantize!r} (of frozen weights)": (
                self.model.quantize != "none"
            ),
            "algorithm.loss.kl_coefficient > 0 (the reference is the base, adapters off)": (
                self.algorithm.use_reference
            ),
            "engine.kind='openai' (a server loads a new policy as adapters)": (
                self.engine.kind == "openai"
            ),
            "cold_start.train='lora'": self.cold_start.steps > 0
            and self.cold_start.train == "lora",
        }
        return [
            f"model.train='all' has no adapters, which {name} needs: change one of them"
            for name, used in needs.items()
            if used
        ]

    def _faults_of_groups(self) -> list[str]:
        """Groups that teach nothing."""
        algorithm, advantage = self.algorithm, self.algorithm.advantage
        if (
            not self.learner.steps
            or self.actor.group_size > 1
            or algorithm.objective != "policy"
            or not advantage.within_groups
            or advantage.virtual_return is not None
            or advantage.screen_weight
            or advantage.function
            or algorithm.loss.function
            or algorithm.replay
        ):
            return []
        return [
            "actor.group_size=1: every advantage within a group of one is 0; set actor.group_size "
            "to 2 or more, or algorithm.advantage.normalise to 'batch' or 'none'"
        ]

    def _faults_of_policy_lag(self) -> list[str]:
        """A lag at which the learner drops every group."""
        if self.actor.policy_lag <= self.learner.max_staleness:
            return []
        return [
            f"actor.policy_lag={self.actor.policy_lag}: the learner drops groups that are more "
            f"than learner.max_staleness={self.learner.max_staleness} versions old"
        ]

    def _faults_of_temperatures(self) -> list[str]:
        """Temperatures that the engine refuses, or that the learner cannot divide logits by."""
        training = self.actor.rollout.temperature
        faults = [
            f"{key}={value:g}: expected 0 (greedy) or at least {MIN_TEMPERATURE:g}"
            for key, value in (
                ("actor.rollout.temperature", training),
                ("evaluation.temperature", self.evaluation.temperature),
            )
            if 0 < value < MIN_TEMPERATURE
        ]
        if training == 0 and self.learner.steps:
            faults.append(
                "actor.rollout.temperature=0: greedy episodes of an instance are all the same, and "
                "the learner divides logits by the temperature; set one above 0, such as 1.0, or "
                "learner.steps=0"
            )
        return faults

    def _faults_of_evaluation(self) -> list[str]:
        """What cannot be evaluated, or kept back, while a run trains."""
        gate, every = self.publish.gate, self.evaluation.every
        faults = []
        if gate != "none" and not (every and self.evaluation.episodes):
            faults.append(
                f"publish.gate={gate!r}: decides by evaluations; set evaluation.every and "
                "evaluation.episodes"
            )
        if every and self.actor.policy_lag:
            faults.append(
                f"evaluation.every={every}: the engine holds an earlier policy with "
                f"actor.policy_lag={self.actor.policy_lag}; set one of them to 0"
            )
        if gate == "actors" and self.engine.kind == "openai":
            faults.append(
                "publish.gate='actors': a server would sample with a policy that is being judged; "
                "use gate='export', or engine.kind='jax'"
            )
        if self.publish.patience and gate == "none":
            faults.append(
                f"publish.patience={self.publish.patience}: nothing is kept back with "
                "publish.gate='none'"
            )
        return faults

    def _faults_of_curriculum(self) -> list[str]:
        """Instances and tasks that cannot be drawn as the config says."""
        faults = []
        if self.algorithm.replay and not self.curriculum.instances:
            faults.append(
                "algorithm.replay=True: with curriculum.instances=0 no instance repeats, so stored "
                "successes are never used; set curriculum.instances"
            )
        if self.curriculum.weight_by != "none" and len(set(self.kinds)) < len(self.kinds):
            twice = next(kind for kind in self.kinds if self.kinds.count(kind) > 1)
            faults.append(
                f"tasks: {twice.name!r} is listed more than once; curriculum.weight_by="
                f"{self.curriculum.weight_by!r} sets how often a task is drawn, so list it once"
            )
        if len(self.tasks) * self.curriculum.instances > MAX_ENTRIES:
            faults.append(
                f"curriculum.instances={self.curriculum.instances}: times {len(self.tasks)} tasks "
                f"is more than {MAX_ENTRIES}"
            )
        return faults

    @property
    def play(self) -> PlayConfig:
        return PlayConfig(
            self.engine,
            self.actor.rollout,
            self.actor.concurrency,
            max_patches=self.learner.batch.patch_lengths[-1],
            seed=self.seed,
        )

    @property
    def rules(self) -> dict[str, str]:
        """Task name -> the import path of its own rule."""
        return {task.name: task.rule for task in self.tasks if task.rule}

    @property
    def needs_server(self) -> bool:
        """Whether the run starts a bundled server for its episodes."""
        recorded = all(task.name.startswith(recorded_rewards.PREFIX) for task in self.tasks)
        in_process = recorded and self.verifier.recorded.in_process
        return self.verifier.is_bundled and not in_process

    @property
    def max_context_tokens(self) -> int:
        return self.play.max_context_tokens

    @property
    def kinds(self) -> list[TaskSpec]:
        return [TaskSpec(task.name, 0, task.variant, task.max_turns) for task in self.tasks]
