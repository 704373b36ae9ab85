"""A tower's blocks as a loop and as a scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uirl_jax.models import blocks
from uirl_jax.models.blocks import Remat, through

DEPTH, ROWS, DIM = 3, 4, 16


def make_loss(remat: Remat):
    """Of what leaves the last block and of every block's output."""

    def body(x_rd, at):
        kernel_dd, number = at
        x_rd = x_rd + jnp.tanh(x_rd @ kernel_dd) * number
        return x_rd, (x_rd.sum(axis=1), None)

    def loss(x_rd, kernel_ldd):
        x_rd, (sums_lr, nothing) = through(body, x_rd, (kernel_ldd, jnp.arange(DEPTH)), remat)
        assert sums_lr.shape == (DEPTH, ROWS) and nothing is None
        return (x_rd**2).sum() + (sums_lr * jnp.arange(1.0, 1 + DEPTH)[:, None]).sum()

    return loss


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_loop_is_the_scan(remat, monkeypatch):
    keys = jax.random.split(jax.random.key(0))
    x_rd = jax.random.normal(keys[0], (ROWS, DIM))
    kernel_ldd = jax.random.normal(keys[1], (DEPTH, DIM, DIM)) / 4

    def derived():
        loss = jax.jit(jax.value_and_grad(make_loss(remat), argnums=(0, 1)))
        program = str(loss.lower(x_rd, kernel_ldd).as_text())
        return "stablehlo.while" in program, loss(x_rd, kernel_ldd)

    loops, of_loop = derived()
    monkeypatch.setattr(blocks, "_LOOP_BLOCKS", DEPTH - 1)
    scans, of_scan = derived()
    assert (loops, scans) == (False, True)
    # Equal bit for bit on an AMD EPYC; another CPU may sum float32 in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), of_loop, of_scan
    )


@pytest.mark.parametrize("remat, recomputed", [("none", False), ("dots", True), ("full", True)])
def test_a_loop_recomputes_what_remat_says(remat, recomputed):
    """What it would have kept is not read again from the first pass: XLA must not merge the two."""
    x_rd, kernel_ldd = jnp.ones((ROWS, DIM)), jnp.ones((DEPTH, DIM, DIM))
    program = jax.jit(jax.grad(make_loss(remat), argnums=1)).lower(x_rd, kernel_ldd).as_text()
    assert program.count("stablehlo.tanh") == DEPTH * (2 if recomputed else 1)
    assert ("optimization_barrier" in program) == recomputed
