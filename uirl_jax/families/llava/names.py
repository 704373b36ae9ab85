"""Tables of LLaVA-1.5: names of published tensors, LoRA projections, sharding rules."""

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
        "merger": ("merger_fc1", "merger_fc2"),  # the projector
    }
)


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack(f"{TEXT}.layers", tower_names.TEXT_MODULES),
        "visual/blocks": Stack(f"{TOWER}.encoder.layers", tower_names.VISION_MODULES),
        "visual/unused_blocks": Stack(
            f"{TOWER}.encoder.layers", tower_names.VISION_MODULES, lambda cfg: cfg.vision_blocks
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
    shapes={"visual/patch_embed/kernel": tower_names.patch_embed_shape},
    published_name=tower_names.published_name,
    current_name=tower_names.current_name,
    redundant=lambda cfg: (f"{HEAD}.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    peft_targets={
        **tower_names.VISION_PEFT_TARGETS,
        "merger_fc1": "linear_1",
        "merger_fc2": "linear_2",
    },
    unused=("visual/unused",),
    sharding_rules=param_rules(
        wide_out=(
            *tower_names.TEXT_WIDE_OUT,
            *tower_names.VISION_WIDE_OUT,
            "merger_fc1",
        ),
        wide_in=(*tower_names.TEXT_WIDE_IN, *tower_names.VISION_WIDE_IN, "merger_fc2"),
        whole=(
            *tower_names.TEXT_NORMS,
            *tower_names.VISION_NORMS,
            *("pre_norm", "unused_norm"),
        ),
        more={
            "patch_embed/kernel": (None, "embed"),
            "class_embedding": (None,),
            "position_table": (None, "embed"),
            "weight": (None, None),  # of unused blocks: 25 MB each in the published models
        },
    ),
)
