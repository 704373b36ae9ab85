"""A tiny model and batch, shared by the tests of the learner's step."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.learner import state as learner_state
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.shards import batching
from uirl_jax.types import TrainBatch

OPTIMIZER = learner_state.OptimizerConfig(lr=1e-2)
RULES = WEIGHTS.sharding_rules


def tiny_config() -> Qwen2VLConfig:
    vision = VisionConfig(
        depth=2, embed_dim=32, num_heads=2, mlp_ratio=2, hidden_size=32, patch_size=4
    )
    return Qwen2VLConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vision=vision,
        mrope_section=(2, 1, 1),
        initializer_range=0.2,
        tie_word_embeddings=True,
    )


def make_model(seed: int = 0, **lora):
    """(graphdef, adapters that are not zero, frozen)."""
    model = Qwen2VL(
        tiny_config(), lora=LoraConfig(rank=4, **lora), rngs=nnx.Rngs(seed), param_dtype=jnp.float32
    )
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    keys = iter(jax.random.split(jax.random.key(seed + 1), 100))
    lora = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape), lora)
    return graphdef, lora, frozen


def make_batch(rows: int = 8, tokens: int = 24, images: int = 8, seed: int = 0) -> TrainBatch:
    """Rows of one sequence each: 4 visual tokens, a prompt, sampled tokens, padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, tokens + 1, rows)
    segments_bt = (np.arange(tokens) < lengths[:, None]).astype(np.int32)
    mask_bt = ((np.arange(tokens) >= 10) & (segments_bt > 0)).astype(np.float32)
    vision_bt = np.full((rows, tokens), -1, np.int32)
    vision_bt[:, 2:6] = 4 * (np.arange(rows) % images)[:, None] + np.arange(4)
    patch_positions = np.array([(row, column) for row in range(4) for column in range(4)])
    return TrainBatch(
        token_ids_bt=rng.integers(0, 64, (rows, tokens)).astype(np.int32) * segments_bt,
        segment_ids_bt=segments_bt,
        prefix_segments_bt=None,
        positions_abt=np.broadcast_to(np.arange(tokens, dtype=np.int32), (3, rows, tokens)).copy(),
        completion_mask_bt=mask_bt,
        sampled_index_bs=batching.sampled_index(
            mask_bt, 16 if mask_bt.sum(1).max() <= 16 else tokens - 10
        ),
        vision_index_bt=vision_bt,
        behaviour_logprobs_bt=-rng.exponential(1, (rows, tokens)).astype(np.float32) * mask_bt,
        advantages_bt=rng.normal(0, 1, (rows, 1)).astype(np.float32) * mask_bt,
        weights_bt=mask_bt / mask_bt.sum(),
        turn_ids_bt=mask_bt.astype(np.int32),
        values_bt=None,
        returns_bt=None,
        trajectory_bs=np.full((rows, 1), -1),
        token_bs=np.full((rows, 1), -1),
        vision={
            "patches_ipc": rng.integers(0, 256, (images, 16, 48), np.uint8),
            "patch_positions_ip2": np.broadcast_to(patch_positions, (images, 16, 2)).astype(
                np.int32
            ),
            "patch_segments_ip": np.ones((images, 16), np.int32),
        },
    )


def assert_trees_close(left, right, **tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)
