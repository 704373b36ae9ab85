"""Small configs of Qwen2.5-VL and Qwen3-VL, and how transformers' models are called and read."""

from typing import Any

import numpy as np
import torch
import transformers

IMAGE_TOKEN_ID, VOCAB = 290, 300


def _qwen3_vl(text: dict, vision: dict, *, tied: bool) -> dict[str, Any]:
    """A config.json in the published layout."""
    sections = text.pop("mrope_section")
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 291,
        "vision_start_token_id": 288,
        "vision_end_token_id": 289,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": VOCAB,
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": sections,
                "rope_type": "default",
            },
            "rope_theta": 5_000_000,
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "out_hidden_size": text["hidden_size"],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }


# Each has what the published sizes leave out: heads x head_dim is not the width (plain), nothing is
# a multiple of 8 and a level comes from the last vision block (odd), one level and no grouped heads
# (one_level), no level at all (none). With a theta of 100 few tokens turn every pair of a head.
QWEN3_VL = {
    "plain": _qwen3_vl(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mrope_section": [6, 5, 5],
        },
        {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        tied=True,
    ),
    "odd": _qwen3_vl(
        {
            "hidden_size": 44,
            "intermediate_size": 50,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "mrope_section": [4, 3, 3],
            "rope_theta": 100,
        },
        {
            "depth": 4,
            "hidden_size": 36,
            "intermediate_size": 52,
            "num_heads": 3,
            "patch_size": 6,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [1, 2, 3],
        },
        tied=False,
    ),
    "one_level": _qwen3_vl(
        {
            "hidden_size": 30,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 8,
            "mrope_section": [2, 1, 1],
            "rope_theta": 100,
        },
        {
            "depth": 5,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_heads": 3,
            "patch_size": 4,
            "num_position_embeddings": 9,
            "deepstack_visual_indexes": [3],
        },
        tied=True,
    ),
    "none": _qwen3_vl(
        {
            "hidden_size": 36,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "mrope_section": [2, 2, 2],
        },
        {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_heads": 2,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        tied=False,
    ),
}


def _qwen2_5_vl(text: dict, vision: dict, *, tied: bool) -> dict[str, Any]:
    """A config.json in the published, flat layout."""
    sections = text.pop("mrope_section")
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 291,
        "vision_start_token_id": 288,
        "vision_end_token_id": 289,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        **text,
        "vision_config": {
            "hidden_act": "silu",
            "in_channels": 3,
            "out_hidden_size": text["hidden_size"],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }


# Windows of 2 x 2 visual tokens: the images of the cases have whole windows and all kinds of edges.
# Every second block is full (windows), nothing is a multiple of 8 and the first block is full
# (odd_windows), windows of 3 x 3 and a full block in the middle, no grouped heads (wide_windows),
# windows of one visual token and no full block (narrow_windows).
QWEN2_5_VL = {
    "windows": _qwen2_5_vl(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mrope_section": [2, 3, 3],
        },
        {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
        tied=True,
    ),
    "odd_windows": _qwen2_5_vl(
        {
            "hidden_size": 60,
            "intermediate_size": 50,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "mrope_section": [1, 2, 2],
            "rope_theta": 100.0,
        },
        {
            "depth": 4,
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_heads": 3,
            "patch_size": 6,
            "window_size": 24,
            "fullatt_block_indexes": [0, 2],
        },
        tied=False,
    ),
    "wide_windows": _qwen2_5_vl(
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "mrope_section": [2, 2, 2],
            "rope_theta": 100.0,
        },
        {
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_heads": 3,
            "patch_size": 4,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
        tied=True,
    ),
    "narrow_windows": _qwen2_5_vl(
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mrope_section": [2, 1, 1],
        },
        {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 8,
            "fullatt_block_indexes": [],
        },
        tied=False,
    ),
}
CONFIGS = {**QWEN2_5_VL, **QWEN3_VL}
CLASSES = {
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        transformers.Qwen2_5_VLForConditionalGeneration,
    ),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
}


def reset(reference: Any) -> None:
    """Forgets what the model keeps between calls."""
    reference.model.rope_deltas = None


def model_inputs(
    token_ids_bt: np.ndarray, pixels: list[np.ndarray], grids: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Without mm_token_type_ids positions would silently be 1-D."""
    ids = torch.tensor(token_ids_bt).long()
    images = {}
    if grids:
        images = {
            "pixel_values": torch.tensor(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(grids),
        }
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int(), **images}


def text_tower(reference: Any) -> Any:
    return reference.model.language_model


def patches(out_npd: torch.Tensor, layouts: list[tuple[int, ...]]) -> torch.Tensor:
    """Of all images, one after the other."""
    del layouts
    return out_npd.flatten(end_dim=-2)


def vision_blocks(reference: Any) -> Any:
    return reference.model.visual.blocks


def visual_tokens(reference: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of all images: the embedding, then every level."""
    found = reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
    qwen3 = reference.config.model_type == "qwen3_vl"
    levels = [found.pooler_output, *(found.deepstack_features if qwen3 else ())]
    return torch.cat([torch.cat(level) for level in levels], dim=-1)


def positions(
    reference: Any, given: dict[str, torch.Tensor], attention_bt: torch.Tensor
) -> torch.Tensor:
    positions_3bt, _ = reference.model.get_rope_index(
        given["input_ids"],
        given["mm_token_type_ids"],
        given.get("image_grid_thw"),
        attention_mask=attention_bt,
    )
    return positions_3bt
