"""Trains an NNX module on a loss of its own: what `make_page_model` teaches before answers.

The learner's steps know one loss, of tokens. Checkpoints, optimizer and the order of batches are as
there: interrupted, the same call goes on.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from tools import make_base_model
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import supervised
from uirl_jax.learner.state import OptimizerConfig, TrainState

_CHECKPOINT_EVERY, _LOG_EVERY = 250, 25

# (module, *batch) -> (loss, shares and losses to print)
Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


class Schedule(NamedTuple):
    """Of one stage. The rate, Muon's, rises for `warmup_steps` and then falls along a cosine."""

    name: str
    lr: float
    warmup_steps: int


class Run(NamedTuple):
    """One training of a stage."""

    steps: int
    batch_rows: int  # pages a step
    seed: int  # of the pages
    checkpoint_dir: Path


def train(
    module: nnx.Module,
    is_trained: Any,
    loss_of: Loss,
    draw_at: Callable[[int, int, int], tuple[Any, ...]],
    schedule: Schedule,
    run: Run,
) -> None:
    """Trains the filtered parameters of a module in place; goes on from its newest checkpoint.

    Prints every 25 steps the means since the last line.

    Args:
      is_trained: an NNX filter.
      draw_at: (seed, rows, step from 1) -> what the loss takes; a step always gives the same.
    Raises:
      TrainingError: a loss is not finite.
    """
    started_s = time.monotonic()
    graphdef, trainable, frozen = nnx.split(module, is_trained, ...)
    config = OptimizerConfig(
        name="muon",
        lr=schedule.lr,
        warmup_steps=min(schedule.warmup_steps, run.steps),
        schedule="cosine",
        weight_decay=0.01,
    )
    optimizer = learner_state.make_optimizer(config, run.steps)

    @jax.jit
    def update(
        state: TrainState, batch: tuple[Any, ...]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss(trainable: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
            return loss_of(nnx.merge(graphdef, trainable, frozen), *batch)

        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(state.trainable)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        weights = optax.apply_updates(state.trainable, updates)
        new = dataclasses.replace(
            state, trainable=weights, opt_state=opt_state, step=state.step + 1
        )
        return new, {"loss": value, **told}

    state = learner_state.init_state(trainable, optimizer)
    batches_at = make_base_model.drawn_ahead(lambda step: draw_at(run.seed, run.batch_rows, step))
    seen: list[dict[str, jax.Array]] = []
    with Checkpointer(run.checkpoint_dir) as checkpointer:
        if restored := checkpointer.restore_latest(learner_state.abstract(state)):
            state = restored.arrays
        for step in range(int(state.step) + 1, run.steps + 1):
            state, metrics = update(state, batches_at(step)[0])
            seen.append(metrics)
            if step % _LOG_EVERY == 0 or step == run.steps:
                means = {name: float(np.mean([m[name] for m in seen])) for name in metrics}
                seen = []
                supervised.check_finite(step, means)
                said = " ".join(f"{name}={value:.3f}" for name, value in means.items())
                minutes = (time.monotonic() - started_s) / 60
                print(
                    f"stage={schedule.name} step={step}/{run.steps} {said} minutes={minutes:.1f}",
                    flush=True,
                )
            if step % _CHECKPOINT_EVERY == 0 or step == run.steps:
                checkpointer.save(step, state, {"step": step})
    nnx.update(module, state.trainable)
