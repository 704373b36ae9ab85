"""Tables of LLaVA-1.5: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Mapping

from uirl_jax.families.llava.config import LlavaConfig
from uirl_jax.families.tower_names import (
    HEAD,
    PROJECTOR,
    TEXT,
    TOWER,
    current_name,
    published_name,
)
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attention": _ATTENTION,
        "mlp": _MLP,
        "all": (*_ATTENTION, *_MLP),
        "vision": ("vision_q", "vision_k", "vision_v", "vision_out", "fc1", "fc2"),
        "merger": ("merger_fc1", "merger_fc2"),  # the projector
    }
)

_TEXT_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "input_norm": "input_layernorm",
        **{name: f"self_attn.{name}" for name in _ATTENTION},
        "post_attention_norm": "post_attention_layernorm",
        **{name: f"mlp.{name}" for name in _MLP},
    }
)
_VISION_MODULES: Mapping[str, str] = types.MappingProxyType(
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


def _patch_embed_shape(cfg: LlavaConfig) -> tuple[int, ...]:
    vision = cfg.vision
    return (vision.hidden_size, 3, vision.patch_size, vision.patch_size)


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack(f"{TEXT}.layers", _TEXT_MODULES),
        "visual/blocks": Stack(f"{TOWER}.encoder.layers", _VISION_MODULES),
        "visual/unused_blocks": Stack(
            f"{TOWER}.encoder.layers", _VISION_MODULES, lambda cfg: cfg.vision_blocks
        ),
    },
    single={
        "visual/class_embedding": f"{TOWER}.embeddings.class_embedding",
        "visual/patch_embed/kernel": f"{TOWER}.embeddings.patch_embedding.weight",
        "visual/position_table": f"{TOWER}.embeddings.position_embedding.weight",
        "visual/pre_norm/scale": f"{TOWER}.pre_layrnorm.weight",
        "visual/pre_norm/bias": f"{TOWER}.pre_layrnorm.bias",
        "visual/unused_norm/scale": f"{TOWER}.post_layernorm.weight",
        "visual/unused_norm/bias": f"{TOWER}.post_layernorm.bias",
        "visual/merger_fc1/kernel": f"{PROJECTOR}.linear_1.weight",
        "visual/merger_fc1/bias": f"{PROJECTOR}.linear_1.bias",
        "visual/merger_fc2/kernel": f"{PROJECTOR}.linear_2.weight",
        "visual/merger_fc2/bias": f"{PROJECTOR}.linear_2.bias",
        "text/embedding": f"{TEXT}.embed_tokens.weight",
        "text/final_norm/scale": f"{TEXT}.norm.weight",
        "text/lm_head/kernel": f"{HEAD}.weight",
    },
    shapes={"visual/patch_embed/kernel": _patch_embed_shape},
    published_name=published_name,
    current_name=current_name,
    redundant=lambda cfg: (f"{HEAD}.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    peft_targets={
        "vision_q": "q_proj",
        "vision_k": "k_proj",
        "vision_v": "v_proj",
        "vision_out": "out_proj",
        "merger_fc1": "linear_1",
        "merger_fc2": "linear_2",
    },
    unused=("visual/unused",),
    sharding_rules=param_rules(
        wide_out=(
            *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
            *("vision_q", "vision_k", "vision_v", "fc1", "merger_fc1"),
        ),
        wide_in=("o_proj", "down_proj", "vision_out", "fc2", "merger_fc2"),
        whole=(
            *("input_norm", "post_attention_norm", "final_norm"),
            *("norm1", "norm2", "pre_norm", "unused_norm"),
        ),
        more={
            "patch_embed/kernel": (None, "embed"),
            "class_embedding": (None,),
            "position_table": (None, "embed"),
            "weight": (None, None),  # of unused blocks: 25 MB each in the published models
        },
    ),
)
