"""Tables of Idefics2: names of published tensors, LoRA projections, sharding rules."""

import types
from collections.abc import Mapping

from uirl_jax.families import tower_names
from uirl_jax.models.sharding_rules import param_rules
from uirl_jax.models.weight_table import Stack, WeightTable

_CONNECTOR = ("connector_gate", "connector_up", "connector_down")
_LATENT_ATTENTION = ("latent_q", "latent_k", "latent_v", "latent_o")
_LATENT_MLP = ("latent_gate", "latent_up", "latent_down")
LORA_GROUPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        **tower_names.TEXT_GROUPS,
        "vision": tower_names.VISION_GROUP,
        # Of the connector: its MLP, and the resampler.
        "merger": (*_CONNECTOR, *_LATENT_ATTENTION, *_LATENT_MLP),
    }
)

_LATENT_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "latents_norm": "input_latents_norm",
        "context_norm": "input_context_norm",
        **{
            latent: f"self_attn.{name}"
            for latent, name in zip(_LATENT_ATTENTION, tower_names.ATTENTION, strict=True)
        },
        "post_attention_norm": "post_attention_layernorm",
        **{
            latent: f"mlp.{name}" for latent, name in zip(_LATENT_MLP, tower_names.MLP, strict=True)
        },
    }
)
_TOWER = "model.vision_model"
_CONNECTOR_MLP = "model.connector.modality_projection"
_RESAMPLER = "model.connector.perceiver_resampler"


def published_name(name: str) -> str | None:
    """Every layout is the published one; older files hold buffers, too."""
    return None if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")) else name


WEIGHTS = WeightTable(
    stacks={
        "text/blocks": Stack("model.text_model.layers", tower_names.TEXT_MODULES),
        "visual/blocks": Stack(f"{_TOWER}.encoder.layers", tower_names.VISION_MODULES),
        "visual/latent_blocks": Stack(f"{_RESAMPLER}.layers", _LATENT_MODULES),
    },
    single={
        "visual/patch_embed/kernel": f"{_TOWER}.embeddings.patch_embedding.weight",
        "visual/patch_embed/bias": f"{_TOWER}.embeddings.patch_embedding.bias",
        "visual/position_table": f"{_TOWER}.embeddings.position_embedding.weight",
        "visual/post_norm/scale": f"{_TOWER}.post_layernorm.weight",
        "visual/post_norm/bias": f"{_TOWER}.post_layernorm.bias",
        "visual/connector_gate/kernel": f"{_CONNECTOR_MLP}.gate_proj.weight",
        "visual/connector_up/kernel": f"{_CONNECTOR_MLP}.up_proj.weight",
        "visual/connector_down/kernel": f"{_CONNECTOR_MLP}.down_proj.weight",
        "visual/latents": f"{_RESAMPLER}.latents",
        "visual/latents_final_norm/scale": f"{_RESAMPLER}.norm.weight",
        "text/embedding": "model.text_model.embed_tokens.weight",
        "text/final_norm/scale": "model.text_model.norm.weight",
        "text/lm_head/kernel": "lm_head.weight",
    },
    shapes={"visual/patch_embed/kernel": tower_names.patch_embed_shape},
    published_name=published_name,
    redundant=lambda cfg: ("lm_head.weight",) if cfg.tie_word_embeddings else (),
    lora_groups=LORA_GROUPS,
    peft_targets={
        **tower_names.VISION_PEFT_TARGETS,
        **dict(zip(_CONNECTOR, tower_names.MLP, strict=True)),
        **dict(zip(_LATENT_ATTENTION, tower_names.ATTENTION, strict=True)),
        **dict(zip(_LATENT_MLP, tower_names.MLP, strict=True)),
    },
    sharding_rules=param_rules(
        wide_out=(
            *tower_names.TEXT_WIDE_OUT,
            *tower_names.VISION_WIDE_OUT,
            *("connector_gate", "connector_up"),
            *("latent_q", "latent_k", "latent_v", "latent_gate", "latent_up"),
        ),
        wide_in=(
            *tower_names.TEXT_WIDE_IN,
            *tower_names.VISION_WIDE_IN,
            *("connector_down", "latent_o", "latent_down"),
        ),
        whole=(
            *tower_names.TEXT_NORMS,
            *tower_names.VISION_NORMS,
            *("post_norm", "latents_norm", "context_norm", "latents_final_norm"),
        ),
        more={
            "patch_embed/kernel": (None, "embed"),
            "patch_embed/bias": (None,),
            "position_table": (None, "embed"),
            "latents": (None, "embed"),
        },
    ),
)
