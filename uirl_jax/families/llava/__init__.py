"""LLaVA-1.5: 7B and 13B."""

from typing import Any

from uirl_jax.families.border import Family
from uirl_jax.families.llava import chat, config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.llava.model import Llava

    return Llava(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.llava.model import Llava

    return Llava.init_cache(*args)


# A context may hold several screenshots, although the published models were trained on one: they
# know no screens either, so what they do with them is learnt here, one or several. Their turns are
# opened by plain text: an instruction that spells "USER:" or "ASSISTANT:" cannot be told from one.
FAMILY = Family(
    model_type="llava",
    read_config=config.read_config,
    to_config_json=config.LlavaConfig.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
    max_positions=config.max_positions,
    processor_json=config.processor_json,
)
