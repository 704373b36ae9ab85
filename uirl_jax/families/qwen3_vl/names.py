"""Tables of Qwen3-VL: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Mapping

from uirl_jax.families import tower_names
from uirl_jax.families.qwen import names
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

# merger has the mergers of DeepStack, too.
LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        **tower_names.TEXT_GROUPS,
        "vision": ("qkv", "proj", "fc1", "fc2"),
        "merger": ("merger_fc1", "merger_fc2", "deepstack_fc1", "deepstack_fc2"),
    }
)


def _patch_embed_shape(cfg: Qwen3VLConfig) -> tuple[int, ...]:
    vision = cfg.vision
    return (
        *(vision.hidden_size, vision.in_channels, vision.temporal_patch_size),
        *(vision.patch_size, vision.patch_size),
    )


# The published files have the module names of transformers: there is one layout.
WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack(
            "model.language_model.layers",
            {
                **names.TEXT_BLOCKS.modules,
                "q_norm": "self_attn.q_norm",
                "k_norm": "self_attn.k_norm",
            },
        ),
        "visual/blocks": Stack(
            "model.visual.blocks",
            {
                "norm1": "norm1",
                "qkv": "attn.qkv",
                "proj": "attn.proj",
                "norm2": "norm2",
                "fc1": "mlp.linear_fc1",
                "fc2": "mlp.linear_fc2",
            },
        ),
        "visual/deepstack": Stack(
            "model.visual.deepstack_merger_list",
            {
                "norm": "norm",
                "deepstack_fc1": "linear_fc1",
                "deepstack_fc2": "linear_fc2",
            },
        ),
    },
    single={
        "visual/patch_embed/kernel": "model.visual.patch_embed.proj.weight",
        "visual/patch_embed/bias": "model.visual.patch_embed.proj.bias",
        "visual/position_table": "model.visual.pos_embed.weight",
        "visual/merger_norm/scale": "model.visual.merger.norm.weight",
        "visual/merger_norm/bias": "model.visual.merger.norm.bias",
        "visual/merger_fc1/kernel": "model.visual.merger.linear_fc1.weight",
        "visual/merger_fc1/bias": "model.visual.merger.linear_fc1.bias",
        "visual/merger_fc2/kernel": "model.visual.merger.linear_fc2.weight",
        "visual/merger_fc2/bias": "model.visual.merger.linear_fc2.bias",
        "text/embedding": "model.language_model.embed_tokens.weight",
        "text/final_norm/scale": "model.language_model.norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    },
    shapes={"visual/patch_embed/kernel": _patch_embed_shape},
    redundant=lambda cfg: ("lm_head.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    # Names that match no other module: every MLP and merger has a linear_fc1, and the patch
    # embedding is a `proj`.
    peft_targets={
        "proj": "attn.proj",
        "fc1": "mlp.linear_fc1",
        "fc2": "mlp.linear_fc2",
        "merger_fc1": "merger.linear_fc1",
        "merger_fc2": "merger.linear_fc2",
        "deepstack_fc1": "deepstack_merger_list.{layer}.linear_fc1",
        "deepstack_fc2": "deepstack_merger_list.{layer}.linear_fc2",
    },
    sharding_rules=param_rules(
        wide_out=(*tower_names.TEXT_WIDE_OUT, "qkv", "fc1", "merger_fc1", "deepstack_fc1"),
        wide_in=(*tower_names.TEXT_WIDE_IN, "proj", "fc2", "merger_fc2", "deepstack_fc2"),
        whole=(
            "norm1",
            "norm2",
            "norm",
            "merger_norm",
            "q_norm",
            "k_norm",
            *tower_names.TEXT_NORMS,
        ),
        more={
            "patch_embed/kernel": (None, "embed"),
            "patch_embed/bias": (None,),
            "position_table": (None, "embed"),
        },
    ),
)
