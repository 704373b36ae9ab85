"""Tables that families share: the text tower's projections, CLIP's and SigLIP's blocks, layouts.

Source: the modules of transformers, models/llama/, models/clip/, models/siglip/.
"""

import re
import types
from collections.abc import Mapping
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

# Of the text tower; all is both. A family's targets in its vision tower (vision, merger) change
# visual tokens: the learner then computes them inside the loss, and once more with adapters off for
# the reference.
TEXT_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {"attention": ATTENTION, "mlp": MLP, "all": (*ATTENTION, *MLP)}
)
TEXT_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "input_norm": "input_layernorm",
        **{name: f"self_attn.{name}" for name in ATTENTION},
        "post_attention_norm": "post_attention_layernorm",
        **{name: f"mlp.{name}" for name in MLP},
    }
)
TEXT_WIDE_OUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
TEXT_WIDE_IN = ("o_proj", "down_proj")
TEXT_NORMS = ("input_norm", "post_attention_norm", "final_norm")

# Of the blocks of models.vision_block.
VISION_GROUP = ("vision_q", "vision_k", "vision_v", "vision_out", "fc1", "fc2")
VISION_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "norm1": "layer_norm1",
        "vision_q": "self_attn.q_proj",
        "vision_k": "self_attn.k_proj",
        "vision_v": "self_attn.v_proj",
        "vision_out": "self_attn.out_proj",
        "norm2": "layer_norm2",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
)
VISION_PEFT_TARGETS: Mapping[str, str] = types.MappingProxyType(
    {"vision_q": "q_proj", "vision_k": "k_proj", "vision_v": "v_proj", "vision_out": "out_proj"}
)
VISION_WIDE_OUT = ("vision_q", "vision_k", "vision_v", "fc1")
VISION_WIDE_IN = ("vision_out", "fc2")
VISION_NORMS = ("norm1", "norm2")


def patch_embed_shape(cfg: Any) -> tuple[int, ...]:
    """Of the convolution that the reference cuts patches with."""
    vision = cfg.vision
    return (vision.hidden_size, 3, vision.patch_size, vision.patch_size)


# Where a vision tower, a projector and a language model stand side by side (LLaVA, PaliGemma),
# three layouts come to the first, that of the published files:
#
#   language_model.model.layers.0...   vision_tower.vision_model.encoder...   published
#   model.language_model.layers.0...   model.vision_tower.vision_model...     transformers 4.52
#   model.language_model.layers.0...   model.vision_tower.encoder...          transformers 5
#
# transformers 5 saves without `model.`, and a model that it made without `vision_model.`, too.
TOWER = "vision_tower.vision_model"
PROJECTOR = "multi_modal_projector"
TEXT = "language_model.model"
HEAD = "language_model.lm_head"


def published_name(name: str) -> str | None:
    """A tensor's name in the published layout; None: a buffer."""
    if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")):
        return None
    name = re.sub(r"^lm_head\b", HEAD, name)
    name = re.sub(r"^model\.language_model\.", f"{TEXT}.", name)
    name = re.sub(rf"^model\.(vision_tower|{PROJECTOR})\.", r"\1.", name)
    return re.sub(r"^vision_tower\.(?!vision_model\.)", f"{TOWER}.", name)


def current_name(published: str) -> str:
    """The reverse of published_name, for transformers 5."""
    name = re.sub(rf"^{re.escape(HEAD)}\b", "lm_head", published)
    name = re.sub(rf"^{re.escape(TEXT)}\.", "model.language_model.", name)
    name = re.sub(rf"^{re.escape(TOWER)}\.", "model.vision_tower.", name)
    return re.sub(rf"^{PROJECTOR}\.", f"model.{PROJECTOR}.", name)
