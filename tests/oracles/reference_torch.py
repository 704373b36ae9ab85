"""Oracle: transformers' models of all families in torch, float32, small, random weights.

A family's module has its configs and how its model is called and read.
"""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch

from tests.oracles import (
    florence2_torch,
    idefics2_torch,
    llava_torch,
    paligemma_torch,
    qwen_torch,
)

IMAGE_TOKEN_ID, VOCAB = 290, 300  # in every config
CONFIGS = {
    **qwen_torch.CONFIGS,
    **llava_torch.CONFIGS,
    **idefics2_torch.CONFIGS,
    **paligemma_torch.CONFIGS,
    **florence2_torch.CONFIGS,
}
_CLASSES = {
    **qwen_torch.CLASSES,
    **llava_torch.CLASSES,
    **idefics2_torch.CLASSES,
    **paligemma_torch.CLASSES,
    **florence2_torch.CLASSES,
}
_FAMILIES = {
    "llava": llava_torch,
    "idefics2": idefics2_torch,
    "paligemma": paligemma_torch,
    "florence2": florence2_torch,
}
PREFIX_LM = ("paligemma",)  # families whose contexts see all of themselves


def _family(model_type: str) -> Any:
    return _FAMILIES.get(model_type, qwen_torch)


def config_class(name: str) -> Any:
    return _CLASSES[CONFIGS[name]["model_type"]][0]


def model_class(name: str) -> Any:
    return _CLASSES[CONFIGS[name]["model_type"]][1]


def make_reference(name: str) -> Any:
    """Weights of a scale at which every part of the model moves the logits, biases included."""
    config = config_class(name)(**copy.deepcopy(CONFIGS[name]))
    config._attn_implementation = "eager"
    reference = model_class(name)(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for leaf, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:  # norms of exactly 1 and biases of 0 would hide mistakes
                norm = "norm" in leaf or "ln_q" in leaf
                if config.model_type in PREFIX_LM and "language_model" in leaf:
                    norm = False  # Gemma's multiply by 1 + weight
                parameter.copy_(0.2 * noise + (norm and leaf.endswith("weight")))
    return reference


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the reference computed for right-padded rows."""

    logits_btv: np.ndarray
    text_blocks_lbtd: np.ndarray  # residual stream after every block and what is added there
    vision_blocks_lpd: np.ndarray  # all patches of all images, one after the other
    visual_me: np.ndarray  # visual tokens of all images: the embedding, then every level
    positions_abt: np.ndarray


def reset(reference: Any) -> None:
    """Forgets what the model keeps between calls."""
    _family(reference.config.model_type).reset(reference)


def model_inputs(
    model_type: str,
    token_ids_bt: np.ndarray,
    pixels: list[np.ndarray],
    layouts: list[tuple[int, ...]],
    sampled_bt: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """What the family's model takes beside an attention mask.

    Args:
      pixels, layouts: of every image (family_world.pixels_of, Screen.layout).
      sampled_bt: int[B,T], 1 at sampled tokens, which only PREFIX_LM families tell from others;
        None: nothing was sampled.
    """
    told = {"sampled_bt": sampled_bt} if model_type in PREFIX_LM else {}
    return _family(model_type).model_inputs(token_ids_bt, pixels, layouts, **told)


def run(
    reference: Any,
    token_ids_bt: np.ndarray,
    attention_bt: np.ndarray,
    pixels: list[np.ndarray],
    layouts: list[tuple[int, ...]],
    sampled_bt: np.ndarray | None = None,
) -> Outputs:
    """One forward pass; what enters a layer is what the one before it has left, levels included."""
    family = _family(reference.config.model_type)
    text, vision = [], []

    def entering(_module, args, kwargs):
        text.append(args[0] if args else kwargs["hidden_states"])

    tower = family.text_tower(reference)
    after = (*tower.layers[1:], tower.norm)
    hooks = [part.register_forward_pre_hook(entering, with_kwargs=True) for part in after]
    hooks += [
        block.register_forward_hook(lambda _m, _a, out: vision.append(family.patches(out, layouts)))
        for block in family.vision_blocks(reference)
    ]
    given = model_inputs(reference.config.model_type, token_ids_bt, pixels, layouts, sampled_bt)
    attention = torch.tensor(attention_bt).long()
    family.reset(reference)
    with torch.no_grad():
        logits = reference(**given, attention_mask=attention).logits
        for hook in hooks:
            hook.remove()
        positions_abt = family.positions(reference, given, attention)
        visual_me = family.visual_tokens(reference, given).numpy() if pixels else np.zeros(0)
    return Outputs(
        logits.numpy(),
        torch.stack(text).numpy(),
        torch.stack(vision).numpy() if vision else np.zeros(0),
        visual_me,
        positions_abt.numpy(),
    )
