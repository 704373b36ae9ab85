"""Tables that Qwen2-VL and Qwen2.5-VL share: the text tower's, and the two layouts of names."""

import re
import types
from collections.abc import Mapping

from uirl_jax.families.tower_names import TEXT_MODULES
from uirl_jax.models.weight_table import Stack

TEXT_BLOCKS = Stack("model.layers", TEXT_MODULES)
TEXT_SINGLE: Mapping[str, str] = types.MappingProxyType(
    {
        "text/embedding": "model.embed_tokens.weight",
        "text/final_norm/scale": "model.norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    }
)


def published_name(name: str) -> str | None:
    """Since version 4.52 transformers has both towers under `model.`:

    model.language_model.layers.0...  ->  model.layers.0...
    model.visual.blocks.0...          ->  visual.blocks.0...
    """
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")):
        return None
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name)


def current_name(published: str) -> str:
    """The reverse of published_name."""
    name = re.sub(r"^model\.", "model.language_model.", published)
    return re.sub(r"^visual\.", "model.visual.", name)
