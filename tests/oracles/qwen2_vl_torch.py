"""Oracle: Qwen2-VL of transformers in torch, float32, small and with random weights."""

import dataclasses

import numpy as np
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

IMAGE_TOKEN_ID = 90


def config_dict(*, head_dim: int, tied: bool) -> dict:
    """A config.json in the published, flat layout."""
    sections = {32: [4, 6, 6], 64: [8, 12, 12], 128: [16, 24, 24]}[head_dim]
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 4 * head_dim,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 101,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        "vision_config": {
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": 4 * head_dim,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def make_reference(*, head_dim: int, tied: bool) -> Qwen2VLForConditionalGeneration:
    """Weights of a scale at which every part of the model moves the logits, biases included."""
    config = Qwen2VLConfig(**config_dict(head_dim=head_dim, tied=tied))
    config._attn_implementation = "eager"
    reference = Qwen2VLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(head_dim + tied)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                norm = "norm" in name or "ln_q" in name
                parameter.copy_(0.2 * noise + (norm and name.endswith("weight")))
    return reference


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the reference computed for right-padded rows."""

    logits_btv: np.ndarray
    text_blocks_lbtd: np.ndarray  # residual stream after every block
    vision_blocks_lpd: np.ndarray | None  # all patches of all images, one after the other
    positions_3bt: np.ndarray


def run(
    reference: Qwen2VLForConditionalGeneration,
    token_ids_bt: np.ndarray,
    attention_bt: np.ndarray,
    patches: list[np.ndarray],
    grids: list[tuple[int, int, int]],
) -> Outputs:
    """One forward pass with every block's output caught by a hook."""
    text, vision = [], []
    model = reference.model
    hooks = [
        block.register_forward_hook(lambda _m, _a, out, into=into: into.append(out))
        for blocks, into in ((model.language_model.layers, text), (model.visual.blocks, vision))
        for block in blocks
    ]
    ids = torch.tensor(token_ids_bt).long()
    attention = torch.tensor(attention_bt).long()
    kinds = (ids == IMAGE_TOKEN_ID).int()
    images = {}
    if grids:
        images = {
            "pixel_values": torch.tensor(np.concatenate(patches)),
            "image_grid_thw": torch.tensor(grids),
        }
    with torch.no_grad():
        logits = reference(
            input_ids=ids, attention_mask=attention, mm_token_type_ids=kinds, **images
        ).logits
        positions, _ = model.get_rope_index(
            ids, kinds, images.get("image_grid_thw"), attention_mask=attention
        )
    for hook in hooks:
        hook.remove()
    return Outputs(
        logits.numpy(),
        torch.stack(text).numpy(),
        torch.stack(vision).numpy() if vision else None,
        positions.numpy(),
    )
