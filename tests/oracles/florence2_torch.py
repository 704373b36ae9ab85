"""Small configs of Florence-2, and how transformers' model is called and read.

Rows hold what the encoder reads, then what the decoder does; `split` cuts them as our inputs do.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import transformers

IMAGE_TOKEN_ID, VOCAB = 290, 300
BOS, END = 0, 2  # ids; END ends the encoder's part, and opens the decoder's


def _florence2(text: dict, vision: dict) -> dict[str, Any]:
    """A config.json in transformers' own layout."""
    return {
        "architectures": ["Florence2ForConditionalGeneration"],
        "model_type": "florence2",
        "is_encoder_decoder": True,
        "image_token_id": IMAGE_TOKEN_ID,
        "bos_token_id": BOS,
        "pad_token_id": 1,
        "eos_token_id": END,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "bart",
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "bos_token_id": BOS,
            "pad_token_id": 1,
            "eos_token_id": END,
            "decoder_start_token_id": END,
            "forced_eos_token_id": None,
            "tie_word_embeddings": True,
            **text,
        },
        "vision_config": {
            "model_type": "florence_vision",
            "projection_dim": text["d_model"],
            "max_temporal_embeddings": 7,
            **vision,
        },
    }


# The published strides, windows that fit two stages and are padded in the others (florence2); no
# width is a multiple of 8, towers of other depths and heads, other norms of the stages and one that
# keeps its size, scaled embeddings (florence2_odd); windows larger than all stages but the first,
# which is no multiple of one (florence2_window).
CONFIGS = {
    "florence2": _florence2(
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
        },
        {
            "depths": [1, 1, 2, 1],
            "embed_dim": [16, 16, 32, 32],
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 4, 4, 8],
            "window_size": 4,
            "max_position_embeddings": 10,
        },
    ),
    "florence2_odd": _florence2(
        {
            "d_model": 36,
            "encoder_layers": 3,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 3,
            "encoder_ffn_dim": 50,
            "decoder_ffn_dim": 44,
            "scale_embedding": True,
        },
        {
            "depths": [2, 1, 1, 2],
            "embed_dim": [12, 18, 20, 30],
            "num_heads": [3, 2, 5, 3],
            "num_groups": [2, 3, 4, 5],
            "patch_size": [5, 3, 1, 4],
            "patch_stride": [3, 2, 1, 2],
            "patch_padding": [1, 1, 0, 1],
            "patch_prenorm": [True, False, True, False],
            "mlp_ratio": 1.7,
            "window_size": 5,
            "max_position_embeddings": 3,
        },
    ),
    "florence2_window": _florence2(
        {
            "d_model": 30,
            "encoder_layers": 1,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 5,
            "encoder_ffn_dim": 28,
            "decoder_ffn_dim": 60,
        },
        {
            "depths": [1, 2, 1, 1],
            "embed_dim": [10, 14, 22, 26],
            "num_heads": [1, 7, 2, 13],
            "num_groups": [5, 1, 11, 2],
            "patch_size": [3, 2, 2, 3],
            "patch_stride": [2, 2, 2, 2],
            "patch_padding": [1, 0, 0, 1],
            "mlp_ratio": 3.0,
            "window_size": 13,
            "max_position_embeddings": 5,
        },
    ),
}
CLASSES = {
    "florence2": (transformers.Florence2Config, transformers.Florence2ForConditionalGeneration)
}
SIDES = {"florence2": 96, "florence2_odd": 24, "florence2_window": 48}  # pixels of a square


def split(ids_t: np.ndarray) -> int:
    """Where the decoder's tokens begin: at the second of the first two end tokens that touch."""
    is_end_t = ids_t == END
    return int(np.flatnonzero(is_end_t[:-1] & is_end_t[1:])[0]) + 1


def reset(reference: Any) -> None:
    """The model keeps nothing between calls."""


def model_inputs(
    token_ids_bt: np.ndarray, pixels: list[np.ndarray], layouts: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Of a single row."""
    del layouts  # all images are squares of one size
    (ids_t,) = token_ids_bt
    first = split(ids_t)
    images = {"pixel_values": torch.tensor(np.stack(pixels))} if pixels else {}
    return {
        "input_ids": torch.tensor(ids_t[None, :first]).long(),
        "decoder_input_ids": torch.tensor(ids_t[None, first:]).long(),
        **images,
    }


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the reference computed for one row: of the encoder's tokens, or of the decoder's."""

    encoder_lsd: np.ndarray  # after every block
    decoder_ltd: np.ndarray
    logits_tv: np.ndarray
    vision_lipd: list[np.ndarray]  # the picture after every block, stage by stage in one list
    visual_md: np.ndarray  # visual tokens of all images


def run_row(reference: Any, ids_t: np.ndarray, pixels: list[np.ndarray]) -> Outputs:
    """One forward pass of a row without padding."""
    vision: list[np.ndarray] = []

    def behind(_module, _args, out):
        vision.append(out.flatten(2).transpose(1, 2).numpy())  # from [I,D,Y,X]

    given = model_inputs(ids_t[None], pixels, [])
    stages = reference.model.vision_tower.blocks
    hooks = [block.register_forward_hook(behind) for stage in stages for block in stage]
    with torch.no_grad():
        out = reference(**given, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        visual = np.zeros(0)
        if pixels:
            features = reference.model.get_image_features(given["pixel_values"]).pooler_output
            visual = features.flatten(end_dim=1).numpy()
    return Outputs(
        torch.cat(out.encoder_hidden_states[1:]).numpy(),
        torch.cat(out.decoder_hidden_states[1:]).numpy(),
        out.logits[0].numpy(),
        vision,
        visual,
    )
