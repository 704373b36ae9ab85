"""The stage before RL: supervised training on demonstrations, saved as a new base model.

Demonstrations are played by scripts, or recorded (`cold_start.demonstrations`): by people, or by an
earlier run, whose successes are so distilled into its base (expert iteration).

The result is an ordinary model directory (workdir/cold_start/model). GRPO starts from it with fresh
adapters and uses it, adapters off, as the reference. `supervised` runs the steps; no policy is
published.
"""

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from flax import nnx

from uirl_jax import metrics
from uirl_jax.console import Progress
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.errors import ConfigError
from uirl_jax.families import chat_config
from uirl_jax.families.chat import Chat
from uirl_jax.families.loading import PolicyModel, save_model
from uirl_jax.learner import recorded_demonstrations, supervised
from uirl_jax.learner.scripted_demonstrations import ScriptedDemonstrations
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.learner.step import StepConfig
from uirl_jax.models.directory import copy_tokenizer
from uirl_jax.models.lora import LoRAParam
from uirl_jax.models.weights import stored_dtype
from uirl_jax.rl.rewards import turn_lengths
from uirl_jax.rl.weights import token_weights
from uirl_jax.shards import batching
from uirl_jax.store.files import new_directory, sync_files
from uirl_jax.types import TaskSpec, TrainBatch, Trajectory
from uirl_jax.verifiers import own_tasks

MODEL_DIR = Path("cold_start") / "model"  # in the workdir


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
    """Number of steps, the demonstrations, and which weights are trained."""

    # Supervised steps before RL; 0: no cold start.
    steps: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Demonstrations in a step.
    episodes_per_step: int = dataclasses.field(default=32, metadata={"min": 1, "max": 65_536})
    # Share of scripted demonstrations without a mistake.
    quality: float = dataclasses.field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    # Number of scripted demonstrations, played once and repeated in epochs; 0: new ones each step.
    episodes: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Sessions that play them side by side: two leave a third of two cores idle, six hardly any.
    browsers: int = dataclasses.field(default=6, metadata={"min": 1, "max": 256})
    # all: every weight of the base; the run then starts RL from a base of its own.
    train: Literal["lora", "all"] = "lora"
    # Folders written by tools.record_demo, or a run's kept/ and shards/: recorded demonstrations in
    # place of scripted ones.
    demonstrations: tuple[str, ...] = ()
    # Of these only the solved ones, at most so many of a task instance, the shortest first (expert
    # iteration); 0: all.
    keep_shortest: int = dataclasses.field(default=0, metadata={"min": 0, "max": 65_536})
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.keep_shortest and not self.demonstrations:
            raise ConfigError(
                f"cold_start.keep_shortest={self.keep_shortest}: selects from "
                "cold_start.demonstrations, and there are none; name a run's kept/ and shards/"
            )


def check_sources(cfg: ColdStartConfig, names: Collection[str], task_dirs: Sequence[str]) -> None:
    """Checks what can be told of the demonstrations before anything is played or written.

    Args: names: of the tasks that scripts demonstrate.
    Raises: ConfigError: a folder without demonstrations, or a task of one's own without a script.
    """
    if not cfg.steps:
        if cfg.demonstrations:
            print("event=cold_start steps=0 demonstrations=unused", flush=True)
        return
    if cfg.demonstrations:
        recorded_demonstrations.check_folders(cfg.demonstrations)
        return
    own = own_tasks.load(task_dirs)
    if silent := sorted(name for name in names if name in own and not own[name].has_script):
        raise ConfigError(
            f"cold_start: {', '.join(silent)}: class Task has no script of its own that "
            "demonstrates it; write one, or record demonstrations with python -m tools.record_demo "
            "and name their folder in cold_start.demonstrations"
        )


