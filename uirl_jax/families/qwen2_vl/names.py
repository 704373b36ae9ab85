"""Tables of Qwen2-VL: names of published tensors, LoRA projections, sharding rules."""

import re
import types
from collections.abc import Mapping

from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

# attention, mlp and all (both) are in the text tower. vision (the blocks of the vision tower) and
# merger (between the towers) change visual tokens: the learner then computes them inside the loss,
# and once more with adapters off for the reference.
LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attention": _ATTENTION,
        "mlp": _MLP,
        "all": (*_ATTENTION, *_MLP),
        "vision": ("qkv", "proj", "fc1", "fc2"),
        "merger": ("merger_fc1", "merger_fc2"),
    }
)


def _patch_embed_shape(cfg: Qwen2VLConfig) -> tuple[int, ...]:
    vision = cfg.vision
    return (
        *(vision.embed_dim, vision.in_channels, vision.temporal_patch_size),
        *(vision.patch_size, vision.patch_size),
    )


def _published_name(name: str) -> str | None:
    """Since version 4.52 transformers has both towers under `model.`:

    model.language_model.layers.0...  ->  model.layers.0...
    model.visual.blocks.0...          ->  visual.blocks.0...
    """
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")):
        return None
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name)


def _current_name(published: str) -> str:
    """The reverse of _published_name."""
    name = re.sub(r"^model\.", "model.language_model.", published)
    return re.sub(r"^visual\.", "model.visual.", name)


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack(
            "model.layers",
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
            },
        ),
        "visual/blocks": Stack(
            "visual.blocks",
            {
                "norm1": "norm1",
                "qkv": "attn.qkv",
                "proj": "attn.proj",
                "norm2": "norm2",
                "fc1": "mlp.fc1",
                "fc2": "mlp.fc2",
            },
        ),
    },
    single={
        "visual/patch_embed/kernel": "visual.patch_embed.proj.weight",
        "visual/merger_norm/scale": "visual.merger.ln_q.weight",
        "visual/merger_norm/bias": "visual.merger.ln_q.bias",
        "visual/merger_fc1/kernel": "visual.merger.mlp.0.weight",
        "visual/merger_fc1/bias": "visual.merger.mlp.0.bias",
        "visual/merger_fc2/kernel": "visual.merger.mlp.2.weight",
        "visual/merger_fc2/bias": "visual.merger.mlp.2.bias",
        "text/embedding": "model.embed_tokens.weight",
        "text/final_norm/scale": "model.norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    },
    shapes={"visual/patch_embed/kernel": _patch_embed_shape},
    published_name=_published_name,
    current_name=_current_name,
    redundant=lambda cfg: ("lm_head.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    # The patch embedding is a `proj` too, so the parent's name is included, as peft does for
    # "all-linear".
    peft_targets={"proj": "attn.proj", "merger_fc1": "mlp.0", "merger_fc2": "mlp.2"},
    sharding_rules=param_rules(
        wide_out=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv", "fc1", "merger_fc1"),
        wide_in=("o_proj", "down_proj", "proj", "fc2", "merger_fc2"),
        whole=(
            *("norm1", "norm2", "merger_norm"),
            *("input_norm", "post_attention_norm", "final_norm"),
        ),
        more={"patch_embed/kernel": (None, "embed")},
    ),
)
