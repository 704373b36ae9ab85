"""Qwen2-VL: 2B, 7B and 72B."""

from typing import Any

from uirl_jax.families.border import Family
from uirl_jax.families.qwen import chat
from uirl_jax.families.qwen.inputs import QwenInputs
from uirl_jax.families.qwen2_vl import config, names


def make_inputs(cfg: config.Qwen2VLConfig) -> QwenInputs:
    return QwenInputs(cfg.images, cfg.image_token_id)


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.qwen2_vl.model import Qwen2VL

    return Qwen2VL(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.qwen2_vl.model import Qwen2VL

    return Qwen2VL.init_cache(*args)


FAMILY = Family(
    model_type="qwen2_vl",
    read_config=config.read_config,
    to_config_json=config.Qwen2VLConfig.to_dict,
    make_inputs=make_inputs,
    chat=chat.LAYOUT,
    coordinates="0-1000",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
)
