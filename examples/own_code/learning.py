"""An advantage, a loss and two callbacks of one's own: docs/own_code.md."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uirl_jax.learner.loop import StepReport
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.types import Trajectory

WANTED_SUCCESS = 0.95


def above_median(
    group: Sequence[Trajectory],
    token_rewards: Sequence[np.ndarray],
    turn_lengths: Sequence[Sequence[int]],
) -> list[np.ndarray]:
    """+1 for the episodes above the group's median return, -1 for those below, 0 at it."""
    returns_g = np.array([rewards_s.sum() for rewards_s in token_rewards])
    signs_g = np.sign(returns_g - np.median(returns_g))
    return [
        np.full(len(rewards_s), sign, np.float32)
        for rewards_s, sign in zip(token_rewards, signs_g, strict=True)
    ]


def cispo(
    logprobs_bt: jax.Array,
    *,
    old_bt: jax.Array,
    advantages_bt: jax.Array,
    weights_bt: jax.Array,
    cfg: PolicyLossConfig,
    **unused: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """CISPO (arXiv:2506.13585): the clipped ratio is a weight without gradient, so that
    clipped tokens keep theirs."""
    sampled_bt = weights_bt > 0
    # Undefined outside the sampled tokens: masked before exp.
    ratio_bt = jnp.exp(jnp.where(sampled_bt, logprobs_bt - old_bt, 0.0))
    weight_bt = jax.lax.stop_gradient(jnp.clip(ratio_bt, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high))
    loss_bt = -weights_bt * weight_bt * advantages_bt * logprobs_bt
    loss = jnp.where(sampled_bt, loss_bt, 0.0).sum()
    return loss, {"actor/policy_loss": jnp.where(sampled_bt, -ratio_bt * advantages_bt, 0.0).sum()}


def stop_when_solved(report: StepReport) -> str | None:
    """Ends the run after a step in which almost every episode was a success."""
    success = report.metrics["success/mean"]
    return f"success is {success:.0%}" if success >= WANTED_SUCCESS else None


def log_failures(report: StepReport) -> None:
    """Appends what failed in each step to failures.jsonl in the current folder."""
    failed = [
        {"step": report.step, "task": trajectory.task.name, "seed": trajectory.task.seed}
        for group in report.groups
        for trajectory in group
        if not trajectory.success
    ]
    with Path("failures.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in failed)
