"""Tables of PaliGemma: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Mapping

from uirl_jax.families import tower_names
from uirl_jax.families.tower_names import HEAD, PROJECTOR, TEXT, TOWER
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        **tower_names.TEXT_GROUPS,
        "vision": tower_names.VISION_GROUP,
        "merger": ("projector",),
    }
)

_TEXT_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        **tower_names.TEXT_MODULES,
        "mlp_norm": "pre_feedforward_layernorm",  # of Gemma 2, as the next
        "post_mlp_norm": "post_feedforward_layernorm",
    }
)


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack(f"{TEXT}.layers", _TEXT_MODULES),
        "visual/blocks": Stack(f"{TOWER}.encoder.layers", tower_names.VISION_MODULES),
    },
    single={
        "visual/patch_embed/kernel": f"{TOWER}.embeddings.patch_embedding.weight",
        "visual/patch_embed/bias": f"{TOWER}.embeddings.patch_embedding.bias",
        "visual/position_table": f"{TOWER}.embeddings.position_embedding.weight",
        "visual/post_norm/scale": f"{TOWER}.post_layernorm.weight",
        "visual/post_norm/bias": f"{TOWER}.post_layernorm.bias",
        "visual/projector/kernel": f"{PROJECTOR}.linear.weight",
        "visual/projector/bias": f"{PROJECTOR}.linear.bias",
        "text/embedding": f"{TEXT}.embed_tokens.weight",
        "text/final_norm/scale": f"{TEXT}.norm.weight",
        "text/lm_head/kernel": f"{HEAD}.weight",
    },
    shapes={"visual/patch_embed/kernel": tower_names.patch_embed_shape},
    published_name=tower_names.published_name,
    current_name=tower_names.current_name,
    redundant=lambda cfg: (f"{HEAD}.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    peft_targets={
        **tower_names.VISION_PEFT_TARGETS,
        "projector": "linear",
    },
    sharding_rules=param_rules(
        wide_out=(
            *tower_names.TEXT_WIDE_OUT,
            *tower_names.VISION_WIDE_OUT,
        ),
        wide_in=(*tower_names.TEXT_WIDE_IN, *tower_names.VISION_WIDE_IN, "projector"),
        whole=(
            *tower_names.TEXT_NORMS,
            *tower_names.VISION_NORMS,
            *("mlp_norm", "post_mlp_norm", "post_norm"),
        ),
        more={
            "patch_embed/kernel": (None, "embed"),
            "patch_embed/bias": (None,),
            "position_table": (None, "embed"),
        },
    ),
)
