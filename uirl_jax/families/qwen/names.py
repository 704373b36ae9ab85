"""Tables that Qwen2-VL and Qwen2.5-VL share: the text tower's, and the two layouts of names."""

import re
import types
from collections.abc import Mapping

from uirl_jax.models.weight_table import Stack

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

# Of the text tower; all is both. A family's targets in its vision tower (vision, merger) change
# visual tokens: the learner then computes them inside the loss, and once more with adapters off for
# the reference.
TEXT_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {"attention": _ATTENTION, "mlp": _MLP, "all": (*_ATTENTION, *_MLP)}
)
TEXT_BLOCKS = Stack(
    "model.layers",
    types.MappingProxyType(
        {
            "input_norm": "input_layernorm",
            "q_proj": "self_attn.q_proj",
            "k_proj": "self_attn.k_proj",
            "v_proj": "self_attn.v_proj",
            "o_proj": "self_attn.o_proj",
            "post_attention_norm": "post_attention_layernorm",
            "gate_proj": "mlp.gate_proj",
            "up_proj": "mlp.up_proj",
            "down_proj": "mlp.down_proj",
        }
    ),
)
TEXT_SINGLE: Mapping[str, str] = types.MappingProxyType(
    {
        "text/embedding": "model.embed_tokens.weight",
        "text/final_norm/scale": "model.norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    }
)
TEXT_WIDE_OUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
TEXT_WIDE_IN = ("o_proj", "down_proj")
TEXT_NORMS = ("input_norm", "post_attention_norm", "final_norm")


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
