"""How much of the device's arithmetic a step uses: learner/model_tflops_per_s and learner/mfu.

Counted are the matrix products of the text blocks: 2 FLOPs a weight and token for a forward pass, 2
more for the gradient of what flows through a weight, 2 more for that of the weight if it is trained
itself. Left out are attention scores, vision tower, vocabulary and recomputation, so that both
numbers are lower bounds. MFU as in PaLM (arXiv:2204.02311, appendix B), with 4 instead of 6 FLOPs
where weights are frozen.
"""

from collections.abc import Sequence
from typing import Any

import jax

from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.models.sharding import leaf_names

# Dense bfloat16 products, by what jax.Device.device_kind begins with. Source: cloud.google.com/tpu,
# NVIDIA's datasheets.
PEAK_FLOPS_PER_S = {
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,  # v5p; after v5e, whose name begins with it
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,  # after L40S, whose name begins with it
    "NVIDIA GeForce RTX 4090": 165e12,
}


def weights_in_products(model: PolicyModel) -> int:
    """Weights of the projections outside the vision tower, frozen or trained; no adapters."""
    parts = (model.frozen, model.trainable)
    named = [("/".join(leaf_names(p)), x) for t in parts for p, x in jax.tree.leaves_with_path(t)]
    others = (*(f"{part}/" for part in model.family.vision_parts), "text/lm_head/")
    return sum(
        array.size
        for name, array in named
        if name.endswith("/kernel") and not name.startswith(others)
    )


def step_flops(weights: int, tokens: int, cfg: AlgorithmConfig, *, all_trained: bool) -> float:
    """FLOPs of one step on so many tokens that are not padding.

    Args: all_trained: whether the weights themselves are trained, and not adapters beside them.
    """
    forward = cfg.recompute_old + cfg.use_reference if cfg.objective == "policy" else 0
    return 2.0 * weights * tokens * ((3 if all_trained else 2) * cfg.epochs + forward)


def utilisation(
    flops: float, seconds: float, devices: Sequence[Any] | None = None
) -> dict[str, float]:
    """The metrics; without learner/mfu on a device whose peak is not known, such as a CPU."""
    devices = jax.devices() if devices is None else devices
    rate = flops / max(seconds, 1e-9)
    metrics = {"learner/model_tflops_per_s": rate / 1e12}
    kind = devices[0].device_kind
    peaks = [peak for name, peak in PEAK_FLOPS_PER_S.items() if kind.startswith(name)]
    if peaks:
        metrics["learner/mfu"] = rate / (peaks[0] * len(devices))
    return metrics
