"""A random model of two layers, requests to its engine, and a loop without a cache beside it."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.policies import random_policy, screen_of
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.families.border import PlacedScreen, Screen, TokenRows
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoraConfig

VOCAB, IMAGE_TOKEN, END_TOKEN = 64, 60, 1
FORBIDDEN = (60, 61, 62, 63)
ORACLE_TOKENS = 48  # the oracle pads every sequence to this, so that it compiles once
MODEL_CFG = Qwen2VLConfig.from_dict(
    {
        "model_type": "qwen2_vl",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": True,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
        },
    }
)
# Patches of 4 pixels; means and deviations are those of the published models.
MODEL_CFG = dataclasses.replace(MODEL_CFG, images=ImageConfig(patch_size=4, min_pixels=64))
GRIDS = {"a": (1, 4, 4), "b": (1, 4, 6), "c": (1, 2, 4)}  # 4, 6 and 2 visual tokens
CFG = EngineConfig(  # few sizes: each costs seconds to compile
    batch_sizes=(1, 4),
    context_lengths=(32,),
    prefill_rows=(2,),
    prefill_lengths=(12,),
    image_rows=(2,),
    image_row_patches=32,
    max_new_tokens=8,
    decode_steps=3,
)


@functools.cache
def make_policy() -> PolicyModel:
    """A random model whose adapters change what it says (a fresh one's are zero)."""
    policy = random_policy(MODEL_CFG, LoraConfig(rank=2, alpha=4.0))
    return dataclasses.replace(policy, trainable=redrawn(policy.trainable, 1))


def redrawn(lora: nnx.State, seed: int) -> nnx.State:
    leaves, structure = jax.tree.flatten(lora)
    rng = np.random.default_rng(seed)
    drawn = [jnp.array(rng.normal(size=leaf.shape) * 0.5, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, drawn)


def new_engine(
    policy: PolicyModel, *, cfg=CFG, end=(END_TOKEN,), forbidden=FORBIDDEN, decode=None
) -> Engine:
    return Engine(policy, Vocabulary(tuple(end), tuple(forbidden), decode), cfg, policy_version=7)


@functools.cache
def screen(key: str) -> Screen:
    rng = np.random.default_rng(ord(key))
    patches_pc = rng.integers(0, 256, (np.prod(GRIDS[key]), 3 * 4 * 4), np.uint8)
    return screen_of(key, GRIDS[key], patches_pc, patch_size=4)


def named(asked: SampleRequest, *keys: str) -> SampleRequest:
    """The request with other names for its screens."""
    screens = [
        dataclasses.replace(one, key=key) for one, key in zip(asked.screens, keys, strict=True)
    ]
    return dataclasses.replace(asked, screens=tuple(screens))


def request(seed=0, text=5, images="", *, temperature=1.0, max_new_tokens=8) -> SampleRequest:
    """A context with `text` random tokens, the screenshots in the middle of them."""
    rng = np.random.default_rng(1000 + seed)
    words = rng.integers(2, 60, text).tolist()
    visual: list[int] = []
    for key in images:
        visual += [62, *[IMAGE_TOKEN] * screen(key).tokens, 63]
    ids = np.array(words[: text // 2] + visual + words[text // 2 :])
    return SampleRequest(
        context_ids=ids.astype(np.int32),
        screens=tuple(map(screen, images)),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )


def sample_all(engine: Engine, asked: list[SampleRequest]) -> list[SampleResult]:
    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            return await asyncio.gather(*map(engine.sample, asked))

    return asyncio.run(run())


MIXED = [
    request(0, 5, "a"),
    request(1, 14, ""),
    request(2, 7, "ab"),
    request(3, 6, "ca", temperature=0.7),
    request(4, 9, "", temperature=1.5),
    request(5, 1, "", max_new_tokens=3),
    request(6, 16, "b"),
]


@jax.jit
def learner_pass(graphdef, frozen, lora, vision, rows, heat):
    """The learner's functions on one padded row: logits of every position, and token_logprobs."""
    model = nnx.merge(graphdef, lora, frozen)
    x_btd = model.hidden(rows, model.encode_images(vision))
    forbidden_v = np.isin(np.arange(VOCAB), FORBIDDEN)
    scores_bt = scoring.token_logprobs(
        model, x_btd, rows.token_ids_bt, temperature=heat, forbidden_v=forbidden_v
    )
    return model.logits(x_btd)[0], scores_bt[0]


def without_cache(
    policy: PolicyModel, asked: SampleRequest, sampled, *, lora: nnx.State | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Every screenshot in a row of its own, the whole sequence anew; (logits_tv, scores_t)."""
    ids = np.concatenate([asked.context_ids, np.array(sampled, np.int32)])
    length, inputs = len(ids), policy.inputs
    placed = [PlacedScreen(one, row, 0, 1) for row, one in enumerate(asked.screens)]
    packed = inputs.pack_screens(placed, rows=4, row_patches=24)
    rows_v = [
        first + token
        for first, one in zip(packed.first_tokens, asked.screens, strict=True)
        for token in range(one.tokens)
    ]
    token_ids_bt = np.zeros((1, ORACLE_TOKENS), np.int32)
    token_ids_bt[0, :length] = ids
    vision_index_bt = np.full((1, ORACLE_TOKENS), -1, np.int32)
    vision_index_bt[0, :length] = vision_index(ids, IMAGE_TOKEN, rows_v)
    positions_abt = np.zeros((3, 1, ORACLE_TOKENS), np.int32)
    positions_abt[:, 0, :length] = inputs.positions(ids, asked.screens)
    segment_ids_bt = (np.arange(ORACLE_TOKENS) < length)[None].astype(np.int32)
    logits_tv, scores_t = learner_pass(
        policy.graphdef,
        policy.frozen,
        policy.trainable if lora is None else lora,
        packed.arrays,
        TokenRows(token_ids_bt, positions_abt, segment_ids_bt, vision_index_bt),
        np.float32(asked.temperature or 1.0),
    )
    return np.array(logits_tv), np.array(scores_t)


def masked_log_softmax(logits_tv: np.ndarray, temperature: float, forbidden) -> np.ndarray:
    scaled_tv = logits_tv.astype(np.float64) / (temperature or 1.0)
    scaled_tv[:, list(forbidden)] = -np.inf
    scaled_tv -= scaled_tv.max(axis=-1, keepdims=True)
    return scaled_tv - np.log(np.exp(scaled_tv).sum(axis=-1, keepdims=True))


def next_turn(one: SampleRequest, result: SampleResult, text: int, images: str) -> SampleRequest:
    """The context goes on: what was sampled, a new screenshot, some words."""
    more = request(len(result.token_ids), text, images)
    return dataclasses.replace(
        one,
        context_ids=np.concatenate([one.context_ids, result.token_ids, more.context_ids]),
        screens=(*one.screens, *more.screens),
        seed=one.seed + 100,
    )


def assert_logprobs(
    policy: PolicyModel, asked: SampleRequest, result: SampleResult, lora: nnx.State | None = None
) -> None:
    """Those of the learner on the same tokens."""
    start, count = len(asked.context_ids), len(result.token_ids)
    _, scores_t = without_cache(policy, asked, result.token_ids, lora=lora)
    np.testing.assert_allclose(result.full_logprobs, scores_t[start : start + count], atol=1e-4)
