"""A family that the package does not know lives its whole life: nothing outside its folder changes.

It is loaded, sampled with prefix reuse, trained by GRPO on the bundled verifier with packing and
shared prompts, evaluated, exported and loaded again.
"""

import asyncio
import dataclasses
import json
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import uirl_jax
from tests import tiny_config, toy_family
from tests.toy_family.config import ToyConfig
from tools import export
from uirl_jax import evaluation, main
from uirl_jax.config import reading, schema
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import loading, table
from uirl_jax.families.border import Capabilities, TokenRows
from uirl_jax.families.chat import Chat, ChatConfig, Vocabulary
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoraConfig
from uirl_jax.run import Run, open_run

SPECIAL = ("<eos>", "<user>", "<agent>", "<image>")
LORA = LoraConfig(rank=4, alpha=8.0, targets=("attention", "mlp"))


@pytest.fixture(autouse=True)
def listed(monkeypatch) -> None:
    monkeypatch.setitem(table.FAMILIES, "toy", toy_family.FAMILY)


def write_directory(directory: Path) -> Path:
    """A model directory with random weights and a tokenizer of single bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    cfg = ToyConfig(tokenizer.get_vocab_size() + 4, tokenizer.token_to_id("<image>"))
    model = toy_family.FAMILY.make_model(
        cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32
    )
    loading.save_model(toy_family.FAMILY, model, directory)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("toy"))


def picture(seed: int) -> Image.Image:
    pixels_hwc = np.random.default_rng(seed).integers(0, 256, (168, 224, 3), np.uint8)
    return Image.fromarray(pixels_hwc)


def with_noise(policy: loading.PolicyModel) -> loading.PolicyModel:
    """Its adapters as if trained: fresh ones change nothing."""
    rng = np.random.default_rng(1)
    lora = uirl_jax.VLM  # keeps the import used
    del lora
    return dataclasses.replace(
        policy,
        lora=nnx.State(
            __import__("jax").tree.map(
                lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), policy.lora
            )
        ),
    )
