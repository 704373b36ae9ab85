"""Training a module on a loss of its own; `test_page_sight` has its checkpoints and its errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tools.page_model import module_training
from tools.page_model.module_training import Run, Schedule


class Line(nnx.Module):
    """slope * x + height; `height` is not trained here."""

    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.zeros(()))
        self.height = nnx.Param(jnp.ones(()))


def loss_of(line: Line, x: np.ndarray, step: np.ndarray):
    loss = jnp.mean((line.slope[...] * x + line.height[...] - 3 * x - 1) ** 2)
    return loss, {"step": step}


def draw(seed: int, rows: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, step])
    return rng.normal(size=rows), np.float32(step)


def train(tmp_path, steps: int) -> Line:
    line = Line()
    run = Run(steps, batch_rows=8, seed=0, checkpoint_dir=tmp_path)
    schedule = Schedule("line", lr=0.2, warmup_steps=2)
    module_training.train(line, nnx.PathContains("slope"), loss_of, draw, schedule, run)
    return line


def test_what_the_filter_names_is_trained_in_place(tmp_path):
    line = train(tmp_path, 80)
    assert float(line.slope[...]) == pytest.approx(3, abs=0.1)
    assert float(line.height[...]) == 1


def test_lines_are_means_since_the_last_line(tmp_path, capfd):
    train(tmp_path, 30)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("minutes=")[0].rsplit("step=", 1)[1] for line in lines] == [
        "13.000 ",  # of 1 to 25
        "28.000 ",  # of 26 to 30
    ]
    assert [line.split()[:2] for line in lines] == [
        ["stage=line", "step=25/30"],
        ["stage=line", "step=30/30"],
    ]
