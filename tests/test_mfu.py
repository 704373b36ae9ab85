"""FLOPs of a step against a count by hand, and the peak of the device that runs it."""

import types

import pytest

from tests import tiny_model
from uirl_jax.families import loading
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.mfu import step_flops, utilisation, weights_in_products
from uirl_jax.models.lora import LoraConfig
from uirl_jax.rl.losses import PolicyLossConfig


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("lora", [LoraConfig(rank=2), None])
def test_weights_are_those_of_the_text_blocks(tmp_path, lora, is_tied):
    path = tiny_model.write(tmp_path, tied=is_tied)
    model = loading.load(path, lora=lora, seed=0)
    cfg = model.cfg
    kv = cfg.head_dim * cfg.num_key_value_heads
    attention = 2 * cfg.hidden_size * (cfg.hidden_size + kv)
    mlp = 3 * cfg.hidden_size * cfg.intermediate_size
    assert weights_in_products(model) == cfg.num_hidden_layers * (attention + mlp)


def test_flops_count_every_pass():
    one = AlgorithmConfig(loss=PolicyLossConfig(kl_coefficient=0.0))
    assert step_flops(10, 3, one, all_trained=False) == 4 * 30  # forward and gradient
    assert step_flops(10, 3, one, all_trained=True) == 6 * 30  # the weights' gradients, too
    reference = AlgorithmConfig()
    assert step_flops(10, 3, reference, all_trained=False) == 6 * 30
    more = AlgorithmConfig(epochs=2, minibatches=2)  # old policy, reference, two epochs
    assert step_flops(10, 3, more, all_trained=False) == (2 + 2 + 8) * 30
    assert step_flops(10, 3, AlgorithmConfig(objective="imitation"), all_trained=False) == 4 * 30


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("NVIDIA H100 80GB HBM3", 989e12), ("cpu", None)],
)
def test_mfu_is_of_the_device_that_runs(kind, peak):
    devices = [types.SimpleNamespace(device_kind=kind)] * 2
    found = utilisation(1e15, 10.0, devices)
    assert found.pop("learner/model_tflops_per_s") == pytest.approx(100.0)
    assert found == ({} if peak is None else {"learner/mfu": pytest.approx(1e14 / peak / 2)})
