"""Tables of Florence-2: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Callable, Mapping
from typing import Any

from uirl_jax.families.florence2.config import STAGES
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Shape, Stack, WeightTable

_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")  # in both text towers
_CROSS = ("cross_q", "cross_k", "cross_v", "cross_out")  # of the decoder to the encoder
_MLP = ("fc1", "fc2")
_QKV, _OUT = ("window_qkv", "channel_qkv"), ("window_out", "channel_out")
_VISION_FC1, _VISION_FC2 = ("window_fc1", "channel_fc1"), ("window_fc2", "channel_fc2")

LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "attention": (*_ATTENTION, *_CROSS),
        "mlp": _MLP,
        "all": (*_ATTENTION, *_CROSS, *_MLP),
        "vision": (*_QKV, *_OUT, *_VISION_FC1, *_VISION_FC2),
        "merger": ("projector",),
    }
)

_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_TEXT = "model.language_model"
_POSITIONS = f"{_PROJECTOR}.image_position_embed"
_ENCODER_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        **{name: f"self_attn.{name}" for name in _ATTENTION},
        "attention_norm": "self_attn_layer_norm",
        **{name: name for name in _MLP},
        "mlp_norm": "final_layer_norm",
    }
)
_CROSS_TARGETS: Mapping[str, str] = types.MappingProxyType(
    {ours: f"encoder_attn.{theirs}" for ours, theirs in zip(_CROSS, _ATTENTION, strict=True)}
)
_DECODER_MODULES: Mapping[str, str] = types.MappingProxyType(
    {**_ENCODER_MODULES, **_CROSS_TARGETS, "cross_norm": "encoder_attn_layer_norm"}
)


def _half_block(kind: str, attention: str) -> dict[str, str]:
    """Modules of one half of a vision block."""
    return {
        f"{kind}_conv1": "conv1",
        f"{kind}_norm1": "norm1",
        f"{kind}_qkv": f"{attention}.qkv",
        f"{kind}_out": f"{attention}.proj",
        f"{kind}_conv2": "conv2",
        f"{kind}_norm2": "norm2",
        f"{kind}_fc1": "ffn.fc1",
        f"{kind}_fc2": "ffn.fc2",
    }


_VISION_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        ours: f"{half}.{theirs}"
        for half, kind, attention in (
            ("spatial_block", "window", "window_attn"),
            ("channel_block", "channel", "channel_attn"),
        )
        for ours, theirs in _half_block(kind, attention).items()
    }
)
_DEPTHWISE = tuple(name for name in _VISION_MODULES if "_conv" in name)


def _conv_shape(stage: int) -> Callable[[Any], Shape]:
    def shape(cfg: Any) -> Shape:
        vision, side = cfg.vision, cfg.vision.patch_size[stage]
        channels = vision.embed_dim[stage - 1] if stage else 3
        return (vision.embed_dim[stage], channels, side, side)

    return shape


def _depthwise_shape(stage: int) -> Callable[[Any], Shape]:
    return lambda cfg: (cfg.vision.embed_dim[stage], 1, 3, 3)


def _stage_names(stage: int) -> dict[str, str]:
    ours, theirs = f"visual/stage{stage}", f"{_TOWER}.convs.{stage}"
    return {
        f"{ours}/conv/kernel": f"{theirs}.conv.weight",
        f"{ours}/conv/bias": f"{theirs}.conv.bias",
        f"{ours}/norm/scale": f"{theirs}.norm.weight",
        f"{ours}/norm/bias": f"{theirs}.norm.bias",
    }


_TIED = (
    "lm_head.weight",
    f"{_TEXT}.encoder.embed_tokens.weight",
    f"{_TEXT}.decoder.embed_tokens.weight",
)

WEIGHTS = WeightTable(
    stacks={
        "text/encoder": Stack(f"{_TEXT}.encoder.layers", _ENCODER_MODULES),
        "text/decoder": Stack(f"{_TEXT}.decoder.layers", _DECODER_MODULES),
        **{
            f"visual/stage{stage}/blocks": Stack(f"{_TOWER}.blocks.{stage}", _VISION_MODULES)
            for stage in range(STAGES)
        },
    },
    single={
        **{ours: name for stage in range(STAGES) for ours, name in _stage_names(stage).items()},
        "visual/row_table": f"{_POSITIONS}.row_embeddings.weight",
        "visual/column_table": f"{_POSITIONS}.column_embeddings.weight",
        "visual/time_table": f"{_PROJECTOR}.visual_temporal_embed.pos_idx_to_embed",
        "visual/projector/kernel": f"{_PROJECTOR}.image_projection.weight",
        "visual/projector_norm/scale": f"{_PROJECTOR}.image_proj_norm.weight",
        "visual/projector_norm/bias": f"{_PROJECTOR}.image_proj_norm.bias",
        "text/embedding": f"{_TEXT}.shared.weight",
        **{
            f"text/{ours}": f"{_TEXT}.{theirs}"
            for tower in ("encoder", "decoder")
            for ours, theirs in (
                (f"{tower}_positions", f"{tower}.embed_positions.weight"),
                (f"{tower}_norm/scale", f"{tower}.layernorm_embedding.weight"),
                (f"{tower}_norm/bias", f"{tower}.layernorm_embedding.bias"),
            )
        },
    },
    shapes={
        f"visual/stage{stage}/{path}/kernel": shape
        for stage in range(STAGES)
        for path, shape in (
            ("conv", _conv_shape(stage)),
            *((f"blocks/{name}", _depthwise_shape(stage)) for name in _DEPTHWISE),
        )
    },
    redundant=lambda cfg: _TIED,
    lora_groups=LORA_GROUPS,
    peft_targets={
        **{name: f"self_attn.{name}" for name in _ATTENTION},
        **_CROSS_TARGETS,
        **{name: f"layers.{{layer}}.{name}" for name in _MLP},
        **{name: _VISION_MODULES[name] for name in LORA_GROUPS["vision"]},
        "projector": "image_projection",
    },
    sharding_rules=param_rules(
        wide_out=(
            *("q_proj", "k_proj", "v_proj", "cross_q", "cross_k", "cross_v", "fc1"),
            *(*_QKV, *_VISION_FC1),
        ),
        wide_in=("out_proj", "cross_out", "fc2", *_OUT, *_VISION_FC2, "projector"),
        whole=(
            *("attention_norm", "cross_norm", "mlp_norm", "encoder_norm", "decoder_norm"),
            *("window_norm1", "window_norm2", "channel_norm1", "channel_norm2"),
            *("norm", "projector_norm"),
        ),
        more={
            "conv/kernel": (None, "embed"),
            "conv/bias": (None,),
            **{f"{name}/kernel": (None, None) for name in _DEPTHWISE},
            **{f"{name}/bias": (None,) for name in _DEPTHWISE},
            **{
                name: (None, "embed")
                for name in (
                    *("encoder_positions", "decoder_positions"),
                    *("row_table", "column_table", "time_table"),
                )
            },
        },
    ),
)
