"""What an algorithm costs beside the model's passes: batches, advantages, loss, optimizer.

    python -m tools.bench overhead --json=overhead.json

On the quickstart's model, the smallest there is: with a larger one the passes grow and the rest
does not. A step is `learner.algorithm.learn` on 64 demonstrated episodes, 8 groups of 8; medians.
Batches (decoding screenshots, packing) are the data path's work, and told apart.
"""

import argparse
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.algorithms import ALGORITHMS
from uirl_jax import platform_flags
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.demonstrations.scripted import demonstrate
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.learner import algorithm
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.rl import losses
from uirl_jax.seeds import train_seed
from uirl_jax.shards import batching
from uirl_jax.types import TrainBatch, Trajectory

PARTS = ("batches", "advantages", "loss", "optimizer")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each, after the first")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """By algorithm the seconds of a step and of its parts."""
    platform_flags.set_defaults()
    return {"rounds": args.rounds, "runs": {name: _one(name, args.rounds) for name in args.names}}


def _one(name: str, rounds: int) -> dict[str, float]:
    module = importlib.import_module(f"configs.{name}")
    cfg = reading.from_config(RunConfig, module.get_config())
    model = loading.load(cfg.model.path, lora=cfg.model.lora, seed=0)
    groups = _groups(cfg, model)
    optimizer_cfg = dataclasses.replace(cfg.learner.optimizer, schedule="constant")
    optimizer = learner_state.make_optimizer(optimizer_cfg, 1000)
    critic_cfg = cfg.algorithm.critic if cfg.algorithm.has_critic else None
    critic = None
    if critic_cfg is not None:
        critic_optimizer = learner_state.make_critic_optimizer(critic_cfg)
        critic = learner_state.init_critic(model.cfg.hidden_size, critic_optimizer)
    state = learner_state.init_state(model.trainable, optimizer, critic=critic)
    steps = learner_step.make_steps(
        model.graphdef,
        optimizer,
        learner_step.StepConfig(
            cfg.algorithm.loss,
            critic_cfg,
            use_reference=cfg.algorithm.use_reference,
            recompute_old=cfg.algorithm.recompute_old,
        ),
    )
    seconds = {part: [] for part in (*PARTS, "step")}
    made: list[TrainBatch] = []  # of a step

    def make_batches(records: list[Trajectory]) -> list[TrainBatch]:
        batches = batching.make_batches(records, inputs=model.inputs, cfg=cfg.learner.batch)
        made.extend(batches)
        return batches

    applied: list[float] = []
    steps = dataclasses.replace(steps, apply=_timed(steps.apply, applied))
    for number in range(1 + rounds):
        applied.clear()
        made.clear()
        started_s = time.perf_counter()
        state, metrics, _ = algorithm.learn(
            groups,
            cfg.algorithm,
            steps,
            state,
            model.frozen,
            make_batches=make_batches,
            mesh=None,
            seed=0,
        )
        jax.block_until_ready(state)
        if number == 0:  # compiles
            continue
        seconds["step"].append(time.perf_counter() - started_s)
        seconds["batches"].append(metrics["time/batches_s"])
        seconds["advantages"].append(metrics["time/advantages_s"])
        seconds["optimizer"].append(sum(applied))
        losses_a_step = len(made) * metrics["learner/updates"] / cfg.algorithm.minibatches
        seconds["loss"].append(_loss_seconds(cfg.algorithm.loss, made[0]) * losses_a_step)
    medians = {part: statistics.median(of) for part, of in seconds.items()}
    own = sum(medians[part] for part in PARTS[1:])
    return medians | {
        "own": own / medians["step"],
        "with_batches": (own + medians["batches"]) / medians["step"],
    }


def _timed(apply: Callable[..., Any], applied: list[float]) -> Callable[..., Any]:
    def timed(state: Any, total: Any) -> Any:
        jax.block_until_ready(total)
        started_s = time.perf_counter()
        out = jax.block_until_ready(apply(state, total))
        applied.append(time.perf_counter() - started_s)
        return out

    return timed


def _loss_seconds(cfg: losses.PolicyLossConfig, batch: TrainBatch) -> float:
    """Value and gradient of the loss, logprobs given."""
    logprobs_bt = jnp.full(batch.weights_bt.shape, -0.5, jnp.float32)
    fixed = [jnp.asarray(of) for of in (batch.advantages_bt, batch.weights_bt, batch.turn_ids_bt)]
    _policy_loss(logprobs_bt, *fixed, cfg)[0].block_until_ready()
    started_s = time.perf_counter()
    jax.block_until_ready(_policy_loss(logprobs_bt, *fixed, cfg))
    return time.perf_counter() - started_s


@functools.partial(jax.jit, static_argnums=4)
def _policy_loss(
    logprobs_bt: jax.Array,
    advantages_bt: jax.Array,
    weights_bt: jax.Array,
    turn_ids_bt: jax.Array,
    cfg: losses.PolicyLossConfig,
) -> tuple[jax.Array, jax.Array]:
    def loss(logprobs_bt: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return losses.clipped_policy_loss(
            logprobs_bt,
            old_bt=logprobs_bt - 0.1,
            behaviour_bt=logprobs_bt + 0.1,
            ref_bt=logprobs_bt - 0.2,
            advantages_bt=advantages_bt,
            weights_bt=weights_bt,
            turn_ids_bt=turn_ids_bt,
            cfg=cfg,
        )

    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs_bt)
    return value, gradient


def _groups(cfg: RunConfig, model: loading.PolicyModel) -> list[list[Trajectory]]:
    """As the base would play: some of every group are right, what was sampled has a logprob."""
    chat = Chat(model.path, cfg.chat, model.family.chat)
    groups = []
    for index in range(cfg.learner.groups_per_step):
        task = dataclasses.replace(cfg.kinds[0], seed=train_seed(0, index))
        members = []
        for member in range(cfg.actor.group_size):
            rng = np.random.default_rng([index, member])
            record = demonstrate(task, chat, model.inputs, rng, quality=0.4)
            turns = tuple(
                dataclasses.replace(
                    turn,
                    logprobs=turn.logprobs - 0.5,
                    policy_versions=np.zeros_like(turn.policy_versions),
                )
                for turn in record.turns
            )
            members.append(dataclasses.replace(record, turns=turns, group_id=str(index)))
        groups.append(members)
    return groups


def format_table(result: dict[str, Any]) -> str:
    head = "".join(f"{part:>12s}" for part in PARTS)
    lines = [
        f"milliseconds, median of {result['rounds']}; own: advantages, loss and optimizer",
        f"{'':20s}{'step':>10s}{head}{'own':>8s}{'with batches':>14s}",
    ]
    for name, row in result["runs"].items():
        parts = "".join(f"{1000 * row[part]:>12.1f}" for part in PARTS)
        shares = f"{row['own']:>8.1%}{row['with_batches']:>14.1%}"
        lines.append(f"{name:20s}{1000 * row['step']:>10.0f}{parts}{shares}")
    return "\n".join(lines)
