"""Small configs of LLaVA-1.5, and how transformers' model is called and read."""

from typing import Any

import numpy as np
import torch
import transformers

IMAGE_TOKEN_ID, VOCAB = 290, 300


def _llava(text: dict, vision: dict, layer: int, *, tied: bool) -> dict[str, Any]:
    """A config.json in the published layout."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **vision},
    }


# The published feature layer, the last but one, and no grouped heads (llava); nothing is a multiple
# of 8, grouped heads, two blocks unused (llava_odd); all blocks used, heads x head_dim is not the
# width, tied (llava_last); a layer counted from the start, another epsilon (llava_first). With a
# theta of 100 few tokens turn every pair of a head.
CONFIGS = {
    "llava": _llava(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 42,
            "patch_size": 14,
        },
        -2,
        tied=False,
    ),
    "llava_odd": _llava(
        {
            "hidden_size": 60,
            "intermediate_size": 50,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rope_theta": 100.0,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "image_size": 18,
            "patch_size": 6,
        },
        -3,
        tied=False,
    ),
    "llava_last": _llava(
        {
            "hidden_size": 30,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 8,
            "rope_theta": 100.0,
        },
        {
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 12,
            "patch_size": 4,
        },
        -1,
        tied=True,
    ),
    "llava_first": _llava(
        {
            "hidden_size": 36,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
        {
            "hidden_size": 20,
            "intermediate_size": 28,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 10,
            "patch_size": 5,
            "layer_norm_eps": 1e-3,
        },
        1,
        tied=False,
    ),
}
CLASSES = {"llava": (transformers.LlavaConfig, transformers.LlavaForConditionalGeneration)}


def reset(reference: Any) -> None:
    """The model keeps nothing between calls."""


def model_inputs(
    token_ids_bt: np.ndarray, pixels: list[np.ndarray], layouts: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    del layouts  # all images are squares of one size
    images = {"pixel_values": torch.tensor(np.stack(pixels))} if pixels else {}
    return {"input_ids": torch.tensor(token_ids_bt).long(), **images}


def text_tower(reference: Any) -> Any:
    return reference.model.language_model


def patches(out_npd: torch.Tensor, layouts: list[tuple[int, ...]]) -> torch.Tensor:
    """Of all images, one after the other."""
    del layouts
    return out_npd.flatten(end_dim=-2)


def vision_blocks(reference: Any) -> Any:
    """Those up to the feature layer."""
    blocks, layer = (
        reference.model.vision_tower.encoder.layers,
        reference.config.vision_feature_layer,
    )
    return blocks[: layer if layer >= 0 else len(blocks) + 1 + layer]


def visual_tokens(reference: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(reference.model.get_image_features(given["pixel_values"]).pooler_output)


def positions(
    reference: Any, given: dict[str, torch.Tensor], attention_bt: torch.Tensor
) -> torch.Tensor:
    """What the text model makes of right-padded rows where it is given none."""
    del reference, given
    return torch.arange(attention_bt.shape[1]).expand(1, *attention_bt.shape)
