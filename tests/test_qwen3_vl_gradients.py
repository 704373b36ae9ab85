"""Qwen3-VL's loss and LoRA gradients against peft on transformers, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests import qwen3_vl_world as world
from tests.oracles import qwen3_vl_torch
from uirl_jax.models import peft_adapters, scoring
from uirl_jax.models.lora import LoraConfig

ALL_TARGETS = ("attention", "mlp", "vision", "merger")
LORA = LoraConfig(rank=3, alpha=6.0, targets=ALL_TARGETS)


def with_random_adapters(policy, seed: int = 7):
    rng = np.random.default_rng(seed)
    return dataclasses.replace(
        policy,
        trainable=jax.tree.map(
            lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), policy.trainable
        ),
    )


@pytest.mark.parametrize(
    ("config", "remat"),
    [("odd", "full"), pytest.param("plain", "dots", marks=pytest.mark.slow)],
)
# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_loss_and_every_lora_gradient_equal_those_of_peft(config, remat, tmp_path):
    """Of adapters in both towers and all mergers; cross-entropy of all words but the first."""
    peft = pytest.importorskip("peft")
    import torch

    policy = with_random_adapters(world.policy_of(config, LORA, remat))
    case = world.make_case(policy.inputs, "three_images_of_different_sizes")
    length = case.lengths[0]
    ids_t = case.rows.token_ids_bt[0, :length]
    words_t = np.flatnonzero(ids_t < 280)[1:]

    table = policy.family.weights
    peft_adapters.save_adapter(world.merged(policy), tmp_path / "adapters", table)
    wrapped = peft.PeftModel.from_pretrained(
        qwen3_vl_torch.make_reference(config), tmp_path / "adapters", is_trainable=True
    )
    labels_t = np.full(length, -100)
    labels_t[words_t] = ids_t[words_t]
    expected = wrapped(
        **qwen3_vl_torch.model_inputs(
            ids_t[None],
            world.pixels_of(policy.inputs, case.screens),
            [screen.layout for screen in case.screens],
        ),
        labels=torch.tensor(labels_t[None]),
    ).loss
    expected.backward()

    @jax.jit
    def loss_and_gradient(adapters):
        def loss(adapters):
            model = nnx.merge(policy.graphdef, adapters, policy.frozen)
            x_btd = model.hidden(case.rows, model.encode_images(case.vision))
            logprobs_bt = scoring.token_logprobs(model, x_btd, case.rows.token_ids_bt)
            return -logprobs_bt[0, words_t].mean()

        return jax.value_and_grad(loss)(adapters)

    loss, gradient = loss_and_gradient(policy.trainable)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    # Gradients have the names of their adapters where they are written in their place.
    model = nnx.merge(policy.graphdef, gradient, policy.frozen)
    peft_adapters.save_adapter(model, tmp_path / "gradient", table)
    ours = load_file(tmp_path / "gradient" / "adapter_model.safetensors")
    theirs = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(array).max() for array in theirs.values())
    for name, array in theirs.items():
        assert np.abs(array).max() > 1e-4 * largest, f"{name}: hardly a gradient to compare"
        worst = np.abs(ours[name] - array).max() / np.abs(array).max()
        assert worst < 1e-4, f"{name}: {worst:.1e} of the largest value"
