"""Tables of Qwen2.5-VL: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Mapping

from uirl_jax.families import tower_names
from uirl_jax.families.qwen import names
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

# The MLP of a vision block has the text tower's names in the published files; fc_ tells them apart
# here, so that `mlp` stays in the text tower.
LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        **tower_names.TEXT_GROUPS,
        "vision": ("qkv", "proj", "fc_gate", "fc_up", "fc_down"),
        "merger": ("merger_fc1", "merger_fc2"),
    }
)


def _patch_embed_shape(cfg: Qwen25VLConfig) -> tuple[int, ...]:
    vision = cfg.vision
    return (
        *(vision.hidden_size, vision.in_channels, vision.temporal_patch_size),
        *(vision.patch_size, vision.patch_size),
    )


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": names.TEXT_BLOCKS,
        "visual/blocks": Stack(
            "visual.blocks",
            {
                "norm1": "norm1",
                "qkv": "attn.qkv",
                "proj": "attn.proj",
                "norm2": "norm2",
                "fc_gate": "mlp.gate_proj",
                "fc_up": "mlp.up_proj",
                "fc_down": "mlp.down_proj",
            },
        ),
    },
    single={
        "visual/patch_embed/kernel": "visual.patch_embed.proj.weight",
        "visual/merger_norm/scale": "visual.merger.ln_q.weight",
        "visual/merger_fc1/kernel": "visual.merger.mlp.0.weight",
        "visual/merger_fc1/bias": "visual.merger.mlp.0.bias",
        "visual/merger_fc2/kernel": "visual.merger.mlp.2.weight",
        "visual/merger_fc2/bias": "visual.merger.mlp.2.bias",
        **names.TEXT_SINGLE,
    },
    shapes={"visual/patch_embed/kernel": _patch_embed_shape},
    published_name=names.published_name,
    current_name=names.current_name,
    redundant=lambda cfg: ("lm_head.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    # The patch embedding is a `proj` too, so the parent's name is included, as peft does for
    # "all-linear".
    peft_targets={
        "proj": "attn.proj",
        "fc_gate": "gate_proj",
        "fc_up": "up_proj",
        "fc_down": "down_proj",
        "merger_fc1": "mlp.0",
        "merger_fc2": "mlp.2",
    },
    sharding_rules=param_rules(
        wide_out=(*tower_names.TEXT_WIDE_OUT, "qkv", "fc_gate", "fc_up", "merger_fc1"),
        wide_in=(*tower_names.TEXT_WIDE_IN, "proj", "fc_down", "merger_fc2"),
        whole=("norm1", "norm2", "merger_norm", *tower_names.TEXT_NORMS),
        more={"patch_embed/kernel": (None, "embed")},
    ),
)
