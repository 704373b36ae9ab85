"""Florence-2: base and large."""

from typing import Any

from uirl_jax.families.border import Capabilities, Family
from uirl_jax.families.florence2 import chat, config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.florence2.model import Florence2

    return Florence2(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.florence2.model import Florence2

    return Florence2.init_cache(*args)


# The encoder reads a context as a whole, and the next turn's is another one: its history is text.
# The models were trained on one image.
FAMILY = Family(
    model_type="florence2",
    read_config=config.read_config,
    to_config_json=config.Florence2Config.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="loc_1000",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
    text_blocks=("text", "decoder"),
    capabilities=Capabilities(
        chunked_prefill=False,
        reuse_across_turns=False,
        multi_image=False,
        growing_contexts=False,
        trainable_tokens=False,
    ),
    prefix_lm=True,
    max_positions=config.max_positions,
)
