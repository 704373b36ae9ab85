"""A model of one's own, from nothing: a convolutional network reads the screen, a decoder clicks.

Not one line of the package knows it; docs/add_a_model.md walks through it.
"""

from examples.own_model import chat, config, inputs, model, names
from uirl_jax.families.border import Family

FAMILY = Family(
    model_type="own_model",
    read_config=config.read_config,
    to_config_json=config.to_json,
    make_inputs=inputs.OwnInputs,
    chat=chat.LAYOUT,
    coordinates="0-1000",
    make_model=model.OwnModel,
    init_cache=model.init_cache,
    weights=names.WEIGHTS,
    vision_parts=("screen",),
)
