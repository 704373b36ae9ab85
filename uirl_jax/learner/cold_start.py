"""The stage before RL: supervised steps on demonstrations, written as a new base model.

Scripts demonstrate the run's tasks, or people did: `cold_start.demonstrations`.

What comes out is a model directory like any other (workdir/cold_start/model), so that GRPO starts
from it with fresh adapters and takes it, adapters off, as its reference. Uses `supervised` for the
steps; publishes nothing.
"""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flax import nnx

from uirl_jax import metrics
from uirl_jax.demonstrations.scripted import Demonstrator
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
from uirl_jax.store.files import new_directory
from uirl_jax.types import TaskSpec, TrainBatch, Trajectory

MODEL_DIR = Path("cold_start") / "model"  # in the workdir


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
    """How long, on what, and which weights move."""

    steps: int = dataclasses.field(default=0, metadata={"min": 0, "help": "0: no such stage"})
    episodes_per_step: int = dataclasses.field(default=32, metadata={"min": 1})
    quality: float = dataclasses.field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    # Scripted demonstrations that are played, kept and come back in epochs; 0: always new ones.
    episodes: int = dataclasses.field(default=0, metadata={"min": 0})
    browsers: int = dataclasses.field(default=2, metadata={"min": 1})  # that play them at once
    train: Literal["lora", "all"] = "lora"
    # Folders that tools.record_demo wrote: what people did there is learnt instead of scripts.
    demonstrations: tuple[str, ...] = ()
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


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
    stop: threading.Event | None = None,
) -> Path:
    """Trains, and writes the merged model; returns its directory. Done once a workdir.

    Args:
      kinds: the tasks that scripts demonstrate, in turn.
      seed: of the instances, which come from the training range.
      task_dirs: where tasks of one's own are (own/<name>).

    Raises:
      RestartError: `stop` was set; the same call carries on.
      ConfigError: cfg.demonstrations has none, or some that this run cannot learn from; or no
        script solved its task.
      VerifierError: a task that no script demonstrates, or no browser.
    """
    target = workdir / MODEL_DIR
    if target.is_dir():  # renamed into place when it was whole
        return target
    whole = nnx.merge(model.graphdef, model.lora, model.frozen)
    kind_of_weight = nnx.Param if cfg.train == "all" else LoRAParam
    graphdef, trainable, frozen = nnx.split(whole, kind_of_weight, ...)

    recorded: list[Trajectory] = []
    if cfg.demonstrations:
        recorded = recorded_demonstrations.load(cfg.demonstrations, chat, model.inputs)
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
    progress = metrics.Progress("cold start", cfg.steps)
    with (
        metrics.MetricsWriter(workdir / "cold_start") as writer,
        Demonstrator(task_dirs, browsers=cfg.browsers) as demonstrator,
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
            nonlocal progress  # anew: neither demonstrations nor older steps tell its speed
            progress = metrics.Progress("cold start", cfg.steps, first_step=first_step - 1)
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
    # In the files' own dtype, whatever a run holds weights in: a base of bfloat16 stays as small.
    dtype = stored_dtype(model.path)
    with new_directory(target) as directory:
        save_model(model.family, nnx.merge(graphdef, trained, frozen), directory, dtype=dtype)
        copy_tokenizer(model.path, directory)
    return target
