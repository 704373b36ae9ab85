"""PaliGemma and PaliGemma 2: 3B."""

from typing import Any

from uirl_jax.families.border import Capabilities, Family
from uirl_jax.families.paligemma import chat, config, inputs, names


# `model` is imported when a model is built: a host that only plays episodes has no need of JAX.
def make_model(*args: Any, **options: Any) -> Any:
    from uirl_jax.families.paligemma.model import PaliGemma

    return PaliGemma(*args, **options)


def init_cache(*args: Any) -> Any:
    from uirl_jax.families.paligemma.model import PaliGemma

    return PaliGemma.init_cache(*args)


# Tokens of a context see each other whatever their order, so a context is computed as a whole, and
# the next turn's is another one: its history is text. The models were trained on one image.
FAMILY = Family(
    model_type="paligemma",
    read_config=config.read_config,
    to_config_json=config.PaliGemmaConfig.to_dict,
    make_inputs=inputs.make_inputs,
    chat=chat.LAYOUT,
    coordinates="loc",
    make_model=make_model,
    init_cache=init_cache,
    weights=names.WEIGHTS,
    capabilities=Capabilities(
        chunked_prefill=False,
        reuse_across_turns=False,
        multi_image=False,
        growing_contexts=False,
    ),
    prefix_lm=True,
    max_positions=config.max_positions,
)
