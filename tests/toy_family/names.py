"""The toy's tables."""

from uirl_jax.models.sharding import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("up_proj", "down_proj")
_NAMES = ("norm1", *_ATTENTION, "norm2", *_MLP)

WEIGHTS = WeightTable(
    stacks={"text/blocks": Stack("layers", {name: name for name in _NAMES})},
    single={
        "visual/patches/kernel": "patches.weight",
        "text/embedding": "embedding.weight",
        "text/final_norm/scale": "final_norm.weight",
    },
    lora_groups={"attention": _ATTENTION, "mlp": _MLP, "vision": ("patches",)},
    sharding_rules=param_rules(
        wide_out=("q_proj", "k_proj", "v_proj", "up_proj", "patches"),
        wide_in=("o_proj", "down_proj"),
        whole=("norm1", "norm2", "final_norm"),
    ),
)
