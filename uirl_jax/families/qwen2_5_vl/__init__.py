"""Qwen2.5-VL: 3B, 7B, 32B and 72B; UI-TARS-1.5-7B."""

from typing import Any

from uirl_jax.families.border import Family
from uirl_jax.families.qwen import chat
from uirl_jax.families.qwen2_5_vl import config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.qwen2_5_vl.model import Qwen25VL

    return Qwen25VL(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.qwen2_5_vl.model import Qwen25VL

    return Qwen25VL.init_cache(*args)


FAMILY = Family(
    model_type="qwen2_5_vl",
    read_config=config.read_config,
    to_config_json=config.Qwen25VLConfig.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    # Pixels of the resized image (QwenLM/Qwen3-VL issues 676 and 866; bytedance/UI-TARS issue 157).
    coordinates="image",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
)
