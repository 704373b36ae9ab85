"""Small configs of Idefics2, and how transformers' model is called and read."""

from typing import Any

import numpy as np
import torch
import transformers

IMAGE_TOKEN_ID, VOCAB = 290, 300


def _idefics2(text: dict, vision: dict, perceiver: dict, *, tied: bool) -> dict[str, Any]:
    """A config.json in the published layout."""
    return {
        "architectures": ["Idefics2ForConditionalGeneration"],
        "model_type": "idefics2",
        "image_token_id": IMAGE_TOKEN_ID,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "mistral",
            "vocab_size": VOCAB,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
            **text,
        },
        "vision_config": {"model_type": "idefics2_vision", **vision},
        "perceiver_config": {
            "model_type": "idefics2_perceiver",
            "hidden_size": text["hidden_size"],
            "rms_norm_eps": 1e-5,
            **perceiver,
        },
    }


# Grouped heads in text and resampler (idefics2); nothing is a multiple of 8, a table smaller than
# the images, no window (idefics2_odd); heads x head_dim is not the width, one latent block, other
# epsilons, tied, a window shorter than the positions (idefics2_tied). With a theta of 100 few
# tokens turn every pair of a head.
CONFIGS = {
    "idefics2": _idefics2(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 70,
            "patch_size": 7,
        },
        {
            "resampler_n_latents": 5,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
        tied=False,
    ),
    "idefics2_odd": _idefics2(
        {
            "hidden_size": 60,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rope_theta": 100.0,
            "sliding_window": None,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 18,
            "patch_size": 6,
        },
        {
            "resampler_n_latents": 7,
            "resampler_depth": 3,
            "resampler_n_heads": 3,
            "resampler_head_dim": 10,
            "num_key_value_heads": 1,
        },
        tied=False,
    ),
    "idefics2_tied": _idefics2(
        {
            "hidden_size": 30,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 8,
            "rope_theta": 100.0,
            "sliding_window": 256,
        },
        {
            "hidden_size": 20,
            "intermediate_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 65,
            "patch_size": 5,
            "layer_norm_eps": 1e-3,
        },
        {
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 12,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-3,
        },
        tied=True,
    ),
}
CLASSES = {"idefics2": (transformers.Idefics2Config, transformers.Idefics2ForConditionalGeneration)}


def reset(reference: Any) -> None:
    """The model keeps nothing between calls."""


def text_tower(reference: Any) -> Any:
    return reference.model.text_model


def model_inputs(
    token_ids_bt: np.ndarray, pixels: list[np.ndarray], layouts: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """All images in one list, padded to the largest as the processor pads them."""
    del layouts
    inputs = {"input_ids": torch.tensor(token_ids_bt).long()}
    if not pixels:
        return inputs
    height, width = (max(image.shape[axis] for image in pixels) for axis in (1, 2))
    values = np.zeros((1, len(pixels), 3, height, width), np.float32)
    mask = np.zeros((1, len(pixels), height, width), np.int64)
    for number, image_chw in enumerate(pixels):
        own = slice(image_chw.shape[1]), slice(image_chw.shape[2])
        values[0, number, :, *own] = image_chw
        mask[0, number, *own] = 1
    images = {"pixel_values": torch.tensor(values), "pixel_attention_mask": torch.tensor(mask)}
    return {**inputs, **images}


def vision_blocks(reference: Any) -> Any:
    return reference.model.vision_model.encoder.layers


def patches(out_npd: torch.Tensor, layouts: list[tuple[int, ...]]) -> torch.Tensor:
    """Without the patches that pad an image to the largest grid."""
    rows, columns = (max(layout[axis] for layout in layouts) for axis in (0, 1))
    grids = out_npd.reshape(len(layouts), rows, columns, -1)
    return torch.cat(
        [grid[:r, :c].flatten(end_dim=1) for grid, (r, c) in zip(grids, layouts, strict=True)]
    )


def visual_tokens(reference: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    features = reference.model.get_image_features(
        given["pixel_values"], given["pixel_attention_mask"]
    )
    return torch.cat(features.pooler_output)


def positions(
    reference: Any, given: dict[str, torch.Tensor], attention_bt: torch.Tensor
) -> torch.Tensor:
    """What the text model makes of right-padded rows where it is given none."""
    del reference, given
    return torch.arange(attention_bt.shape[1]).expand(1, *attention_bt.shape)
