"""FLOPs of a step against a count by hand, and the peak of the device that runs it."""

import types

import pytest

from uirl_jax.families import loading
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.learner.mfu import step_flops, utilisation, weights_in_products
from uirl_jax.models.lora import LoraConfig
from uirl_jax.rl.losses import PolicyLossConfig


def test_weights_are_those_of_the_text_blocks():
    model = loading.load("asset:tiny-ui-base", lora=LoraConfig(rank=2), seed=0)
    cfg = model.cfg
    kv = cfg.head_dim * cfg.num_key_value_heads
    attention = 2 * cfg.hidden_size * (cfg.hidden_size + kv)
    mlp = 3 * cfg.hidden_size * cfg.intermediate_size
    untied = 0 if cfg.tie_word_embeddings else cfg.hidden_size * cfg.vocab_size
    assert weights_in_products(model) == cfg.num_hidden_layers * (attention + mlp) + untied


def test_flops_count_every_pass():
    one = AlgorithmConfig(loss=PolicyLossConfig(kl_coefficient=0.0))
    assert step_flops(10, 3, one) == 4 * 30  # forward and gradient
    reference = AlgorithmConfig()
    assert step_flops(10, 3, reference) == 6 * 30
    more = AlgorithmConfig(epochs=2, minibatches=2)  # old policy, reference, two epochs
    assert step_flops(10, 3, more) == (2 + 2 + 8) * 30
    assert step_flops(10, 3, AlgorithmConfig(objective="imitation")) == 4 * 30


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("NVIDIA H100 80GB HBM3", 989e12), ("cpu", None)],
)
def test_mfu_is_of_the_device_that_runs(kind, peak):
    devices = [types.SimpleNamespace(device_kind=kind)] * 2
    found = utilisation(1e15, 10.0, devices)
    assert found.pop("learner/model_tflops_per_s") == pytest.approx(100.0)
    assert found == ({} if peak is None else {"learner/mfu": pytest.approx(1e14 / peak / 2)})
