"""Idefics2: 8B."""

from typing import Any

from uirl_jax.families.border import Family
from uirl_jax.families.idefics2 import chat, config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.idefics2.model import Idefics2

    return Idefics2(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.idefics2.model import Idefics2

    return Idefics2.init_cache(*args)


# Turns are opened by plain text, "User:", and ended by a token: an instruction can spell an opening
# but cannot end its own turn.
FAMILY = Family(
    model_type="idefics2",
    read_config=config.read_config,
    to_config_json=config.Idefics2Config.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
    max_positions=config.max_positions,
    processor_json=config.processor_json,
)
