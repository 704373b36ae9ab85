"""The learner's and the engine's programs lower for NVIDIA GPUs, with cuDNN's attention inside.

Lowered on the CPU for the platform cuda: JAX's own rules for it run, and cuDNN's checks of shapes
and types; XLA's compiler for GPUs does not, which needs a card. What JAX would ask the card is
stated: compute capability 9.0 (H100) and cuDNN 9.13.
"""

import dataclasses
from unittest import mock

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from tests import test_plan
from tests.eight_devices import on_eight_devices
from tools.planner import programs
from uirl_jax.models import attention, blocks


@dataclasses.dataclass(frozen=True)
class Card:
    compute_capability: str = "9.0"


def lowered_for_cuda(names: tuple[str, ...], *, share_prompts: bool = False) -> dict[str, str]:
    """StableHLO of the 2B config with two layers of each tower, rows over all devices."""
    cfg = test_plan.run_config()
    batch = dataclasses.replace(cfg.learner.batch, share_prompts=share_prompts)
    cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, batch=batch))
    planned = test_plan.two_layers(programs.find_model(cfg.model.path))
    devices = tuple(jax.devices())
    run = programs.abstract_run(cfg, planned, len(devices), devices)
    local_devices = jax.local_devices
    with (
        mock.patch.object(attention, "platform", lambda: "gpu"),
        mock.patch.object(blocks, "platform", lambda: "gpu"),
        mock.patch.object(
            jax,
            "local_devices",
            lambda **where: [Card()] if where == {"backend": "gpu"} else local_devices(**where),
        ),
        mock.patch.object(cudnn, "check_cudnn_version", lambda: 91300),
        mock.patch.object(cudnn, "check_compute_capability", lambda least: float(least) <= 9.0),
        mock.patch.object(
            cudnn, "is_cuda_compute_capability_equal", lambda version: version == "9.0"
        ),
    ):
        return {
            name: traced.lower(lowering_platforms=("cuda",)).as_text()
            for name, traced in programs.trace_programs(run, names)
        }


def attention_calls(text: str) -> tuple[int, int]:
    """cuDNN's kernels in a program: forward, backward. Layers are a loop, so once a tower."""
    calls = text.count("stablehlo.custom_call @__cudnn$fmha")
    backward = text.count("stablehlo.custom_call @__cudnn$fmhaScaleBiasSoftmaxBackward")
    return calls - backward, backward


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: rows and weights cut over 8."""
    texts = lowered_for_cuda((*programs.TRAINING, *programs.SAMPLING))
    assert {name: attention_calls(text) for name, text in texts.items()} == {
        "score": (2, 0),  # the vision tower, the rows
        "gradients": (2, 1),  # the rows; once more backward, where remat computes them again
        "encode": (1, 0),
        "prefill": (0, 0),  # behind a cache: plain XLA
        "decode": (0, 0),
    }
    assert all("num_partitions = 8" in text for text in texts.values())
    # Every kernel works on a part: one row a device, not eight.
    assert "tensor<1x14336x12x128xbf16>" in texts["gradients"]


def test_programs_for_eight_gpus_lower_with_cudnns_attention():
    done = on_eight_devices("check_eight_devices", "test_gpu_lowering")
    assert done.returncode == 0, done.stderr[-3000:]


def test_shared_prompts_lower_for_a_gpu_with_cudnns_attention():
    if len(jax.devices()) > 8:
        pytest.skip("8 rows over more devices")
    texts = lowered_for_cuda(("gradients",), share_prompts=True)
    assert attention_calls(texts["gradients"]) == (2, 1)
