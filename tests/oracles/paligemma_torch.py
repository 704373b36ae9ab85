"""Small configs of PaliGemma and PaliGemma 2, and how transformers' model is called and read."""

from typing import Any

import numpy as np
import torch
import transformers

IMAGE_TOKEN_ID, VOCAB = 290, 300


def _paligemma(text: dict, vision: dict, *, tied: bool = True) -> dict[str, Any]:
    """A config.json in the published layout."""
    width = text["hidden_size"]
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": IMAGE_TOKEN_ID,
        "hidden_size": width,
        "projection_dim": width,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "gemma",
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            **text,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            **vision,
        },
    }


# One kv head, heads x head_dim is the width (paligemma); nothing is a multiple of 8, untied
# (paligemma_odd); Gemma 2 with a window shorter than the rows and caps that bend most scores
# (paligemma_2); the same with another scale than the heads' width, an odd number of layers and
# without a cap of the logits (paligemma_2_odd). With a theta of 100 few tokens turn every pair of a
# head.
CONFIGS = {
    "paligemma": _paligemma(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 42,
            "patch_size": 14,
        },
    ),
    "paligemma_odd": _paligemma(
        {
            "hidden_size": 60,
            "intermediate_size": 50,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "rope_theta": 100.0,
            "rms_norm_eps": 1e-3,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 18,
            "patch_size": 6,
            "layer_norm_eps": 1e-3,
        },
        tied=False,
    ),
    "paligemma_2": _paligemma(
        {
            "model_type": "gemma2",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 12,
            "patch_size": 4,
        },
    ),
    "paligemma_2_odd": _paligemma(
        {
            "model_type": "gemma2",
            "hidden_size": 35,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 6,
            "rope_theta": 100.0,
            "query_pre_attn_scalar": 9,
            "sliding_window": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
        },
        {
            "hidden_size": 20,
            "intermediate_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 10,
            "patch_size": 5,
        },
    ),
}
CLASSES = {
    "paligemma": (transformers.PaliGemmaConfig, transformers.PaliGemmaForConditionalGeneration)
}


def reset(reference: Any) -> None:
    """The model keeps nothing between calls."""


def model_inputs(
    token_ids_bt: np.ndarray,
    pixels: list[np.ndarray],
    layouts: list[tuple[int, ...]],
    sampled_bt: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """Without token_type_ids transformers' mask depends on its attention's implementation."""
    del layouts  # all images are squares of one size
    images = {"pixel_values": torch.tensor(np.stack(pixels))} if pixels else {}
    if sampled_bt is None:
        sampled_bt = np.zeros_like(token_ids_bt)
    return {
        "input_ids": torch.tensor(token_ids_bt).long(),
        "token_type_ids": torch.tensor(sampled_bt).long(),
        **images,
    }


def text_tower(reference: Any) -> Any:
    return reference.model.language_model


def patches(out_npd: torch.Tensor, layouts: list[tuple[int, ...]]) -> torch.Tensor:
    """Of all images, one after the other."""
    del layouts
    return out_npd.flatten(end_dim=-2)


def vision_blocks(reference: Any) -> Any:
    return reference.model.vision_tower.encoder.layers


def visual_tokens(reference: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(reference.model.get_image_features(given["pixel_values"]).pooler_output))


def positions(
    reference: Any, given: dict[str, torch.Tensor], attention_bt: torch.Tensor
) -> torch.Tensor:
    """What the model makes of right-padded rows where it is given none."""
    del reference, given
    return torch.arange(1, attention_bt.shape[1] + 1).expand(1, *attention_bt.shape)
