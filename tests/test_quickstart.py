"""What the quickstart claims, on the model that ships: minutes, so marked slow and run by hand."""

import threading
from pathlib import Path

import numpy as np
import pytest

from configs import quickstart
from uirl_jax import config, evaluate, main, run_config

STEPS = 60


def train(workdir: Path, advantages) -> dict[str, evaluate.EvalResult]:
    cfg = quickstart.get_config()
    cfg.model.path = str(Path(__file__).parents[1] / cfg.model.path)
    cfg.learner.steps = STEPS
    resolved = config.from_config(run_config.RunConfig, cfg)
    run = main.Run(resolved, workdir, main.open_run(workdir, resolved))
    main.run_all(run, threading.Event(), advantages)
    return evaluate.read_results(workdir)


@pytest.mark.slow
def test_quickstart_learns_from_advantages_and_from_nothing_else(tmp_path):
    learnt = train(tmp_path / "grpo", main.group_normalised)
    assert learnt["before"].rate <= 0.5
    assert learnt["after"].rate >= 0.9
    control = train(tmp_path / "zero", lambda rewards_g: np.zeros(len(rewards_g), np.float32))
    assert control["before"].successes == learnt["before"].successes
    # Without advantages the only gradient is the KL's, which is rounding where the policy is the
    # base; Adam makes steps of that too, so that a few instances change sides. None are gained.
    assert control["before"].low < control["after"].rate < control["before"].high
