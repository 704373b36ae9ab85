"""Which tensors of Qwen2-VL's published files make up which leaf of the model: one table.

What reads and writes base weights (qwen2_vl_weights) and adapters (peft_adapters) goes by it, and
so do their lists of what does not fit. Touches no file and no array.
"""

import dataclasses
import re

import jax
from flax import nnx

from uirl_jax.models.qwen2_vl_config import Qwen2VLConfig
from uirl_jax.models.sharding import leaf_names

# Leaf of a block -> tensor of a layer, under the prefix of its tower. `kernel` is the transpose of
# torch's `weight`.
_TEXT_BLOCK = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_VISION_BLOCK = {
    "norm1": "norm1",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "norm2": "norm2",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_SINGLE = {
    "visual/patch_embed/kernel": "visual.patch_embed.proj.weight",
    "visual/merger_norm/scale": "visual.merger.ln_q.weight",
    "visual/merger_norm/bias": "visual.merger.ln_q.bias",
    "visual/merger_fc1/kernel": "visual.merger.mlp.0.weight",
    "visual/merger_fc1/bias": "visual.merger.mlp.0.bias",
    "visual/merger_fc2/kernel": "visual.merger.mlp.2.weight",
    "visual/merger_fc2/bias": "visual.merger.mlp.2.bias",
    "text/embedding": "model.embed_tokens.weight",
    "text/final_norm/scale": "model.norm.weight",
    "text/lm_head/kernel": "lm_head.weight",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the base and where it comes from."""

    path: str  # "text/blocks/q_proj/kernel"
    tensors: tuple[str, ...]  # in the published layout; one a layer where the leaf is stacked
    shape: tuple[int, ...]  # of the leaf
    stacked: bool
    transposed: bool
    tensor_shape: tuple[int, ...]  # of each tensor


def leaves_of(cfg: Qwen2VLConfig, base: nnx.State) -> list[Leaf]:
    """The table, filled in for one model: every leaf of the base that tensors are read for.

    The scale of an int8 kernel is none of them: it comes from the kernel's own tensors.
    """
    leaves = []
    for key_path, array in jax.tree.leaves_with_path(base):
        names = leaf_names(key_path)
        if names[-1] == "kernel_scale":
            continue
        path = "/".join(names)
        stacked = names[1] == "blocks"
        shape = tuple(array.shape)
        if stacked:
            table, prefix = (
                (_TEXT_BLOCK, "model.layers")
                if names[0] == "text"
                else (_VISION_BLOCK, "visual.blocks")
            )
            suffix = "bias" if names[3] == "bias" else "weight"
            tensors = tuple(f"{prefix}.{i}.{table[names[2]]}.{suffix}" for i in range(shape[0]))
        else:
            tensors = (_SINGLE[path],)
        transposed = names[-1] == "kernel"
        tensor_shape = shape[1:] if stacked else shape
        if transposed:
            tensor_shape = tensor_shape[::-1]
        if path == "visual/patch_embed/kernel":
            vision = cfg.vision
            tensor_shape = (
                *(vision.embed_dim, vision.in_channels, vision.temporal_patch_size),
                *(vision.patch_size, vision.patch_size),
            )
        leaves.append(Leaf(path, tensors, shape, stacked, transposed, tensor_shape))
    return leaves


def published_name(name: str) -> str | None:
    """A tensor's name in the published layout, from either layout; None for what is no weight.

    Since version 4.52 transformers holds both towers under `model.`:
        model.language_model.layers.0...  ->  model.layers.0...
        model.visual.blocks.0...          ->  visual.blocks.0...
    """
    if name.endswith("rotary_emb.inv_freq") or name.endswith("rotary_pos_emb.inv_freq"):
        return None
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name)


def current_name(published: str) -> str:
    """The reverse of published_name, as transformers has named its modules since version 4.52."""
    name = re.sub(r"^model\.", "model.language_model.", published)
    return re.sub(r"^visual\.", "model.visual.", name)
