"""The model's tables: names of tensors, LoRA projections, sharding rules."""

from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_norm", "post_attention_norm")
_STAGES, _WHOLE = ("stage1", "stage2", "stage3"), ("stem", "halve1", "halve2")

_SCREEN = {
    **{f"screen/{name}/kernel": f"screen.{name}.weight" for name in _WHOLE},
    **{f"screen/{name}/bias": f"screen.{name}.bias" for name in _WHOLE},
    **{f"screen/{name}/norm/scale": f"screen.{name}.norm.weight" for name in _STAGES},
    **{f"screen/{name}/conv/kernel": f"screen.{name}.conv.weight" for name in _STAGES},
    **{f"screen/{name}/conv/bias": f"screen.{name}.conv.bias" for name in _STAGES},
    **{f"screen/{name}/mix/kernel": f"screen.{name}.mix.weight" for name in _STAGES},
    "screen/places": "screen.places.weight",
    "screen/norm/scale": "screen.norm.weight",
}

WEIGHTS = WeightTable(
    stacks={"text/blocks": Stack("layers", {n: n for n in (*_NORMS, *_ATTENTION, *_MLP)})},
    single={
        **_SCREEN,
        "text/embedding": "embedding.weight",
        "text/final_norm/scale": "final_norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    },
    lora_groups={"attention": _ATTENTION, "mlp": _MLP, "vision": ("conv", "mix")},
    sharding_rules=param_rules(
        wide_out=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "conv"),
        wide_in=("o_proj", "down_proj", "mix"),
        whole=(*_NORMS, "final_norm", "norm"),
        more={
            **{f"{name}/kernel": (None, "embed") for name in _WHOLE},
            **{f"{name}/bias": (None,) for name in _WHOLE},
            "places": (None, "embed"),
        },
    ),
)
