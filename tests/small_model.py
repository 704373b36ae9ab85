"""One Qwen2-VL of a few thousand parameters, shared by the tests of models: compiled once a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig

LORA = LoraConfig(rank=2, alpha=8.0)
CONFIG = Qwen2VLConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    mrope_section=(2, 3, 3),
    tie_word_embeddings=True,
    vision=VisionConfig(
        depth=2, embed_dim=16, num_heads=2, mlp_ratio=2, hidden_size=32, patch_size=4
    ),
)
UNTIED = dataclasses.replace(CONFIG, tie_word_embeddings=False)


def fresh(
    cfg: Qwen2VLConfig = CONFIG, lora: LoraConfig | None = LORA, remat: Remat = "none"
) -> Qwen2VL:
    """As a run starts: adapters whose B is zero, norms of one, biases of zero."""
    return Qwen2VL(cfg, lora=lora, rngs=nnx.Rngs(0), remat=remat)


def noisy(
    cfg: Qwen2VLConfig = CONFIG, lora: LoraConfig | None = LORA, remat: Remat = "none"
) -> Qwen2VL:
    """No leaf is constant, so that one that is read from the wrong place, or not at all, shows."""
    graphdef, state = nnx.split(fresh(cfg, lora, remat))
    rng = np.random.default_rng(0)
    return nnx.merge(
        graphdef,
        jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x) + 0.1 * rng.normal(size=x.shape), x.dtype), state
        ),
    )
