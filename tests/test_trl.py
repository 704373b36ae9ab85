"""Our losses on TRL's own: GRPOTrainer._compute_loss, run as it is, on the same logits."""

import collections
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from uirl_jax.rl import losses
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.weights import token_weights

ROWS, TOKENS, VOCABULARY = 4, 7, 11
MAX_TOKENS = 9
# TRL's loss type -> our aggregation.
AGGREGATIONS = {
    "grpo": "trajectory_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant_length",
}


def example(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.array([TOKENS, 3, 1, 5])
    arrays = {
        "logits_btv": rng.normal(size=(ROWS, TOKENS, VOCABULARY)),
        "old_bt": -rng.exponential(2.4, (ROWS, TOKENS)),
        "ref_bt": -rng.exponential(2.4, (ROWS, TOKENS)),
        "lag_bt": rng.normal(0, 0.5, (ROWS, TOKENS)),
        "advantages_b": rng.normal(size=ROWS),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    # Near enough that some tokens are clipped and some are not.
    logprobs_btv = jax.nn.log_softmax(arrays["logits_btv"])
    token_ids_bt = rng.integers(0, VOCABULARY, (ROWS, TOKENS))
    new_bt = np.take_along_axis(np.asarray(logprobs_btv), token_ids_bt[..., None], 2)[..., 0]
    arrays["old_bt"] = (new_bt + rng.normal(0, 0.3, new_bt.shape)).astype(np.float32)
    mask_bt = (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)
    return arrays | {"token_ids_bt": token_ids_bt, "mask_bt": mask_bt}


def logprobs_and_entropies(logits_btv: Any, token_ids_bt: Any, library: Any) -> Any:
    if library is torch:
        log_btv = torch.log_softmax(logits_btv, -1)
        picked = log_btv.gather(-1, torch.tensor(token_ids_bt)[..., None])[..., 0]
        return picked, -(log_btv.exp() * log_btv).sum(-1)
    log_btv = jax.nn.log_softmax(logits_btv)
    picked = jnp.take_along_axis(log_btv, token_ids_bt[..., None], 2)[..., 0]
    return picked, -(jnp.exp(log_btv) * log_btv).sum(-1)


def trl_loss(e: dict, loss_type: str, level: str, cfg: PolicyLossConfig, corrected: bool):
    """(loss, gradient by logits) of TRL's function, without a model, a dataset, an accelerator."""
    logits_btv = torch.tensor(e["logits_btv"], requires_grad=True)
    logprobs_bt, entropies_bt = logprobs_and_entropies(logits_btv, e["token_ids_bt"], torch)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs_bt, entropies_bt, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=cfg.kl_coefficient,
        epsilon_low=cfg.clip_low,
        epsilon_high=cfg.clip_high,
        loss_type=loss_type,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=MAX_TOKENS,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        args=types.SimpleNamespace(
            use_bias_correction_kl=False, delta=None, steps_per_generation=1
        ),
        _entropy_bonus_enabled=cfg.entropy_coefficient > 0,
        use_adaptive_entropy=False,
        entropy_coef=cfg.entropy_coefficient,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )
    lag_bt = torch.tensor(e["lag_bt"]).exp().clamp(max=cfg.importance_cap)
    inputs = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1), dtype=torch.long),
        "completion_ids": torch.tensor(e["token_ids_bt"]),
        "completion_mask": torch.tensor(e["mask_bt"]),
        "advantages": torch.tensor(e["advantages_b"]),
        "old_per_token_logps": torch.tensor(e["old_bt"]),
        "ref_per_token_logps": torch.tensor(e["ref_bt"]),
        "importance_sampling_ratio": lag_bt,
        "num_items_in_batch": torch.tensor(e["mask_bt"]).sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logits_btv.grad.numpy()


def our_loss(e: dict, loss_type: str, level: str, cfg: PolicyLossConfig, corrected: bool):
    mask_bt = e["mask_bt"]
    shares = token_weights(
        mask_bt.sum(1).astype(int).tolist(), AGGREGATIONS[loss_type], max_tokens=MAX_TOKENS
    )
    weights_bt = (mask_bt * np.array(shares)[:, None]).astype(np.float32)

    def loss(logits_btv):
        logprobs_bt, entropies_bt = logprobs_and_entropies(logits_btv, e["token_ids_bt"], jax)
        return losses.clipped_policy_loss(
            logprobs_bt,
            old_bt=e["old_bt"],
            behaviour_bt=e["old_bt"] - (e["lag_bt"] if corrected else 0.0),
            ref_bt=e["ref_bt"],
            advantages_bt=e["advantages_b"][:, None] * mask_bt,
            weights_bt=weights_bt,
            turn_ids_bt=mask_bt.astype(np.int32),
            entropies_bt=entropies_bt,
            cfg=cfg,
        )[0]

    value, gradient = jax.value_and_grad(loss)(e["logits_btv"])
    return float(value), np.asarray(gradient)


@pytest.mark.parametrize("corrected", [False, True], ids=["on-policy", "importance-sampling"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_loss_and_gradient_equal_trls(loss_type: str, level: str, corrected: bool):
    for seed in range(3):
        e = example(seed)
        cfg = PolicyLossConfig(
            clip_low=0.2,
            clip_high=0.28,
            ratio="token" if level == "token" else "turn",
            kl_coefficient=0.04,
        )
        expected, expected_gradient = trl_loss(e, loss_type, level, cfg, corrected)
        got, gradient = our_loss(e, loss_type, level, cfg, corrected)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(
            gradient, expected_gradient, rtol=0, atol=1e-5 * np.abs(expected_gradient).max()
        )


def test_entropy_bonus_equals_trls():
    """Of a token mean: TRL's bonus is one whatever the loss type is, ours follows the weights."""
    e = example(0)
    cfg = PolicyLossConfig(kl_coefficient=0.0, entropy_coefficient=0.1)
    expected, expected_gradient = trl_loss(e, "dapo", "token", cfg, False)
    got, gradient = our_loss(e, "dapo", "token", cfg, False)
    assert got == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(
        gradient, expected_gradient, rtol=0, atol=1e-5 * np.abs(expected_gradient).max()
    )
