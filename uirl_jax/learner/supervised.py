"""Supervised training on demonstrations: the cold start before RL, or a base model from scratch.

The caller provides the batches of each step, so that a restarted run continues with the next one.
Reads no shards and publishes no policy (see `learner.loop`).
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx

from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import RestartError, TrainingError
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.log_lines import key_values
from uirl_jax.types import TrainBatch


@dataclasses.dataclass(frozen=True)
class SupervisedConfig:
    """One supervised stage."""

    steps: int
    optimizer: learner_state.OptimizerConfig = dataclasses.field(
        default_factory=learner_state.OptimizerConfig
    )
    checkpoint_every: int = 100
    log_every: int = 20


def train(
    split: tuple[nnx.GraphDef, nnx.State, nnx.State],
    batches_at: Callable[[int], list[TrainBatch]],
    cfg: SupervisedConfig,
    step_cfg: learner_step.StepConfig,
    *,
    checkpoint_dir: Path,
    on_step: Callable[[int, dict[str, float]], None],
    on_restore: Callable[[int], object] = lambda step: None,
    stop: threading.Event | None = None,
) -> nnx.State:
    """Trains `trainable` for cfg.steps and returns it; continues from the newest good checkpoint.

    Args:
      split: graphdef, trainable and frozen of one model.
      batches_at: the batches of a step, which is one update; a step must always give the same.
      on_step: called every `log_every` steps with the step and its metrics.
      on_restore: called once, with the first step that this call will run.
      stop: ends the training after the current step.
    Raises:
      RestartError: `stop` was set; the state is saved.
      TrainingError: a loss or gradient norm is not finite; the last checkpoint is kept.
    """
    graphdef, trainable, frozen = split
    optimizer = learner_state.make_optimizer(cfg.optimizer, cfg.steps)
    steps = learner_step.make_steps(graphdef, optimizer, step_cfg)
    state = learner_state.init_state(trainable, optimizer)
    with Checkpointer(checkpoint_dir) as checkpointer:
        if restored := checkpointer.restore_latest(learner_state.abstract(state)):
            state = restored.arrays
            for line in restored.skipped:
                print(key_values("checkpoint_skipped", reason=line), flush=True)
        started_s, started_step = time.monotonic(), int(state.step)
        on_restore(started_step + 1)
        for step in range(started_step, cfg.steps):
            arrays = [learner_step.to_device(batch, None) for batch in batches_at(step)]
            state, device_metrics = steps.supervised_update(state, frozen, arrays)
            state = steps.next_step(state)
            last = step + 1 == cfg.steps
            if last or (step + 1) % cfg.log_every == 0:
                metrics = learner_step.to_floats(device_metrics)
                check_finite(step + 1, metrics)
                seconds = time.monotonic() - started_s
                metrics["learner/steps_per_s"] = (step + 1 - started_step) / max(seconds, 1e-9)
                on_step(step + 1, metrics)
            stopped = stop is not None and stop.is_set() and not last
            if last or stopped or (step + 1) % cfg.checkpoint_every == 0:
                checkpointer.save(step + 1, state, {"step": step + 1})
            if stopped:
                raise RestartError(
                    f"stopped after supervised step {step + 1} of {cfg.steps}; run the same "
                    "command again to continue"
                )
    return state.trainable


def check_finite(step: int, metrics: dict[str, float]) -> None:
    """Raises TrainingError with the step and every metric that is NaN or infinite."""
    wrong = [f"{name}={value}" for name, value in metrics.items() if not np.isfinite(value)]
    if wrong:
        raise TrainingError(
            f"step {step}: {', '.join(wrong)} is not finite; the last checkpoint is kept. "
            "Lower the learning rate, or inspect the step's batches"
        )