def run_cold_start(
    cfg: ColdStartConfig,
    model: PolicyModel,
    chat: Chat,
    kinds: list[TaskSpec],
    *,
    workdir: Path,
    seed: int,
    batch_cfg: batching.BatchConfig,
    task_dirs: Sequence[str] = (),
    recorded_sets: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """Trains and writes the merged model; returns its directory. Runs once per workdir.

    Args:
      kinds: the tasks that scripts demonstrate, in turn.
      seed: of the task instances, which come from the training range.
      task_dirs: folders of the user's own tasks (own/<name>).
      recorded_sets: files of recorded sets (recorded/<name>), by name.

    Raises:
      RestartError: `stop` was set; the same call continues.
      ConfigError: cfg.demonstrations has no usable demonstration, or one that cannot be expressed
        in this run's action format; or no script solved its task.
      VerifierError: a task without a scripted demonstration, or no browser.
    """
    target = workdir / MODEL_DIR
    if target.is_dir():  # complete: it is renamed into place at the end
        return target
    whole = nnx.merge(model.graphdef, model.trainable, model.frozen)
    kind_of_weight = nnx.Param if cfg.train == "all" else LoRAParam
    graphdef, trainable, frozen = nnx.split(whole, kind_of_weight, ...)

    recorded: list[Trajectory] = []
    if cfg.demonstrations:
        recorded = recorded_demonstrations.load(
            cfg.demonstrations,
            chat,
            model.inputs,
            base_hash=model.base_hash,
            keep_shortest=cfg.keep_shortest,
        )
        print(recorded_demonstrations.describe(recorded), flush=True)

    def batches_at(step: int) -> list[TrainBatch]:
        first = step * cfg.episodes_per_step
        if recorded:
            numbers = range(first, first + cfg.episodes_per_step)
            trajectories = [recorded_demonstrations.pick(recorded, n, seed) for n in numbers]
        else:
            trajectories = scripted.take(first, cfg.episodes_per_step)
        batches = batching.make_batches(trajectories, inputs=model.inputs, cfg=batch_cfg)
        tokens = [sum(turn_lengths(trajectory)) for trajectory in trajectories]
        return batching.fill(batches, weights_bt=token_weights(tokens, "token_mean"))

    trains = "all weights" if cfg.train == "all" else "adapters"
    optimizer = cfg.optimizer.resolved(trains)
    print(optimizer.describe(trainable, trains), flush=True)
    progress = Progress("cold start", cfg.steps)
    with (
        metrics.MetricsWriter(workdir / "cold_start") as writer,
        Demonstrator(task_dirs, recorded=recorded_sets, browsers=cfg.browsers) as demonstrator,
    ):
        scripted = ScriptedDemonstrations(
            demonstrator,
            model,
            chat,
            kinds,
            episodes=cfg.episodes,
            seed=seed,
            quality=cfg.quality,
        )
        if not recorded:
            scripted.keep(workdir / "cold_start" / "demonstrations", stop)

        def on_restore(first_step: int) -> None:
            # Restarted, because the time of demonstrations and earlier steps does not count.
            nonlocal progress
            progress = Progress("cold start", cfg.steps, first_step=first_step - 1)
            writer.truncate_from(first_step)

        def on_step(step: int, scalars: dict[str, float]) -> None:
            writer.write(step, scalars)
            progress.update(step)

        trained = supervised.train(
            (graphdef, trainable, frozen),
            batches_at,
            supervised.SupervisedConfig(steps=cfg.steps, optimizer=optimizer, log_every=1),
            StepConfig(
                vision_trainable=any(part in trainable for part in model.family.vision_parts),
                dropout_seed=seed,
            ),
            checkpoint_dir=workdir / "cold_start" / "checkpoints",
            on_step=on_step,
            on_restore=on_restore,
            stop=stop,
        )
    progress.close()
    # In the dtype of the base's files, whatever the run computes in: bfloat16 files stay bfloat16.
    dtype = stored_dtype(model.path)
    with new_directory(target) as directory:
        save_model(model.family, nnx.merge(graphdef, trained, frozen), directory, dtype=dtype)
        copy_tokenizer(model.path, directory)
        chat_config.write(directory, chat.cfg, model.family.chat)
        sync_files(directory)
    return target
