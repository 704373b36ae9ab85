"""Qwen2-VL: 2B, 7B and 72B."""

from uirl_jax.families.border import Family
from uirl_jax.families.qwen2_vl import chat, config, inputs, model, names

FAMILY = Family(
    model_type="qwen2_vl",
    read_config=config.read_config,
    to_config_json=config.Qwen2VLConfig.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="0-1000",
    make_model=model.Qwen2VL,
    init_cache=model.init_cache,
    weights=names.WEIGHTS,
)
