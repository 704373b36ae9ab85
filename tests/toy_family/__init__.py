"""A family of one's own: a small decoder with 1-D positions that reads a screen as 16 tokens.

Not one line outside this folder knows it; docs/add_a_model.md walks through it.
"""

from tests.toy_family import chat, config, inputs, model, names
from uirl_jax.families.border import Family

FAMILY = Family(
    model_type="toy",
    read_config=config.read_config,
    to_config_json=config.to_json,
    make_inputs=inputs.ToyInputs,
    chat=chat.LAYOUT,
    coordinates="",
    make_model=model.Toy,
    init_cache=model.init_cache,
    weights=names.WEIGHTS,
)
