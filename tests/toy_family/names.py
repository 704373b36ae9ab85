"""The toy's tables: names of tensors, LoRA projections, sharding rules."""

from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_norm", "post_attention_norm")

WEIGHTS = WeightTable(
    stacks={"text/blocks": Stack("layers", {n: n for n in (*_NORMS, *_ATTENTION, *_MLP)})},
    single={
        "patches/kernel": "patches.weight",
        "text/embedding": "embedding.weight",
        "text/final_norm/scale": "final_norm.weight",
    },
    lora_groups={"attention": _ATTENTION, "mlp": _MLP, "vision": ("patches",)},
    sharding_rules=param_rules(
        wide_out=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "patches"),
        wide_in=("o_proj", "down_proj"),
        whole=(*_NORMS, "final_norm"),
    ),
)
