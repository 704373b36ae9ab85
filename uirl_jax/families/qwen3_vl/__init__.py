"""Qwen3-VL: 2B, 4B and 8B, Instruct."""

from typing import Any

from uirl_jax.families.border import Family
from uirl_jax.families.qwen import chat
from uirl_jax.families.qwen3_vl import config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.qwen3_vl.model import Qwen3VL

    return Qwen3VL(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.qwen3_vl.model import Qwen3VL

    return Qwen3VL.init_cache(*args)


FAMILY = Family(
    model_type="qwen3_vl",
    read_config=config.read_config,
    to_config_json=config.Qwen3VLConfig.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="0-1000",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
)
