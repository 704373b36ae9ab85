"""What the quickstart claims, on the model that ships: minutes, so marked slow and run by hand."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from configs import quickstart
from tests.changed_advantages import Change, changed_advantages
from uirl_jax import evaluation
from uirl_jax.config import reading, schema
from uirl_jax.roles.all import run_all
from uirl_jax.run import Run, open_run

STEPS = 60


def no_advantages(tokens: list[np.ndarray]) -> list[np.ndarray]:
    return [np.zeros_like(of) for of in tokens]


def own_advantages(tokens: list[np.ndarray]) -> list[np.ndarray]:
    return tokens


def train(
    workdir: Path, advantages: Change, *, steps: int = STEPS, kl_coefficient: float | None = None
) -> dict[str, evaluation.EvalResult]:
    cfg = quickstart.get_config()
    if kl_coefficient is not None:
        cfg.algorithm.loss.kl_coefficient = kl_coefficient
    cfg.model.path = str(Path(__file__).parents[1] / cfg.model.path)
    cfg.learner.steps = steps
    resolved = reading.from_config(schema.RunConfig, cfg)
    run = Run(resolved, workdir, open_run(workdir, resolved))
    with changed_advantages(advantages):
        run_all(run, threading.Event())
    return evaluation.read_results(workdir)


@pytest.mark.slow
def test_quickstart_learns_from_advantages_and_from_nothing_else(tmp_path):
    learnt = train(tmp_path / "grpo", own_advantages)
    assert learnt["before"].rate <= 0.5
    assert learnt["after"].rate >= 0.9
    control = train(tmp_path / "zero", no_advantages)
    assert control["before"].successes == learnt["before"].successes
    # Without advantages the only gradient is the KL's, which is rounding where the policy is the
    # base; Adam makes steps of that too, so that a few instances change sides. None are gained.
    assert control["before"].low < control["after"].rate < control["before"].high


@pytest.mark.slow
def test_quickstart_without_advantages_and_kl_changes_nothing(tmp_path):
    control = train(tmp_path, no_advantages, steps=10, kl_coefficient=0.0)
    assert control["after"].successes == control["before"].successes
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("learner/grad_norm") for line in lines] == [None, *[0.0] * 10]
