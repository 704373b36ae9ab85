"""A model directory in Hugging Face's format with random weights: real in everything but size."""

import json
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from tools.base_models import qwen_tokenizer
from uirl_jax.families import loading, qwen2_vl
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL

CONFIG = Path(__file__).with_name("tiny_config.py")


def write(directory: Path, seed: int = 0, *, tied: bool = True) -> Path:
    texts = ["Click the red button.", "click(120, 80)", "user\n", "assistant\n"] * 20
    tokenizer = qwen_tokenizer.train_tokenizer(texts, 320)
    cfg = Qwen2VLConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vision=VisionConfig(depth=1, embed_dim=32, num_heads=2, mlp_ratio=2, hidden_size=32),
        mrope_section=(2, 3, 3),
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )
    model = Qwen2VL(cfg, lora=None, rngs=nnx.Rngs(seed), param_dtype=jnp.float32)
    loading.save_model(qwen2_vl.FAMILY, model, directory)
    qwen_tokenizer.save(tokenizer, directory)
    image_cfg = ImageConfig(min_pixels=28 * 28, max_pixels=512 * 512)
    (directory / "preprocessor_config.json").write_text(json.dumps(image_cfg.to_dict()))
    return directory
